"""Overlaps and critical paths of replayed iterations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.simulation.analyse import merged, overlap_ns, path_steps, to_timeline, waits_ns
from pase.replay.simulation.simulate import critical_path, replay_graph
from tests.replay.simulation.graphs import graphs


@given(graphs())
def test_the_critical_path_explains_the_makespan(g: DataflowGraph) -> None:
    r = replay_graph(g)
    path = critical_path(g, r)
    assert r.finish_ns[path[-1]] == r.makespan_ns
    steps = path_steps(g, r)
    assert sum(s.added_ns for s in steps) == pytest.approx(r.makespan_ns)
    assert all(s.added_ns >= 0 for s in steps)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8)


def points(union: np.ndarray) -> set[int]:
    """The unit intervals that a union of intervals covers."""
    return {x for a, b in union.tolist() for x in range(int(a), int(b))}


@given(spans, spans)
def test_unions_of_intervals_cover_what_their_members_do(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    unions = []
    for members in (one, two):
        start = np.array([a for a, _ in members], dtype=float)
        union = merged(start, start + [n for _, n in members])
        assert points(union) == {x for a, n in members for x in range(a, a + n)}
        assert (union[1:, 0] > union[:-1, 1]).all()
        unions.append(union)
    assert overlap_ns(*unions) == len(points(unions[0]) & points(unions[1]))


def test_members_of_a_collective_wait_for_the_latest() -> None:
    tasks = [
        {"device": (r, "link"), "duration_ns": 5, "gang": 0, "release_ns": at}
        for r, at in enumerate((3, 10, 0))
    ]
    g = build_graph([*tasks, {"device": (0, "stream 7"), "duration_ns": 4, "name": "after"}], [(0, 3)])
    r = replay_graph(g)
    assert waits_ns(g, r).tolist() == [7, 0, 10, 0]
    t = to_timeline(g, r)
    assert {(e.rank, e.lane, e.start_ns, e.start_ns + e.duration_ns) for e in t} == {
        (0, "link", 3, 15),
        (1, "link", 10, 15),
        (2, "link", 0, 15),
        (0, "stream 7", 15, 19),
    }
    assert {(m.rank, m.start_ns, m.end_ns) for m in t.marks} == {(0, 3, 19), (1, 10, 15), (2, 0, 15)}
