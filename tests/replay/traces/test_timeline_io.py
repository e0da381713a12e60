"""Timelines in files: round trips, other files that are refused, and traces for Perfetto."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pase.errors import PaseError
from pase.replay.traces.ingest import load
from pase.replay.traces.timeline_io import (
    chrome_trace,
    from_json,
    load_timeline,
    save_timeline,
    schema,
    to_json,
)
from pase.replay.types import CompiledOp, Event, Mark, from_events
from tests.replay.traces.compiled import facts_of_step, timeline_of_steps


def small() -> object:
    events = [
        Event(rank=r, lane="7", device=True, kind="kernel", name=n, start_ns=s, duration_ns=5, iteration=0)
        for r in range(2)
        for s, n in ((0, "a"), (7, "b"))
    ]
    return from_events(events, marks=(Mark(rank=0, iteration=0, start_ns=0, end_ns=12),))


def test_timeline_round_trip_and_schema(tmp_path: Path) -> None:
    import jsonschema

    t = small()
    for name in ("t.json", "t.json.gz"):
        save_timeline(t, tmp_path / name, critical=[1])
        back = load_timeline(tmp_path / name)
        assert all(np.array_equal(back[c], t[c]) for c in t.columns)
        assert (back.names, back.lanes, back.marks) == (t.names, t.lanes, t.marks)
    jsonschema.validate(to_json(t), schema())
    whole = json.loads((tmp_path / "t.json").read_text())
    jsonschema.validate(whole, schema())
    # The same file loads in Perfetto: its complete events have numeric times.
    spans = [e for e in whole["traceEvents"] if e["ph"] == "X"]
    assert {"name", "ts", "dur", "pid", "tid"} <= set.intersection(*(set(e) for e in spans))
    assert sum(e.get("cat") == "critical" for e in spans) == 1
    assert len(load(tmp_path / "t.json")) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "pase.timeline/9"}, "pase.timeline/9"),
        ({"names": []}, "column 'name'"),
        ({"columns": {}}, "broken timeline: at columns/lane: is missing"),
        ({"names": [1]}, "at names/0: must be text, got 1"),
        (
            {"lanes": [{"rank": 2**31, "name": "s", "device": True}]},
            r"at lanes/0/rank: must be at most 2.*e\+09",
        ),
        ({"schema": "other"}, "not a pase timeline"),
    ],
)
def test_foreign_timelines_are_refused(change: dict, words: str) -> None:
    with pytest.raises(PaseError, match=words):
        from_json({**to_json(small()), **change}, "x.json")


def test_chrome_export_puts_ranks_on_one_clock() -> None:
    from dataclasses import replace

    from pase.replay.types import Clock

    t = replace(small(), clocks=(Clock(rank=0), Clock(rank=1, offset_ns=1000.0)))
    spans = [e for e in chrome_trace(t)["traceEvents"] if e.get("cat") == "kernel"]
    at = {(e["pid"], e["name"]): e["ts"] for e in spans}
    assert at[(1, "a")] - at[(0, "a")] == 1.0


def test_operands_of_ops_outlive_a_file() -> None:
    op = CompiledOp(part="update", operands=((2, 3), ()), itemsize=2)
    t = replace(timeline_of_steps(facts_of_step(1)), compiled={"x": op})
    assert from_json(to_json(t)).compiled == {"x": op}
