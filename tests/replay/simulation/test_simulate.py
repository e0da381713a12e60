"""The simulation on random graphs: bounds, monotonicity and symmetry."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.simulation.simulate import replay_graph, subgraph
from tests.replay.simulation.graphs import graphs
from tests.replay.simulation.twin import replayed


def lower_bound_ns(g: DataflowGraph) -> float:
    """The longest path of the data-flow graph with unlimited devices: no replay can be shorter."""
    free = replace(g, device=np.arange(len(g), dtype=np.int64), device_free_ns=g.device_free_ns[g.device])
    return replay_graph(free).makespan_ns


def serial_sum_ns(g: DataflowGraph) -> float:
    """The sum of all durations and lags, after the last release: no replay can be longer."""
    begin = max(float(g.release_ns.max(initial=0.0)), float(g.device_free_ns.max(initial=0.0)))
    return begin + float(g.duration_ns.sum()) + float(g.lag_ns.sum())


def partial_replay(g: DataflowGraph, keep: np.ndarray) -> float:
    """dPRO's partial replay: the time (ns) of the tasks in ``keep`` if all others are done."""
    part = subgraph(g, keep)
    free = replace(part, release_ns=np.zeros(len(part)), device_free_ns=np.zeros_like(part.device_free_ns))
    return replay_graph(free).makespan_ns


@given(graphs())
def test_between_the_longest_path_and_the_serial_sum(g: DataflowGraph) -> None:
    makespan = replay_graph(g).makespan_ns
    assert lower_bound_ns(g) <= makespan <= serial_sum_ns(g)


@given(graphs())
def test_the_schedule_is_sound(g: DataflowGraph) -> None:
    r = replay_graph(g)
    assert (r.start_ns >= g.release_ns).all()
    assert (r.start_ns[g.dst] >= r.finish_ns[g.src] + g.lag_ns).all()
    for d in range(len(g.devices)):
        mine = np.flatnonzero(g.device == d)
        order = mine[np.lexsort((r.finish_ns[mine], r.start_ns[mine]))]
        assert (r.start_ns[order[1:]] >= r.finish_ns[order[:-1]]).all()
    for k in range(g.gangs):
        members = g.gang == k
        assert np.allclose(r.finish_ns[members], r.start_ns[members].max() + g.duration_ns[members])


@given(graphs(chained=True), st.data())
def test_slower_ops_never_help_in_a_fixed_order(g: DataflowGraph, data: st.DataObject) -> None:
    """This holds only if devices keep their order, as in a trace: greedy list schedules have Graham's anomalies."""
    base = replay_graph(g).makespan_ns
    slow = g.duration_ns.copy()
    slow[data.draw(st.integers(0, len(g) - 1))] += data.draw(st.integers(0, 9))
    assert replay_graph(replace(g, duration_ns=slow)).makespan_ns >= base


@given(graphs(), st.randoms())
def test_ranks_may_be_renamed(g: DataflowGraph, random: object) -> None:
    order = list(range(len(g.devices)))
    random.shuffle(order)  # type: ignore[attr-defined]
    to = np.array(order)
    renamed = replace(
        g,
        device=to[g.device],
        devices=tuple(g.devices[order.index(i)] for i in range(len(order))),
        device_free_ns=g.device_free_ns[np.argsort(to)],
    )
    assert np.array_equal(replay_graph(g).finish_ns, replay_graph(renamed).finish_ns)


@given(graphs(gangs=False))
def test_partial_replay_of_everything_is_the_replay_from_zero(g: DataflowGraph) -> None:
    zero = replace(g, release_ns=np.zeros(len(g)))
    assert partial_replay(g, np.ones(len(g), dtype=bool)) == replay_graph(zero).makespan_ns


@given(graphs(), st.data())
def test_a_part_keeps_its_edges_and_gangs(g: DataflowGraph, data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(g), max_size=len(g))))
    part = subgraph(g, keep)
    old = np.flatnonzero(keep)
    kept = {(a, b) for a, b in zip(g.src.tolist(), g.dst.tolist(), strict=True) if keep[a] and keep[b]}
    assert {(int(old[a]), int(old[b])) for a, b in zip(part.src, part.dst, strict=True)} == kept
    for i, j in itertools.combinations(range(len(part)), 2):
        assert (part.gang[i] == part.gang[j] >= 0) == (g.gang[old[i]] == g.gang[old[j]] >= 0)


def test_a_circle_is_named() -> None:
    tasks = [{"device": (0, "s"), "duration_ns": 1, "name": n} for n in ("egg", "hen")]
    with pytest.raises(PaseError, match="'egg' on rank 0"):
        replay_graph(build_graph(tasks, [(0, 1), (1, 0)]))


def test_collectives_in_different_orders_deadlock() -> None:
    a = [{"device": (0, "s"), "duration_ns": 1, "gang": k, "release_ns": k, "name": f"c{k}"} for k in (0, 1)]
    b = [
        {"device": (1, "s"), "duration_ns": 1, "gang": k, "release_ns": 1 - k, "name": f"c{k}"}
        for k in (0, 1)
    ]
    for replay in (replay_graph, replayed):
        with pytest.raises(PaseError, match="different orders"):
            replay(build_graph(a + b, []))


def test_hand_worked_overlap() -> None:
    """Backward ops b2 and b1 take 10 each, and their all-reduces c2 and c1 take 15 each. c2 overlaps with b1."""
    tasks = [
        {"device": (0, "stream 7"), "duration_ns": 10, "name": "b2"},
        {"device": (0, "stream 7"), "duration_ns": 10, "name": "b1"},
        {"device": (0, "link"), "duration_ns": 15, "name": "c2"},
        {"device": (0, "link"), "duration_ns": 15, "name": "c1"},
    ]
    r = replay_graph(build_graph(tasks, [(0, 1), (0, 2), (1, 3)]))
    assert r.start_ns.tolist() == [0, 10, 10, 25]
    assert r.makespan_ns == 40
