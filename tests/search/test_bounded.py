"""Reductions, bounds and the memory limit against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force, cost_of, solve, verify
from pase.search.bounded import bounded_search
from pase.search.contract import contract, fixed_bytes
from pase.search.flat import flatten
from pase.search.rows import memory_rows
from pase.tables.types import CostTables

from .instances import random_memory, random_tables


def optimum(tables: CostTables, memory: MemoryProfile | None = None) -> float | None:
    try:
        return brute_force(tables, memory).cost
    except Infeasible:
        return None


def contracted(tables: CostTables, memory: MemoryProfile | None = None):
    try:
        return contract(tables, memory)
    except Infeasible:
        return None


def residual_tables(left) -> CostTables:
    from pase.tables.types import EdgeTable

    edges = tuple(
        EdgeTable(
            src=a,
            dst=b,
            cost=m,
            src_class=np.arange(m.shape[0], dtype=np.int32),
            dst_class=np.arange(m.shape[1], dtype=np.int32),
        )
        for (a, b), m in zip(left.pairs, left.matrices, strict=True)
    )
    return CostTables(node_costs=tuple(left.costs), edges=edges)


@pytest.mark.parametrize("block", range(4))
def test_reductions_keep_the_optimum(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        tables = random_tables(np.random.default_rng(seed))
        want, left = optimum(tables), contracted(tables)
        if left is None:
            assert want is None, seed
            continue
        rest = brute_force(residual_tables(left)) if optimum(residual_tables(left)) is not None else None
        assert (rest.cost + left.constant if rest else None) == want, seed
        if rest:
            assert cost_of(tables, left.expand(rest.choice)) == want, seed


@pytest.mark.parametrize("block", range(4))
def test_reductions_keep_the_optimum_under_a_memory_limit(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        want, left = optimum(tables, memory), contracted(tables, memory)
        if left is None:
            assert want is None, seed
            continue
        rows = memory_rows(memory, [c.size for c in left.costs], left.members, fixed_bytes(left, memory))
        rest = residual_tables(left)
        best = np.inf
        for flat_index in range(int(np.prod([c.size for c in left.costs]))):
            choice = np.array(np.unravel_index(flat_index, [c.size for c in left.costs]), np.int64).reshape(
                -1
            )
            full = left.expand(choice)
            fits = bool((rows.usage(choice) <= rows.capacity).all())
            assert fits == bool((memory.usage(full) <= memory.limit_bytes).all()), seed
            cost = cost_of(rest, choice) + left.constant
            if np.isfinite(cost):
                assert cost == cost_of(tables, full), seed
            if fits:
                best = min(best, cost)
        assert (best if np.isfinite(best) else None) == want, seed
