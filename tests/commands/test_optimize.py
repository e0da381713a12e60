"""``pase optimize``."""

from __future__ import annotations

import json
from pathlib import Path

from bench.cases.timelines import ImaginedRun, simulate, write
from tests.command import printed, reported


def test_optimize_reports_steps_and_buckets(tmp_path: Path) -> None:
    run = ImaginedRun(
        ranks=2, iterations=3, layers=16, bucket_layers=1, bucket_bytes=1 << 18, bucket_growth=0.2
    )
    run.collective_us = 300.0
    folder = write(simulate(run), tmp_path / "x")
    report = reported("optimize", folder, "--passes", "tensor-fusion", "-o", tmp_path / "plan.json")
    assert report["after_s"] < report["before_s"]
    assert report["buckets"] and report["tensors"] == 16
    assert json.loads((tmp_path / "plan.json").read_text()) == report
    assert any(s["kept"] for s in report["steps"])
    for bucket in report["buckets"]:
        first, last = bucket["after"]
        assert bucket["operation"] == "all_reduce" and "bwd" in first and first != last
    said = printed("optimize", folder, "--passes", "tensor-fusion", "--budget", "600")
    assert f"ready after {report['buckets'][0]['after'][0]} .." in said
