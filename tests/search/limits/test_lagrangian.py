"""The best price per byte gives the highest bound of all prices, and every step is a choice with its true cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.limits.lagrangian import best_prices
from pase.search.limits.sums import sums_of
from pase.tables.types import CostTables
from tests.search.random_instances import random_memory, random_tables


def test_no_price_bounds_higher_and_no_bound_is_above_what_fits() -> None:
    met = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        held = random_memory(rng, tables)  # some nodes hold several things
        low, high = sum(b.min() for b in held.bytes), sum(b.max() for b in held.bytes)
        limit = float(np.floor(low + (high - low) * rng.uniform(0.0, 0.6)))
        memory = replace(
            held, start=np.zeros_like(held.start), stop=np.ones_like(held.stop), limit_bytes=limit
        )
        try:
            free, want = brute_force(tables), brute_force(tables, memory)
        except Infeasible:
            continue
        if (memory.usage(free.choice) <= memory.limit_bytes).all():
            continue
        sums = sums_of(memory, [np.ones(1, bool)])

        def at(prices: np.ndarray, tables=tables, sums=sums) -> tuple[np.ndarray, float, float]:
            costs = tuple(c + h @ prices for c, h in zip(tables.node_costs, sums.held, strict=True))
            found = brute_force(CostTables(node_costs=costs, edges=tables.edges))
            return found.choice, cost_of(tables, found.choice), found.cost

        got = best_prices(at, sums.used, sums.room, (free.choice, free.cost))
        assert got.bound <= want.cost + 1e-9 * max(1.0, abs(want.cost)), seed
        assert all(cost == cost_of(tables, c) for c, cost in got.choices), seed
        if not any((sums.used(c) <= sums.room).all() for c, _ in got.choices):
            continue  # no price makes a choice that fits the cheapest choice
        met += 1
        for price in rng.uniform(0.0, 2.0, 5) * (1.0 + free.cost) / max(high, 1.0):
            other = at(np.array([price]))[2] - price * sums.room[0]
            assert got.bound >= other - 1e-9 * max(1.0, abs(other)), (seed, price)
        below = got.bound - 0.5 * abs(got.bound)
        assert len(
            best_prices(at, sums.used, sums.room, (free.choice, free.cost), below=below).choices
        ) <= len(got.choices), seed
    assert met > 50
