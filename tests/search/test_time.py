"""Time limits: no part of the search starts if it would end too late, and reductions that stop early are valid."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pase.clock import Deadline, Stopped
from pase.commands.solve import _since_start
from pase.errors import Infeasible
from pase.search import brute_force, cost_of, solve, verify
from pase.search.bounded.contract import contract
from pase.search.bounded.search import bounded_search
from pase.search.elimination import eliminate, kernels_numpy, plan
from pase.search.elimination.eliminate import run_plan
from pase.search.elimination.exact import best_plan
from pase.search.elimination.factors import Pool, load
from pase.tables.types import CostTables, EdgeTable
from tests.search.random_instances import chain_of_blocks, random_memory, random_tables


def test_a_piece_begins_where_its_like_would_end_in_time() -> None:
    clock = Deadline(time.perf_counter() + 60.0)
    assert clock.allows("move")
    clock.took("move", 1.0)
    clock.took("move", 0.5)
    assert clock.longest == {"move": 1.0} and clock.allows("move")
    clock.took("bound", 59.0)  # more than a minute with its margin
    assert not clock.allows("bound") and clock.allows("move")
    assert clock.run("other", lambda a, b: a + b, 2, b=3) == 5
    assert set(clock.longest) == {"move", "bound", "other"}
    assert not Deadline(time.perf_counter() - 1.0).allows("move")


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


def test_no_time_at_all_still_gives_an_answer() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        try:
            want = brute_force(tables, memory).cost
        except Infeasible:
            continue
        found = solve(tables, memory, time_limit=0.0)
        assert found.bound <= want, seed
        if found.feasible:
            assert verify(tables, found, memory) >= want, seed
        loose = bounded_search(tables, None, 0.0, 0, time.perf_counter())
        assert loose.bound <= want + 1e-9


def test_elimination_stops_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in eliminated nodes, not in seconds: planning and elimination call ``stop`` every few steps."""
    made = {"planned": 0, "eliminated": 0}

    def counted(what: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any) -> Any:
            made[what] += 1
            return step(*args)

        return one

    monkeypatch.setattr(plan._Planner, "eliminate", counted("planned", plan._Planner.eliminate))
    monkeypatch.setattr(eliminate, "_eliminate", counted("eliminated", eliminate._eliminate))
    monkeypatch.setattr(plan, "_TOUCHES_A_LOOK", 0)
    monkeypatch.setattr(eliminate, "_WORK_A_LOOK", 0.0)
    tables = chain_of_blocks(np.random.default_rng(0), 20)
    nodes, pool = len(tables.node_costs), Pool()
    factors = load(tables, pool, kernels_numpy)
    assert best_plan(nodes, factors, pool, stop=lambda: True) is None and made["planned"] == 1
    whole = best_plan(nodes, factors, pool)
    assert whole is not None
    asked = iter([False, True])
    with pytest.raises(Stopped):
        run_plan(whole, pool, kernels_numpy, stop=lambda: next(asked))
    assert made["eliminated"] == 2
    made.update(planned=0, eliminated=0)
    found = solve(tables, time_limit=0.0)
    assert made["planned"] <= 2 and not made["eliminated"]
    assert found.bound <= solve(tables).cost + 1e-9
    assert made["eliminated"]


def test_one_step_stops_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node with many neighbours gives one large table, computed in parts. ``stop`` is called before each part, and
    nothing is computed after it returns True."""
    rng, cls, made = np.random.default_rng(0), np.arange(4, dtype=np.int32), 0
    costs = tuple(rng.integers(0, 9, 4).astype(float) for _ in range(7))
    edges = tuple(
        EdgeTable(src=0, dst=v, cost=rng.integers(0, 9, (4, 4)).astype(float), src_class=cls, dst_class=cls)
        for v in range(1, 7)
    )
    tables = CostTables(node_costs=costs, edges=edges)
    parts = eliminate._parts

    def counted(*args: Any) -> Any:
        nonlocal made
        out = parts(*args)
        made += sum(table.size for _, table in out)
        return out

    monkeypatch.setattr(eliminate, "_parts", counted)
    monkeypatch.setattr(eliminate, "_SIDE", 256)
    monkeypatch.setattr(eliminate, "_WORK_A_LOOK", 0.0)
    pool = Pool()
    whole = plan.plan_elimination(7, load(tables, pool, kernels_numpy), pool, order=tuple(range(7)))
    assert whole.peak == 4**6
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        run_plan(whole, pool, kernels_numpy, stop=lambda: next(asked))
    assert made <= 3 * 2 * 256  # of 4 ** 6 sums of each half


def test_what_the_program_has_done_before_counts() -> None:
    before = time.process_time()
    age = _since_start()
    assert age >= before and age <= _since_start()
