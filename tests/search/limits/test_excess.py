"""Sums whose excess is charged, together with a memory limit, against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force, cost_of
from pase.search.elimination.priced import HeldAlong
from pase.search.limits.excess import Excess
from pase.search.limits.within import Within, fits
from pase.tables.types import CostTables
from tests.search.random_instances import random_memory, random_tables


def drawn(rng: np.random.Generator, tables: CostTables) -> tuple[Excess, CostTables]:
    """(Two sums over nodes and some edges, the tables with these sums at their weights)."""
    weights = rng.choice([0.0, 1.0, rng.uniform()], 2)
    held = tuple(rng.normal(size=(c.size, 2)) for c in tables.node_costs)
    along, edges = [], []
    for e in tables.edges:
        sums = rng.normal(size=(*e.cost.shape, 2)) * rng.integers(0, 2)
        edges.append(replace(e, cost=e.cost + sums @ weights))
        along.append(HeldAlong(src=e.src, dst=e.dst, src_class=e.src_class, dst_class=e.dst_class, held=sums))
    costs = tuple(c + h @ weights for c, h in zip(tables.node_costs, held, strict=True))
    excess = Excess(weights=weights, held=held, along=tuple(along))
    return excess, replace(tables, node_costs=costs, edges=tuple(edges))


def by_hand(tables: CostTables, excess: Excess, choice: np.ndarray) -> float:
    sums = np.zeros(2)
    for h, k in zip(excess.held, choice, strict=True):
        sums = sums + h[k]
    for e in excess.along:
        sums = sums + e.held[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]]
    return cost_of(tables, choice) + float(np.maximum(sums, 0.0).sum())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_within_is_brute_force(seed: int, binds: bool) -> None:
    """With a limit that binds, and with one that does not; then only the excess makes a cheaper choice costlier."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    memory = random_memory(rng, tables)
    if not binds:
        memory = replace(memory, limit_bytes=1e12)
    excess, mean = drawn(rng, tables)
    try:
        free = brute_force(mean).choice
    except Infeasible:
        return
    every = map(np.array, itertools.product(*(range(c.size) for c in tables.node_costs)))
    want = min((by_hand(tables, excess, c) for c in every if fits(memory, c)), default=np.inf)
    if not np.isfinite(want):
        return
    search = within(mean, memory, excess)
    if not search.run(free):
        assert not memory.usage(free).size
        return
    assert search.choice is not None and fits(memory, search.choice)
    assert np.isclose(search.cost, by_hand(tables, excess, search.choice), rtol=1e-9, atol=1e-9)
    assert search.bound <= want + 1e-9 * (1 + abs(want))
    assert np.isclose(search.cost, want, rtol=1e-9, atol=1e-9)


def within(mean: CostTables, memory: MemoryProfile, excess: Excess) -> Within:
    return Within(
        tables=mean, memory=memory, eliminate=None, kernel="numpy", threads=1, seed=0, excess=excess
    )
