"""``pase report``."""

from __future__ import annotations

import json
from pathlib import Path

import pase
from pase.api import Plan
from tests.command import printed
from tests.command import run as command


def test_the_page(plan: Plan, tmp_path: Path) -> None:
    """The page names every layer that costs something, and escapes text that comes from the layout."""
    path, page = tmp_path / "layout.json", tmp_path / "page.html"
    plan.save(path)
    data = json.loads(path.read_text())
    data["cost"]["skipped"] = {"<script>alert(1)</script>": "a & b"}
    path.write_text(json.dumps(data))
    printed("report", path, "-o", page)
    text = page.read_text()
    assert "<script>alert" not in text and "&lt;script&gt;" in text and "a &amp; b" in text
    assert all(n.name in text for n in plan.nodes if n.cost.total)
    assert all(p in text for p in plan.parameters)


def test_a_whole_run_is_on_the_page_and_in_the_json(tmp_path: Path) -> None:
    path, page = tmp_path / "layout.json", tmp_path / "page.html"
    pase.compile("zoo:gpt2?batch=8&layers=1&seq=64", devices=2, baselines=False).save(path)
    asked = "report", path, "-o", page, "--time-limit", "1"
    run = json.loads(printed(*asked, "--tokens", "1T", "--price", "2", "--json"))["run"]
    assert run["steps"] == -(-(10**12) // (8 * 64)) and run["cost"] == 2 * run["device_hours"]
    assert f"{run['steps']:,} steps" in page.read_text()
    code, _, said = command("report", path, "-o", page, "--price", "2")
    assert code == 2 and "--tokens" in said
