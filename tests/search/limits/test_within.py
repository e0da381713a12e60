"""The cheapest choice within a memory limit, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import Known, MemoryProfile, brute_force, cost_of, price_memory, solve, verify
from pase.search.elimination.priced import effort_of
from pase.search.limits.sums import alike, sums_of
from pase.search.limits.within import Within, fits
from pase.search.types import Effort
from pase.tables.types import CostTables
from tests.search.random_instances import chain_of_blocks, random_memory, random_tables, seeds


def problem(seed: int) -> tuple[CostTables, MemoryProfile, np.ndarray, float | None] | None:
    """(Tables, limit, the cheapest choice, the least cost of a choice that fits); None if the limit does not bind."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    memory = random_memory(rng, tables)
    try:
        free = brute_force(tables).choice
    except Infeasible:
        return None
    try:
        want: float | None = brute_force(tables, memory).cost
    except Infeasible:
        want = None
    return None if fits(memory, free) else (tables, memory, free, want)


def within(tables: CostTables, memory: MemoryProfile, below: float = np.inf, price: float = 0.0) -> Within:
    return Within(
        tables=tables,
        memory=memory,
        eliminate=None,
        kernel="numpy",
        threads=1,
        seed=0,
        below=below,
        price=price,
    )


@settings(max_examples=300, deadline=None)
@given(seeds, st.sampled_from([0.0, 0.01, 1e3]))
@example(36012, 0.0)  # nothing fits, which no price reveals
def test_within_is_brute_force(seed: int, price: float) -> None:
    if (p := problem(seed)) is None:
        return
    tables, memory, free, want = p
    search = within(tables, memory, price=price)
    if want is None:
        with pytest.raises(Infeasible):
            search.run(free)
        return
    assert search.run(free) and search.choice is not None
    assert search.optimal and search.cost == cost_of(tables, search.choice) == want
    assert fits(memory, search.choice) and search.bound <= want


@settings(max_examples=200, deadline=None)
@given(seeds, st.floats(-1.0, 2.0), st.floats(0.0, 1.0))
def test_what_is_known_ends_it_earlier_and_proves_no_less(seed: int, above: float, price: float) -> None:
    if (p := problem(seed)) is None or p[3] is None:
        return
    tables, memory, free, want = p
    below = want + above * (1 + abs(want))
    search = within(tables, memory, below=below, price=price)
    search.run(free)
    assert search.bound <= want
    rounding = 1e-8 * (1 + abs(below))
    if want < below - rounding:
        assert search.cost == want
    else:
        assert search.cost == want or search.bound >= below - rounding


def test_layers_of_a_chain_share_the_limit_exactly() -> None:
    """16 equal layers, some of which must change: exactly as many change as needed, which is proven."""
    rng = np.random.default_rng(3)
    tables = chain_of_blocks(rng, 16)
    held = [rng.integers(0, 50, 5).astype(float) for _ in range(4)]
    nbytes = tuple(held[v % 4] for v in range(len(tables.node_costs)))
    free = solve(tables)
    loose = MemoryProfile.all_live(nbytes, 0.0)
    most, least = float(loose.usage(free.choice)[0]), sum(float(b.min()) for b in nbytes)
    costs = []
    for part in (0.95, 0.7, 0.4):
        memory = MemoryProfile.all_live(nbytes, np.floor(least + part * (most - least)))
        found = solve(tables, memory, effort=Effort(rounds=1))
        verify(tables, found, memory)
        assert found.optimal and found.feasible, (part, found.gap)
        costs.append(found.cost)
        bound, price = price_memory(tables, memory, free)
        assert bound <= found.cost and price > 0
        again = solve(tables, memory, known=Known(byte_price=price, free=free), effort=Effort(rounds=1))
        assert again.cost == found.cost
    assert free.cost <= costs[0] <= costs[1] <= costs[2]


def test_equal_regions_are_one_sum() -> None:
    """Bytes that are live only in one layer's region bind in all regions alike, and the layers still fold."""
    rng = np.random.default_rng(5)
    layers = 40
    tables = chain_of_blocks(rng, layers)
    inner = [rng.integers(0, 50, 5).astype(float) for _ in range(4)]
    n = len(tables.node_costs)
    start = np.arange(n) // 4
    memory = MemoryProfile(
        bytes=tuple(inner[v % 4] for v in range(n)), start=start, stop=start + 1, limit_bytes=60.0
    )
    free = solve(tables)
    assert not fits(memory, free.choice) and len(set(alike(memory))) == 1
    bound, price = price_memory(tables, memory, free)
    assert free.cost < bound and price > 0
    sums = sums_of(memory, [np.ones(layers, bool)])
    assert {h.tobytes() for h in sums.held} == {h.tobytes() for h in sums.held[:4]}


def test_two_points_that_bind_apart_are_two_sums() -> None:
    held = (np.array([4.0, 1.0]), np.array([4.0, 1.0]))
    memory = MemoryProfile(bytes=held, start=np.array([0, 1]), stop=np.array([1, 2]), limit_bytes=2.0)
    costs = (np.array([0.0, 3.0]), np.array([0.0, 5.0]))
    found = solve(CostTables(node_costs=costs, edges=()), memory)
    assert found.optimal and found.cost == 8.0


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_depends_on_neither_threads_nor_clock(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is bitwise the same with more threads and with a clock that advances a minute per call."""
    rng = np.random.default_rng(seed)
    tables = chain_of_blocks(rng, 12, configs=9)
    nbytes = tuple(rng.integers(0, 50, 9).astype(float) for _ in tables.node_costs)
    free = solve(tables)
    most = float(MemoryProfile.all_live(nbytes, 0.0).usage(free.choice)[0])
    memory = MemoryProfile.all_live(nbytes, np.floor(0.6 * most))

    def answer(threads: int) -> tuple[list[int], float, float]:
        found = solve(tables, memory, threads=threads, effort=Effort(time_limit=1e9, rounds=1))
        return found.choice.tolist(), found.cost, found.bound

    quick = answer(1)
    clock = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: 60.0 * next(clock))
    assert answer(2) == answer(3) == quick


def test_the_answer_without_the_limit_takes_no_work_where_it_is_known() -> None:
    p = next(p for p in map(problem, range(100)) if p is not None and p[3] is not None)
    tables, memory = p[:2]
    free = solve(tables)
    first, second = (solve(tables, memory, known=known) for known in (Known(), Known(free=free)))
    assert first.work == second.work + effort_of(free.work) and first.cost == second.cost
