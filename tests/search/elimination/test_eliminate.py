"""Elimination in parts: it stops where it is told, and is exact where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pase.clock import Stopped
from pase.search import (
    brute_force,
    find_best_strategy,
    solve,
)
from pase.search.elimination import eliminate, kernels_numpy, plan
from pase.search.elimination.eliminate import run_plan
from pase.search.elimination.exact import best_plan
from pase.search.elimination.factors import Pool, load
from pase.search.types import Effort
from pase.tables.types import CostTables, EdgeTable
from tests.search.answers import answer
from tests.search.random_instances import chain_of_blocks, random_tables


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
    found = solve(tables, effort=Effort(time_limit=0.0))
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


@pytest.mark.parametrize("cells", [1, 5, 30])
def test_tables_made_in_parts_are_brute_force(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the size of the parts in which a table is computed."""
    monkeypatch.setattr(eliminate, "_SIDE", cells)
    monkeypatch.setattr(eliminate, "_PRODUCTS", cells)
    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed))
        want = answer(brute_force, tables)
        assert answer(lambda t: find_best_strategy(t, kernel="numpy"), tables) == want, seed
