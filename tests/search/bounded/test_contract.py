"""Reductions of nodes and configs keep the optimum, against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.bounded.contract import Contracted, contract, fixed_bytes, restrict
from pase.search.bounded.rows import memory_rows
from pase.tables.types import CostTables, EdgeTable
from tests.search.bounded.instances import clique, contracted, optimum
from tests.search.random_instances import random_memory, random_tables


def residual_tables(left: Contracted) -> CostTables:
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


@pytest.mark.some(2)
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


@pytest.mark.some(1)
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


def test_reductions_that_stop_at_once_keep_the_optimum() -> None:
    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed))
        try:
            want = brute_force(tables).cost
        except Infeasible:
            continue
        left = contract(tables, until=0.0)
        sizes = [c.size for c in left.costs]
        full = (
            left.expand(np.array(np.unravel_index(i, sizes), np.int64).reshape(-1))
            for i in range(int(np.prod(sizes)))
        )
        assert min(cost_of(tables, choice) for choice in full) == want, seed


def test_a_choice_that_lost_configs_finds_the_nearest_that_is_left() -> None:
    """If every config still exists, the choice is the same. Otherwise the node that lost its config suits the
    others."""
    tables = clique(np.random.default_rng(7), nodes=6, configs=5)
    left = contract(tables, until=0.0)
    full = np.array([3, 1, 4, 1, 0, 2])
    assert left.expand(left.nearest(full)).tolist() == full.tolist()
    keep = [np.ones(5, bool) for _ in range(6)]
    keep[2][4] = False
    less = restrict(left, keep, until=0.0)
    got = less.expand(less.nearest(full))
    others = [np.where(np.arange(6) == 2, k, full) for k in range(4)]
    assert cost_of(tables, got) == min(cost_of(tables, o) for o in others)
