"""Reductions, bounds and the memory limit, against brute force."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force, cost_of, solve, verify
from pase.search.bounded.contract import Contracted, contract, fixed_bytes
from pase.search.bounded.flat import Flat, flatten
from pase.search.bounded.rows import memory_rows
from pase.search.bounded.search import bounded_search
from pase.tables.types import CostTables, EdgeTable
from tests.search.random_instances import random_memory, random_tables


def optimum(tables: CostTables, memory: MemoryProfile | None = None) -> float | None:
    try:
        return brute_force(tables, memory).cost
    except Infeasible:
        return None


def contracted(tables: CostTables, memory: MemoryProfile | None = None) -> Contracted | None:
    try:
        return contract(tables, memory)
    except Infeasible:
        return None


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


@pytest.mark.parametrize("block", range(3))
def test_bounded_search_is_brute_force_under_a_memory_limit(block: int) -> None:
    """Small instances end with a proof, so the cost must be the optimum, and infeasible instances are reported."""
    for seed in range(block * 40, block * 40 + 40):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        want = optimum(tables, memory)
        if want is None:
            with pytest.raises(Infeasible):
                solve(tables, memory, time_limit=20)
            continue
        found = solve(tables, memory, time_limit=20)
        assert verify(tables, found, memory) == want, seed
        assert found.feasible and found.optimal, seed


def test_bounded_search_without_a_limit_is_brute_force() -> None:
    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed))
        want = optimum(tables)
        if want is None:
            with pytest.raises(Infeasible):
                bounded_search(tables, None, 20.0, 0, time.perf_counter())
            continue
        found = bounded_search(tables, None, 20.0, 0, time.perf_counter())
        assert verify(tables, found) == want and found.optimal, seed


def flat_of(tables: CostTables) -> Flat | None:
    """Flat arrays of the tables, with parallel edges added up. None if some config has no finite partner."""
    matrices: dict[tuple[int, int], np.ndarray] = {}
    for e in tables.edges:
        a, b, m = (e.src, e.dst, e.dense()) if e.src < e.dst else (e.dst, e.src, e.dense().T)
        matrices[a, b] = matrices[a, b] + m if (a, b) in matrices else m
    if any(not np.isfinite(c).all() for c in tables.node_costs):
        return None
    for m in matrices.values():
        if not (np.isfinite(m.min(axis=0)).all() and np.isfinite(m.min(axis=1)).all()):
            return None
    return flatten(list(tables.node_costs), list(matrices), list(matrices.values()))


def test_message_passing_bounds_and_forced_configs() -> None:
    """A sweep's bound never exceeds the optimum, and bound + excess never exceeds the best choice with a config."""
    from pase.search.bounded.kernels_flat import trws_pass

    checked = 0
    for seed in range(400):
        tables = random_tables(np.random.default_rng(seed), max_choices=500)
        flat = flat_of(tables)
        want = optimum(tables)
        if flat is None or want is None:
            continue
        checked += 1
        best_with = np.full(flat.cost.size, np.inf)
        sizes = np.diff(flat.slot)
        for i in range(int(sizes.prod())):
            choice = np.array(np.unravel_index(i, sizes), np.int64).reshape(-1)
            at = flat.slot[:-1] + choice
            best_with[at] = np.minimum(best_with[at], flat.cost_of(choice))
        message, reduced = np.zeros(flat.messages), np.zeros(flat.cost.size)
        choice, before = np.zeros(flat.n, np.int64), -np.inf
        for sweep in range(12):
            bound = trws_pass(flat.graph, flat.cost, message, choice, reduced, sweep % 2 == 0, True)
            assert bound <= want + 1e-6 * max(1, abs(want))
            assert bound >= before - 1e-6 * max(1, abs(want))
            assert (before + reduced <= best_with + 1e-6 * max(1, abs(want))).all()
            assert flat.cost_of(choice) >= want
            before = bound
    assert checked > 150


def test_forest_moves_are_exact_on_forests() -> None:
    from pase.search.bounded.kernels_memory import polish

    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed), max_choices=500)
        flat = flat_of(tables)
        if flat is None:
            continue
        want = optimum(tables)
        choice = np.zeros(flat.n, np.int64)
        before = flat.cost_of(choice)
        polish(flat.graph, flat.cost, choice, 1, seed)
        assert flat.cost_of(choice) <= before
        if flat.head.size == 0 or len({*flat.head, *flat.tail}) == flat.head.size + 1:  # one tree, at most
            assert flat.cost_of(choice) == want


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


def test_same_seed_same_answer() -> None:
    rng = np.random.default_rng(5)
    tables = clique(rng, nodes=7, configs=4)
    held = tuple(rng.integers(0, 20, 4).astype(float) for _ in range(7))
    memory = MemoryProfile.all_live(held, 50.0)
    first, second = (solve(tables, memory, seed=3, time_limit=30) for _ in range(2))
    assert first.cost == second.cost
    np.testing.assert_array_equal(first.choice, second.choice)


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


def test_ctrl_c_gives_the_best_so_far() -> None:
    """A dense graph that cannot be finished in time; the second progress report interrupts the search."""
    tables = clique(np.random.default_rng(0), nodes=24, configs=12)
    calls = []

    def interrupt(phase: str, cost: float, bound: float, seconds: float) -> None:
        calls.append(cost)
        if len(calls) == 2:
            raise KeyboardInterrupt

    found = bounded_search(tables, None, 60.0, 0, time.perf_counter(), interrupt)
    verify(tables, found)
    assert found.method == "interrupted" and found.feasible and len(calls) == 2


def clique(rng: np.random.Generator, nodes: int, configs: int) -> CostTables:
    cls = np.arange(configs, dtype=np.int32)
    return CostTables(
        node_costs=tuple(rng.integers(0, 1000, configs).astype(float) for _ in range(nodes)),
        edges=tuple(
            EdgeTable(
                src=u,
                dst=v,
                cost=rng.integers(0, 1000, (configs, configs)).astype(float),
                src_class=cls,
                dst_class=cls,
            )
            for v in range(nodes)
            for u in range(v)
        ),
    )


def test_a_dense_graph_gets_a_bound_and_a_choice() -> None:
    tables = clique(np.random.default_rng(1), nodes=30, configs=12)
    found = solve(tables, time_limit=1.0)
    cost = verify(tables, found)
    assert 0 < found.bound <= cost
    assert found.gap < 0.9  # with random costs, every local bound is far from the optimum


def test_warm_compiles_what_the_search_calls() -> None:
    """A real search adds no signature to any kernel, so warming up leaves nothing to compile."""
    from pase.search.bounded import kernels_flat, kernels_memory
    from pase.search.warm import warm

    warm()
    called = (kernels_memory.dual_ascent, kernels_memory.polish, kernels_memory.lns, kernels_flat.trws_pass)
    before = [len(kernel.signatures) for kernel in called]
    bounded_search(clique(np.random.default_rng(2), nodes=20, configs=10), None, 0.5, 0, time.perf_counter())
    assert [len(kernel.signatures) for kernel in called] == before
