"""``pase replay``."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from pase.replay.traces.timeline_io import schema
from tests.command import printed, reported, run


def test_replay_prints_the_contract(traces: Path, tmp_path: Path) -> None:
    files = tmp_path / "aligned.json", tmp_path / "predicted.json"
    knobs = ("--what-if", "bandwidth=2", "--what-if", "op:bwd_=0.5")
    report = reported("replay", traces, "-o", files[0], "--predicted", files[1], *knobs)
    for i in report["iterations"]:
        assert {"iteration", "measured_s", "replayed_s", "error"} <= set(i)
    for r in report["ranks"]:
        assert {"rank", "measured_s", "replayed_s", "error", "clock_offset_s"} <= set(r)
        assert abs(r["error"]) < 0.05
    assert [w["knob"] for w in report["what_if"]] == [
        "bandwidth=2",
        "op:bwd_=0.5",
        "bandwidth=2 and op:bwd_=0.5",
    ]
    assert all(w["speedup"] >= 0.999 for w in report["what_if"])
    for f in files:
        document = json.loads(f.read_text())
        jsonschema.validate(document, schema())
        assert document["traceEvents"]
    # The written timeline can be replayed, with the same result.
    again = reported("replay", files[0])
    assert [r["measured_s"] for r in again["ranks"]] == [r["measured_s"] for r in report["ranks"]]


def test_replay_against_traces_compares_op_by_op(traces: Path, tmp_path: Path) -> None:
    predicted = tmp_path / "predicted.json"
    alone = reported("replay", traces, "--predicted", predicted)
    report = reported("replay", predicted, "--against", traces)
    assert report["measured_s"] == alone["measured_s"]
    assert report["matched"] > 20
    assert report["only_predicted"] == report["only_measured"] == 0
    for o in report["ops"]:
        assert o["predicted_s"] == pytest.approx(o["measured_s"], rel=0.1)


def test_a_layout_is_replayed_as_it_is_scheduled(tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    printed("compile", "zoo:alexnet", "--devices", 4, "-o", layout)
    report = reported("replay", layout, "-o", tmp_path / "t.json")
    assert not report["held_out"]
    (rank,) = report["ranks"]
    assert 0 < rank["replayed_s"] < 1
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    code, _, err = run("replay", layout, "--what-if", "bandwidth=2")
    assert code == 2
    assert str(layout) in err and "strategy=OTHER_LAYOUT.json" in err


def test_a_change_of_nothing_says_so(traces: Path) -> None:
    """As a faster link does, in a trace without collectives."""
    said = printed("replay", traces, "--what-if", "bandwidth=1", "--what-if", "bandwidth=2")
    unchanged, changed, *_ = said.split("what if ")[1:]
    assert "×1.000" in unchanged and "this changes no op of the trace" in unchanged
    assert "this changes no op" not in changed
