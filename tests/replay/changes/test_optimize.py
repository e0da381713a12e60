"""The optimizer against brute force and closed forms, and its invariants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.replay.changes.optimize import optimize_graph
from pase.replay.graph import DataflowGraph
from pase.replay.simulation.steady import evaluate
from pase.replay.types import COLLECTIVE
from tests.replay.changes.graphs import ALPHA, BETA, backward


def by_brute_force(g: DataflowGraph) -> float:
    """The best time over all ways to divide the tensors into contiguous buckets, computed independently."""
    c = [i for i in range(len(g)) if g.task_name(i).startswith("gemm")]
    q = [i for i in range(len(g)) if g.kind[i] == COLLECTIVE]
    ready = np.cumsum(g.duration_ns[c])
    best = np.inf
    for cuts in itertools.product((False, True), repeat=len(q) - 1):
        link, size = 0.0, 0.0
        for k, i in enumerate(q):
            size += float(g.nbytes[i])
            if k == len(q) - 1 or cuts[k]:
                link = max(link, float(ready[k])) + ALPHA + BETA * size
                size = 0.0
        best = min(best, link + 1000)
    return best


@settings(max_examples=40)
@given(st.data())
def test_tensor_fusion_is_close_to_brute_force(data: st.DataObject) -> None:
    n = data.draw(st.integers(4, 8))
    compute = data.draw(st.lists(st.integers(1_000, 200_000), min_size=n, max_size=n))
    nbytes = data.draw(st.lists(st.integers(100_000, 20_000_000), min_size=n, max_size=n, unique=True))
    g = backward(compute, nbytes)
    best = by_brute_force(g)
    o = optimize_graph(g, passes=["tensor-fusion"], budget_s=20)
    assert o.after_ns >= best * (1 - 0.03)  # the split into latency and bytes is fitted from the graph
    assert o.after_ns <= best * 1.05
    assert o.after_ns <= o.before_ns


@settings(max_examples=20)
@given(st.data())
def test_the_best_so_far_only_falls_and_bad_steps_are_undone(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 6))
    compute = data.draw(st.lists(st.integers(1_000, 200_000), min_size=n, max_size=n))
    nbytes = data.draw(st.lists(st.integers(100_000, 20_000_000), min_size=n, max_size=n))
    o = optimize_graph(backward(compute, nbytes), budget_s=20)
    best = o.before_ns
    for s in o.steps:
        assert s.before_ns == pytest.approx(best)
        assert s.kept == (s.after_ns < s.before_ns * (1 - 1e-4))
        best = s.after_ns if s.kept else best
    assert max(evaluate(o.graph).values()) == pytest.approx(o.after_ns)


def test_a_budget_ends_the_search() -> None:
    g = backward([1000 * (k % 7 + 1) for k in range(60)], [10_000 * (k + 1) for k in range(60)])
    o = optimize_graph(g, budget_s=1e-6)
    assert o.ended == "time budget"
    assert o.after_ns <= o.before_ns
