"""``pase diagnose``."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

import pase
from bench.cases.timelines import ImaginedRun, simulate, trace, write
from tests.command import printed, reported, run


def test_diagnose_explains_with_numbers(tmp_path: Path) -> None:
    slow = ImaginedRun(ranks=3, iterations=4, kernel_us=300.0, between_us=4.0, slow_rank=1, slow_by=1.4)
    folder = write(simulate(slow), tmp_path / "slow")
    page, timeline = tmp_path / "page.html", tmp_path / "t.json"
    report = reported("diagnose", folder, "-o", page, "--timeline", timeline)
    kinds = [f["kind"] for f in report["findings"]]
    assert "straggler" in kinds
    f = report["findings"][kinds.index("straggler")]
    assert "rank 1" in f["title"]
    assert 0.2 < f["share"] < 0.4
    assert f["evidence"]
    text = page.read_text()
    assert "<div data-timeline='iteration'>" in text and "wait for rank 1" in text
    assert any(e.get("cat") == "finding" for e in json.loads(timeline.read_text())["traceEvents"])


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layout") / "layout.json"
    pase.compile("zoo:mlp", devices=2, machine="h100x8", baselines=False).save(path)
    return path


def test_a_plan_beside_the_run(tmp_path: Path, layout: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=2, iterations=4)), tmp_path / "run")
    page = tmp_path / "page.html"
    plan = reported("diagnose", folder, "--plan", layout, "-o", page)["plan"]
    told = sum(a["difference_s"] for a in plan["assumptions"])
    assert told == pytest.approx(plan["measured_s"] - plan["predicted_s"])
    assert "Assumptions that were off" in page.read_text()


def test_a_memory_snapshot_beside_the_plan(tmp_path: Path, layout: Path) -> None:
    path, page = tmp_path / "s.pickle", tmp_path / "page.html"
    block = {"address": 0, "size": 512, "state": "active_allocated", "frames": []}
    path.write_bytes(
        pickle.dumps({"segments": [{"device": 0, "address": 0, "total_size": 1024, "blocks": [block]}]})
    )
    report = reported("diagnose", path, "--plan", layout, "-o", page)
    assert report["devices"][0]["nbytes"] == 512
    assert report["plan"]["total"] == pase.load(layout).memory.total
    assert "account" in page.read_text()
    assert run("diagnose", path, "--timeline", tmp_path / "t.json")[0] == 2


def test_what_is_missing_of_a_trace_is_said_first(tmp_path: Path) -> None:
    """A conclusion from half a trace comes after the note that it is one."""
    text = json.dumps(trace(simulate(ImaginedRun(ranks=1, iterations=6)), 0))
    (tmp_path / "a.json").write_text(text[: 3 * len(text) // 4])
    first, *then = printed("diagnose", tmp_path / "a.json").splitlines()
    assert first.startswith("note: ") and "cut or damaged" in first
    said = " ".join(then)
    assert "Do not rely on what-ifs of this run: " in said and "what is missing from" in said
    findings = reported("diagnose", tmp_path / "a.json")["findings"]
    assert any(f["measured_s"] for f in findings) and not any(f["cost_s"] for f in findings)
    assert run("replay", tmp_path / "a.json", "--what-if", "host=0.5")[0] == 1
