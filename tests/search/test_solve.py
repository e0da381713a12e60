"""The search as a whole, under memory limits and time limits: against brute force and an integer program."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import (
    MemoryProfile,
    brute_force,
    solve,
    verify,
)
from pase.search.bounded.search import bounded_search
from pase.search.types import Effort
from pase.tables.types import CostTables, EdgeTable
from tests.search.answers import answer
from tests.search.random_instances import random_memory, random_tables


def test_impossible_memory_limit_says_by_how_much() -> None:
    tables = CostTables(node_costs=(np.array([5.0, 1.0]),), edges=())
    memory = MemoryProfile.all_live((np.array([7.0, 9.0]),), 4.0)
    with pytest.raises(Infeasible) as e:
        solve(tables, memory)
    assert e.value.where == "memory limit" and e.value.fix
    assert "4 bytes" in e.value.what and "3 bytes" in e.value.what


def test_memory_of_another_graph_is_refused() -> None:
    tables = CostTables(node_costs=(np.zeros(2),), edges=())
    with pytest.raises(ValueError, match="2 nodes"):
        solve(tables, MemoryProfile.all_live((np.zeros(2), np.zeros(2)), 4.0))


def instance(rng: np.random.Generator) -> tuple[CostTables, MemoryProfile]:
    """Too large for brute force: 8 to 14 nodes of 3 to 6 configs, with costs that trade off against bytes."""
    n = int(rng.integers(8, 15))
    sizes = [int(k) for k in rng.integers(3, 7, n)]
    held = tuple(rng.integers(0, 40, k).astype(float) for k in sizes)
    costs = tuple(np.maximum(0, 60 - b + rng.integers(-20, 20, b.size)).astype(float) for b in held)
    pairs = {(int(rng.integers(v)), v) for v in range(1, n)}
    pairs |= {(u, v) for v in range(n) for u in range(v) if rng.random() < 0.15}
    edges = []
    for u, v in sorted(pairs):
        matrix = rng.integers(0, 40, (sizes[u], sizes[v])).astype(float)
        matrix[rng.random(matrix.shape) < 0.1] = np.inf
        iota = [np.arange(k, dtype=np.int32) for k in matrix.shape]
        edges.append(EdgeTable(src=u, dst=v, cost=matrix, src_class=iota[0], dst_class=iota[1]))
    points = int(rng.choice([1, 1, 2, 5]))
    start = rng.integers(0, points, n)
    stop = np.minimum(points, start + rng.integers(1, points + 1, n))
    low, high = sum(b.min() for b in held), sum(b.max() for b in held)
    limit = float(np.floor(low + (high - low) * rng.uniform(0.05, 0.5) / min(points, 2)))
    memory = MemoryProfile(bytes=held, start=start, stop=stop, limit_bytes=limit)
    return CostTables(node_costs=costs, edges=tuple(edges)), memory


def by_ilp(tables: CostTables, memory: MemoryProfile) -> float | None:
    """The optimum by HiGHS, which shares nothing with the search; None if nothing fits.

    It has a row for every memory point and a separately linearised product for every pair of configs.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    first = np.concatenate([[0], np.cumsum([c.size for c in tables.node_costs])])
    objective, rows, low, high = [], [], [], []
    for c in tables.node_costs:
        objective += c.tolist()
    width = int(first[-1]) + sum(int(np.isfinite(e.dense()).sum()) for e in tables.edges)

    def row(at: dict[int, float], lo: float, hi: float) -> None:
        line = np.zeros(width)
        for i, value in at.items():
            line[i] = value
        rows.append(line), low.append(lo), high.append(hi)

    for a, b in pairwise(first):
        row(dict.fromkeys(range(a, b), 1.0), 1, 1)
    for e in tables.edges:
        for (i, j), value in np.ndenumerate(e.dense()):
            x, y = int(first[e.src] + i), int(first[e.dst] + j)
            if np.isinf(value):
                row({x: 1.0, y: 1.0}, 0, 1)
            else:
                objective.append(value)
                # The product is at least x + y - 1.
                row({x: 1.0, y: 1.0, len(objective) - 1: -1.0}, -np.inf, 1)
    for t in range(int(memory.stop.max())):
        live = [v for v in range(len(memory.bytes)) if memory.start[v] <= t < memory.stop[v]]
        at = {int(first[v] + k): float(b) for v in live for k, b in enumerate(memory.bytes[v])}
        row(at, -np.inf, memory.limit_bytes)
    whole = np.zeros(width)
    whole[: first[-1]] = 1
    answer = milp(
        np.array(objective),
        integrality=whole,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(np.array(rows), low, high),
        options={"mip_rel_gap": 0, "presolve": False},
    )
    if answer.status == 2:
        return None
    assert answer.status == 0, answer.message
    return float(answer.fun)


@pytest.mark.some(1)
@pytest.mark.parametrize("block", range(5))
def test_the_optimum_under_a_limit_is_the_integer_programs(block: int) -> None:
    for seed in range(10 + block * 2, 12 + block * 2):
        tables, memory = instance(np.random.default_rng(seed))
        want = by_ilp(tables, memory)
        if want is None:
            with pytest.raises(Infeasible):
                solve(tables, memory, effort=Effort(time_limit=600))
            continue
        found = solve(tables, memory, effort=Effort(time_limit=600))
        assert found.optimal and verify(tables, found, memory) == pytest.approx(want, rel=1e-6), seed


def test_no_time_at_all_still_gives_an_answer() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        try:
            want = brute_force(tables, memory).cost
        except Infeasible:
            continue
        found = solve(tables, memory, effort=Effort(time_limit=0.0))
        assert found.bound <= want, seed
        if found.feasible:
            assert verify(tables, found, memory) >= want, seed
        loose = bounded_search(tables, None, Effort(time_limit=0.0), 0, time.perf_counter())
        assert loose.bound <= want + 1e-9


@pytest.mark.some(1)
@pytest.mark.parametrize("block", range(4))
def test_solve_is_brute_force(block: int) -> None:
    for seed in range(block * 2500, block * 2500 + 2500):
        tables = random_tables(np.random.default_rng(seed))
        want = answer(brute_force, tables)
        assert answer(solve, tables) == want, seed


def test_no_finite_config_names_the_node() -> None:
    tables = CostTables(node_costs=(np.zeros(2), np.full(3, np.inf)), edges=(), names=("a", "b"))
    with pytest.raises(Infeasible) as e:
        solve(tables)
    assert e.value.where == "node b"


def test_empty_graph_costs_nothing() -> None:
    assert solve(CostTables(node_costs=(), edges=())).cost == 0.0
