"""The depth-first search agrees with brute force, however often it is stopped."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force, cost_of, solve
from pase.search.bounded.contract import contract
from pase.search.bounded.depth_first import DepthFirst, depth_first_fits
from pase.search.bounded.residual import Residual
from pase.search.bounded.search import bounded_search
from pase.search.elimination import exact
from pase.search.types import Effort
from pase.tables.types import CostTables, EdgeTable
from tests.search.random_instances import random_tables


def scaled(tables: CostTables, by: float) -> CostTables:
    edges = tuple(replace(e, cost=e.cost * by) for e in tables.edges)
    return replace(tables, node_costs=tuple(c * by for c in tables.node_costs), edges=edges)


def unreduced(tables: CostTables) -> Residual | None:
    """The residual with only forbidden configs removed; None if that removes everything."""
    try:
        return Residual(contract(tables, until=0.0), None)
    except Infeasible:
        return None


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 1 / 7]), st.sampled_from([1.0, 1e9]))
def test_it_is_brute_force(seed: int, unit: float, work: float) -> None:
    """The search starts without a known choice, with the optimum, or with a choice that costs one unit more."""
    tables = scaled(random_tables(np.random.default_rng(seed)), unit)
    try:
        want = brute_force(tables).cost
    except Infeasible:
        want = np.inf
    for known in (np.inf, want, want + unit):
        now = unreduced(tables)
        if now is None:
            assert want == np.inf
            return
        tree, best, ended = DepthFirst(now, unit == 1.0), known, False
        while not ended:
            found, bound, ended = tree.run(best, work)
            assert bound <= want + 1e-9 * (1 + abs(want)) or bound > best - unit
            if found is not None:
                assert cost_of(tables, found) < best
                best = cost_of(tables, found)
        assert best == pytest.approx(want, rel=1e-9, abs=1e-9) or want == np.inf == best


def clique(nodes: int, configs: int, seed: int) -> CostTables:
    rng, cls = np.random.default_rng(seed), np.arange(configs, dtype=np.int32)
    forbidden = rng.random((nodes, nodes, configs, configs)) < 0.2
    cost = np.where(forbidden, np.inf, rng.integers(0, 100, (nodes, nodes, configs, configs)))
    edges = tuple(
        EdgeTable(src=a, dst=b, cost=cost[a, b], src_class=cls, dst_class=cls)
        for b in range(nodes)
        for a in range(b)
    )
    return CostTables(node_costs=tuple(np.zeros(configs) for _ in range(nodes)), edges=edges)


@pytest.mark.parametrize("seed", range(4))
def test_it_proves_what_elimination_cannot_afford(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = clique(8, 8, seed)
    want = solve(tables)
    assert want.method == "elimination"
    monkeypatch.setattr(exact, "MAX_WORK", 1_000)
    monkeypatch.setattr("pase.search.bounded.search._SMALL_ILP", 0)
    found = bounded_search(tables, None, Effort(rounds=20), 0, time.perf_counter())
    assert found.optimal and found.cost == want.cost == cost_of(tables, found.choice)
    assert found.method == "depth-first search"


def test_a_limit_is_not_its_to_see() -> None:
    tables = clique(4, 3, 0)
    held = tuple(np.arange(3.0) for _ in range(4))
    for room, fits in ((8.0, True), (4.0, False)):  # 8 is all that four nodes can hold
        memory = MemoryProfile.all_live(held, limit_bytes=room)
        assert depth_first_fits(Residual(contract(tables, memory, until=0.0), memory)) == fits
