"""``pase report``."""

from __future__ import annotations

import json
from pathlib import Path

from pase.api import Plan
from tests.command import printed


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
