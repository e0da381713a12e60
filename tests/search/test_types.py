"""Memory profiles: live bytes at each point, against a sum over intervals, and the sizes that do not match."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from pase.search import MemoryProfile, Solution
from tests.search.random_instances import random_memory, random_tables, seeds


@given(seeds)
def test_usage_is_the_sum_over_live_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    memory = random_memory(rng, tables)
    choice = np.array([rng.integers(c.size) for c in tables.node_costs])
    want = [
        sum(
            memory.bytes[i][choice[v]]
            for i, v in enumerate(memory.owners)
            if memory.start[i] <= t < memory.stop[i]
        )
        for t in range(int(memory.stop.max(initial=0)))
    ]
    np.testing.assert_allclose(memory.usage(choice), want, atol=1e-6)
    assert memory.nodes == len(tables.node_costs)
    live = {(v, i) for v, mine in memory.live.items() for i in mine}
    assert live == {(int(v), i) for i, v in enumerate(memory.owners) if memory.stop[i] > memory.start[i]}


def test_sizes_that_do_not_match_are_refused() -> None:
    held, one, two = (np.zeros(3),), np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="need 1 intervals"):
        MemoryProfile(bytes=held, start=two, stop=one, limit_bytes=1.0)
    with pytest.raises(ValueError, match="need 1 nodes"):
        MemoryProfile(bytes=held, start=one, stop=one, limit_bytes=1.0, node=two)
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="zero or more bytes"):
            MemoryProfile(bytes=held, start=one, stop=one, limit_bytes=limit)


def test_the_gap_is_relative_to_the_cost() -> None:
    def gap(cost: float, bound: float, *, optimal: bool = False) -> float:
        return Solution(choice=np.zeros(0, np.int64), cost=cost, bound=bound, optimal=optimal).gap

    assert gap(8.0, 6.0) == 0.25 and gap(-8.0, -10.0) == 0.25
    assert gap(8.0, 6.0, optimal=True) == gap(8.0, 8.0) == 0.0
