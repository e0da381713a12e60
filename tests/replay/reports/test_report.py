"""Reports of one run name the same iteration, and no error that nothing shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from tests.command import printed, reported


def test_reports_name_the_same_iteration_and_one_clock(tmp_path: Path) -> None:
    run = ImaginedRun(
        ranks=2, iterations=5, bucket_layers=1, bucket_bytes=1 << 18, bucket_growth=0.2, noise=0.02
    )
    folder = write(simulate(run), tmp_path / "x")
    reports = {}
    for command in ("replay", "diagnose", "optimize"):
        reports[command] = reported(command, folder)
    for key in ("measured_s", "replayed_s", "headline", "held_out_error", "naive_error", "unexplained"):
        assert reports["replay"][key] == reports["diagnose"][key] == reports["optimize"][key]
    o = reports["optimize"]
    assert o["before_s"] == o["replayed_s"] == reports["diagnose"]["iteration_s"]
    chain = [o["before_s"], *(s["after_s"] for s in o["steps"])]
    assert [s["before_s"] for s in o["steps"]] == chain[:-1] and o["after_s"] == chain[-1]
    whole = sum(reports["replay"]["critical_path"].values())
    assert whole == pytest.approx(o["replayed_s"], rel=1e-9)
    for f in reports["diagnose"]["findings"]:
        assert all(0 <= e["start_s"] < 1 for e in f["evidence"])


def test_one_iteration_states_no_error(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=1, iterations=1)), tmp_path / "x")
    report = reported("replay", folder)
    assert "unknown" in report["headline"]
    assert [r["error"] for r in report["ranks"]] == [None]
    assert [i["error"] for i in report["iterations"]] == [None]
    assert "0.00%" not in printed("replay", folder).replace("0.0% of", "")
