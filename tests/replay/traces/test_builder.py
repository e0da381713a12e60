"""Events within limits, and what is left out of them."""

from __future__ import annotations

from pathlib import Path

from pase.replay.traces.chrome import read_chrome
from pase.replay.traces.ingest import load
from pase.replay.traces.reader import Limits
from tests.replay.traces.files import kernel, trace_file


def test_a_clock_jump_keeps_the_longest_stretch(tmp_path: Path) -> None:
    t = load(trace_file(tmp_path, [*(kernel(i) for i in range(9)), kernel(9, ts=1e13)]))
    assert len(t) == 9
    assert any("clock jumps" in str(p) for p in t.problems)


def test_countless_threads_and_names_stay_within_limits(tmp_path: Path) -> None:
    limits = Limits(lanes=50, names=20)
    events = [kernel(i, tid=i, args={"stream": i}) for i in range(400)]
    t = read_chrome(trace_file(tmp_path, events), limits=limits)
    assert len(t.lanes) == 50
    assert len(t.names) <= 21
    text = " ".join(map(str, t.problems))
    assert "350 events on threads beyond the first 50" in text
    assert "names beyond the first 20" in text
