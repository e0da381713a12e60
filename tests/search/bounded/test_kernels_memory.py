"""Compiled sums of bytes agree with the rows that they are made of."""

from __future__ import annotations

import numpy as np

from pase.search.bounded.contract import fixed_bytes
from pase.search.bounded.rows import memory_rows
from tests.search.bounded.instances import contracted
from tests.search.random_instances import random_memory, random_tables


def test_prices_and_usage_agree_with_rows() -> None:
    from pase.search.bounded.kernels_memory import priced_costs, usage_of

    for seed in range(200):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        left = contracted(tables, memory)
        if left is None or not left.nodes:
            continue
        sizes = [c.size for c in left.costs]
        rows = memory_rows(memory, sizes, left.members, fixed_bytes(left, memory))
        arrays = rows.limit
        price = rng.integers(0, 5, rows.points).astype(float)
        cost = np.concatenate(left.costs)
        out = np.zeros(cost.size)
        priced_costs(arrays, cost, price, np.zeros(rows.points + 1), out)
        np.testing.assert_allclose(out, cost + rows.priced(price))
        np.testing.assert_allclose(out - cost, rows.dense(np.arange(rows.points)) @ price)
        choice = np.array([rng.integers(k) for k in sizes], np.int64)
        used = np.zeros(rows.points)
        usage_of(arrays, rows.slot, choice, used)
        np.testing.assert_array_equal(used, rows.usage(choice))
