"""Collective tables from a run's traces."""

import numpy as np
import pytest

from pase import machine
from pase.calibrate.traces import curves_of, with_traces
from pase.errors import PaseError
from pase.replay import Event, Timeline
from pase.replay.types import Group, from_events

SIZES = (1 << 12, 1 << 16, 1 << 20)


def seconds(nbytes):
    return 1e-4 + nbytes * 1e-9


def timeline(ranks=(0, 1, 2, 3), group=(0, 1, 2, 3), iterations=4, seen_by=None) -> Timeline:
    """All-reduces of three sizes. Ranks arrive up to 3 ms late, which does not count as a cost of the collective."""
    random = np.random.default_rng(0)
    events, now = [], 0
    for it in range(iterations):
        for size in SIZES:
            arrive = {r: now + int(random.integers(0, 3_000_000)) for r in group}
            end = max(arrive.values()) + int(seconds(size) * 1e9)
            for r in seen_by or group:
                events.append(
                    Event(
                        rank=r,
                        lane="stream",
                        device=True,
                        kind="collective",
                        name=f"all-reduce.{size}",
                        start_ns=arrive[r],
                        duration_ns=end - arrive[r],
                        nbytes=size,
                        operation="all_reduce",
                        group="g",
                        iteration=it,
                    )
                )
            now = end + 1000
    for r in ranks:
        events.append(
            Event(rank=r, lane="host", device=False, kind="host", name="x", start_ns=now, duration_ns=1)
        )
    return from_events(events, groups=(Group(name="g", ranks=group),))


def test_a_collective_costs_from_its_last_rank_on():
    curves, told = curves_of(timeline(), machine.load("h100x8"))
    (curve,) = curves
    assert (curve.kind, curve.ways) == ("all_reduce", (4, 1)) and not told["left_out"]
    assert curve.curve.nbytes == SIZES
    assert curve.curve.seconds == pytest.approx([seconds(n) for n in SIZES], rel=1e-4)


def test_groups_are_put_on_their_levels():
    two = machine.parse(
        machine.dumps(machine.load("h100x8")).replace("ways = 8", "ways = 2", 1), "two a node"
    )
    (curve,), _ = curves_of(timeline(group=(0, 2)), two)
    assert curve.ways == (1, 2)
    none, told = curves_of(timeline(group=(0, 3)), two)
    assert not none and told["left_out"]["over no whole levels"] == 12


def test_what_cannot_be_a_cost_is_left_out(tmp_path):
    none, told = curves_of(timeline(seen_by=(0, 1)), machine.load("h100x8"))
    assert not none and told["left_out"] == {"seen by some of their ranks alone": 12}
    none, told = curves_of(timeline(iterations=2), machine.load("h100x8"))
    assert not none and told["left_out"] == {"too few of their size or kind": 6}


def test_the_tables_go_into_a_machine(tmp_path):
    from pase.replay.traces.timeline_io import save_timeline

    path = tmp_path / "run.timeline.json"
    save_timeline(timeline(), path)
    merged, _ = with_traces(machine.load("h100x8"), path, "ours")
    assert merged.name == "ours" and merged.collectives[0].ways == (4, 1)
    assert machine.parse(machine.dumps(merged), "again") == merged
    save_timeline(timeline(iterations=1), path)
    with pytest.raises(PaseError, match="too few of their size or kind") as e:
        with_traces(machine.load("h100x8"), path, "ours")
    assert e.value.where == str(path) and "iterations" in e.value.fix
