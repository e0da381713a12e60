"""Sums over memory points: averages, and points that hold the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from pase.search.limits.sums import alike, sums_of
from tests.search.random_instances import random_memory, random_tables, seeds


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_a_sum_is_an_average_over_its_points_and_alike_points_hold_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    memory = random_memory(rng, tables)
    points = int(memory.stop.max(initial=0))
    if not points:
        return
    group = rng.random(points) < 0.5
    group[int(rng.integers(points))] = True
    sums = sums_of(memory, [group])
    numbers = alike(memory)
    for _ in range(5):
        choice = np.array([rng.integers(c.size) for c in tables.node_costs])
        usage = memory.usage(choice)
        assert np.isclose(memory.limit_bytes - sums.room[0] + sums.used(choice)[0], usage[group].mean())
    live = [
        sorted(
            memory.bytes[v].tobytes()
            for v in range(len(memory.bytes))
            if memory.start[v] <= t < memory.stop[v]
        )
        for t in range(points)
    ]
    for t in range(points):
        for u in range(t):
            assert (numbers[t] == numbers[u]) == (live[t] == live[u])
