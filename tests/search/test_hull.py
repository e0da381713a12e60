"""The best price per byte: its bound is the highest of all prices', its choice fits."""

from __future__ import annotations

import time

import numpy as np

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force, cost_of, solve
from pase.search.clock import Clock
from pase.search.hull import hull
from pase.tables.types import CostTables

from .instances import random_memory, random_tables


def cheapest(tables: CostTables) -> tuple[np.ndarray, float]:
    found = brute_force(tables)
    return found.choice, found.cost


def test_no_price_bounds_higher_and_the_choice_fits() -> None:
    met = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        held = random_memory(rng, tables).bytes
        low, high = sum(b.min() for b in held), sum(b.max() for b in held)
        memory = MemoryProfile.all_live(held, float(np.floor(low + (high - low) * rng.uniform(0.0, 0.6))))
        try:
            free, want = brute_force(tables), brute_force(tables, memory)
        except Infeasible:
            continue
        if (memory.usage(free.choice) <= memory.limit_bytes).all():
            continue
        got = hull(tables, memory, free.choice, cheapest, Clock(time.perf_counter() + 60.0))
        if got is None:  # no price makes a choice that fits the cheapest
            continue
        met += 1
        choice, bound = got
        assert (memory.usage(choice) <= memory.limit_bytes).all() and cost_of(tables, choice) >= want.cost, (
            seed
        )
        assert bound <= want.cost + 1e-9 * max(1.0, abs(want.cost)), seed
        for price in rng.uniform(0.0, 2.0, 5) * (1.0 + free.cost) / max(high, 1.0):
            costs = tuple(c + price * b for c, b in zip(tables.node_costs, held, strict=True))
            other = brute_force(CostTables(node_costs=costs, edges=tables.edges)).cost
            assert bound >= other - price * memory.limit_bytes - 1e-9 * max(1.0, abs(other)), (seed, price)
    assert met > 50


def test_more_points_than_one_are_left_to_the_bounded_search() -> None:
    held = (np.array([4.0, 1.0]), np.array([4.0, 1.0]))
    memory = MemoryProfile(bytes=held, start=np.array([0, 1]), stop=np.array([1, 2]), limit_bytes=2.0)
    costs = (np.array([0.0, 3.0]), np.array([0.0, 5.0]))
    tables = CostTables(node_costs=costs, edges=())
    assert hull(tables, memory, np.zeros(2, np.int64), cheapest, Clock(time.perf_counter() + 60.0)) is None
    found = solve(tables, memory)
    assert found.optimal and found.cost == 8.0
