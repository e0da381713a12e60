"""``pase diagnose``."""

from __future__ import annotations

import json
from pathlib import Path

from bench.cases.timelines import ImaginedRun, simulate, write
from tests.command import reported


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
