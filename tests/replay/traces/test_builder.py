"""Events within limits, and what is left out of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pase.replay.traces.builder import combine
from pase.replay.traces.chrome import read_chrome
from pase.replay.traces.ingest import load
from pase.replay.traces.reader import Limits
from pase.replay.types import CompiledOp, Event, Timeline, from_events
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


def stage(rank: int, width: int, reads: str) -> Timeline:
    """A process of a run, with a program of its own."""
    names = (("dot.1", "kernel", ""), ("copy.2", "kernel", ""), ("all-gather.1", "collective", "all_gather"))
    t = from_events(
        [
            Event(
                rank=rank,
                lane="s",
                device=True,
                kind=kind,
                name=name,
                start_ns=10 * k,
                duration_ns=5,
                operation=operation,
            )
            for k, (name, kind, operation) in enumerate(names)
        ]
    )
    op = CompiledOp(part="forward", operands=(), work="product", product=((width, width),) * 3)
    copy = CompiledOp(part="forward", operands=(), work="copy")
    gather = CompiledOp(part="forward", operands=((width,),), work="collective")
    return replace(
        t,
        compiled={"dot.1": op, "copy.2": replace(copy, kernel=f"k{rank}"), "all-gather.1": gather},
        dataflow={"dot.1": (), "all-gather.1": (reads,)},
    )


def test_processes_with_programs_of_their_own_keep_their_facts() -> None:
    """The op that has other facts is another op. Collectives are matched by their names, which stay."""
    t = combine([stage(0, 32, "dot.1"), stage(1, 64, "dot.1"), stage(2, 32, "dot.1")])
    ran = {(int(e.rank), e.name) for e in t}
    assert {n for r, n in ran if r == 1} == {"dot.1 (rank 1)", "copy.2", "all-gather.1"}
    assert {n for r, n in ran if r != 1} == {"dot.1", "copy.2", "all-gather.1"}
    assert t.compiled["dot.1"].product[0] == (32, 32) and t.compiled["dot.1 (rank 1)"].product[0] == (64, 64)
    assert t.dataflow["all-gather.1"] == ("dot.1", "dot.1 (rank 1)")
    assert "copy.2 (rank 1)" not in t.compiled
