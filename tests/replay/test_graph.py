"""The data-flow graph of tasks: how it is built, and what is read off its edges and keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.replay.graph import EDGES, build_graph, csr, launching_calls, twins


def test_the_members_of_a_collective_know_their_number() -> None:
    tasks = [
        {"device": (r, "link"), "duration_ns": 1, "gang": g}
        for r, g in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    ]
    g = build_graph([*tasks, {"device": (0, "thread 1"), "duration_ns": 1}], [])
    assert g.ways.tolist() == [3, 3, 3, 2, 2, 0] and g.gangs == 2
    assert [d.kind for d in g.devices] == ["link", "link", "link", "thread"]
    assert (g.ranks, g.rank.tolist()) == ((0, 1, 2), [0, 1, 2, 0, 1, 0])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)), max_size=12))
def test_edges_by_source_are_all_edges(edges: list[tuple[int, int, int]]) -> None:
    g = build_graph([{"device": (0, "s"), "duration_ns": 1}] * 5, edges)
    ptr, dst, lag = csr(g)
    found = [(i, int(dst[e]), float(lag[e])) for i in range(5) for e in range(ptr[i], ptr[i + 1])]
    assert sorted(found) == sorted(edges) and ptr[-1] == len(edges)


@pytest.mark.parametrize("edge", [(0, 1), (-1, 0)])
def test_an_edge_to_no_task_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(PaseError, match="not one of its 1 tasks"):
        csr(build_graph([{"device": (0, "s"), "duration_ns": 1}], [edge]))


def test_the_launching_call_follows_the_work_from_which_the_launch_edge_comes() -> None:
    """A thread works, calls, works and calls. The first call launches two ops, and the second one nothing."""
    names = ["work 0", "call 0", "work 1", "call 1", "op 0", "op 1"]
    tasks = [
        {"device": (0, "thread" if n[0] != "o" else "stream"), "duration_ns": 1, "name": n} for n in names
    ]
    g = build_graph(tasks, [(0, 1), (1, 2), (2, 3), (0, 4), (0, 5)])
    kinds = [EDGES.index(k) for k in ("program", "program", "program", "launch", "launch")]
    assert launching_calls(replace(g, edge_kind=np.array(kinds, np.uint8))) == {4: 1, 5: 1}


def test_twins_differ_in_their_rank_alone() -> None:
    """A count that equals the rank is no rank: the rank comes first."""
    keys = [("op", 0, "gemm", 1), ("op", 1, "gemm", 1), ("op", 1, "gemm", 2), "other"]
    g = build_graph([{"device": (r, "s"), "duration_ns": 1} for r in (0, 1, 1, 0)], [])
    assert twins(replace(g, key=tuple(keys))) == {("op", "gemm", 1): {0: 0, 1: 1}, ("op", "gemm", 2): {1: 2}}
