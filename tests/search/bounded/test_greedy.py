"""The first choice of problems with forbidden pairs, and a time limit that includes compilation."""

from __future__ import annotations

import numpy as np
import pytest

from pase.search import cost_of, solve
from pase.search.bounded import kernels_memory as kernels
from pase.search.bounded.greedy import greedy_choice
from pase.search.types import Effort
from pase.tables.types import CostTables, EdgeTable


def coloured(nodes: int, degree: int, colours: int, seed: int) -> CostTables:
    """A random graph whose neighbours must differ. A planted choice exists; all nodes prefer the same colours."""
    rng = np.random.default_rng(seed)
    plant = rng.integers(0, colours, nodes)
    pairs = {tuple(sorted(map(int, rng.choice(nodes, 2, replace=False)))) for _ in range(nodes * degree // 2)}
    cls = np.arange(colours, dtype=np.int32)
    differ = np.where(np.eye(colours, dtype=bool), np.inf, 0.0)
    edges = tuple(
        EdgeTable(src=a, dst=b, cost=differ, src_class=cls, dst_class=cls)
        for a, b in sorted(pairs)
        if plant[a] != plant[b]
    )
    costs = tuple(np.arange(colours) + rng.uniform(size=colours) for _ in range(nodes))
    return CostTables(node_costs=costs, edges=edges)


@pytest.mark.parametrize("seed", range(5))
def test_a_greedy_choice_has_no_forbidden_pair(seed: int) -> None:
    t = coloured(60, 6, 4, seed)
    choice = greedy_choice(t.node_costs, [(e.src, e.dst) for e in t.edges], [e.dense() for e in t.edges])
    assert choice is not None
    assert np.isfinite(cost_of(t, choice))


def test_no_choice_of_what_allows_none() -> None:
    """Three nodes that must all differ, with two colours."""
    differ = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
    assert greedy_choice([np.zeros(2)] * 3, [(0, 1), (1, 2), (0, 2)], [differ] * 3) is None


def test_a_limit_counts_kernels_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If compiling would take longer than the remaining time, there is still a choice, and its method says why it is
    not better."""
    t = coloured(200, 40, 16, 0)
    monkeypatch.setattr("pase.search.bounded.search.is_compiled", lambda kernel: False)

    def never(*_: object) -> float:
        raise AssertionError("called a kernel that would have to be compiled first")

    monkeypatch.setattr(kernels, "dual_ascent", never)
    found = solve(t, kernel="numpy", effort=Effort(time_limit=1.0))
    assert found.feasible and np.isfinite(cost_of(t, found.choice))
    assert "pase.search.warm" in found.method
