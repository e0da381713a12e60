"""Rows of a memory limit hold for a choice exactly if its live bytes keep to the limit, by enumeration."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from pase.search.bounded.rows import memory_rows
from tests.search.random_instances import random_memory, random_tables, seeds


@given(seeds)
def test_rows_hold_where_the_live_bytes_keep_to_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_choices=200)
    memory = random_memory(rng, tables)
    sizes = [c.size for c in tables.node_costs]
    rows = memory_rows(memory, sizes, [[(v, np.arange(k))] for v, k in enumerate(sizes)], [])
    price = rng.random(rows.points)
    priced, dense = rows.priced(price), rows.dense(np.arange(rows.points))
    np.testing.assert_allclose(priced, dense @ price, atol=1e-9)
    for at in np.ndindex(*sizes):
        choice = np.array(at)
        used = rows.usage(choice)
        np.testing.assert_allclose(used, dense[rows.slot[:-1] + choice].sum(axis=0), atol=1e-6)
        kept = bool((memory.usage(choice) <= memory.limit_bytes).all())
        assert bool((used <= rows.capacity).all()) == kept


def test_bytes_that_every_choice_holds_leave_less_room() -> None:
    rng = np.random.default_rng(0)
    tables = random_tables(rng)
    memory = random_memory(rng, tables)
    sizes = [c.size for c in tables.node_costs]
    # Only the first node is left. Each of the others has its first config.
    members = [[(0, np.arange(sizes[0]))]]
    held = [(i, float(memory.bytes[i][0])) for i, v in enumerate(memory.owners) if v > 0]
    rows = memory_rows(memory, sizes[:1], members, held)
    for k in range(sizes[0]):
        whole = memory.usage(np.array([k] + [0] * (len(sizes) - 1)))
        assert bool((rows.usage(np.array([k])) <= rows.capacity).all()) == bool(
            (whole <= memory.limit_bytes).all()
        )
