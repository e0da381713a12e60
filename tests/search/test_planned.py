"""One elimination order for tables that differ only in costs finds the optimum of each, as brute force does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import PlanCache, brute_force, verify
from pase.tables.types import CostTables
from tests.search.random_instances import chain_of_blocks, random_tables


def other_costs(rng: np.random.Generator, t: CostTables) -> CostTables:
    """Tables of the same structure: nodes and edges that share their costs still share them."""
    new: dict[int, np.ndarray] = {}

    def drawn(a: np.ndarray) -> np.ndarray:
        return new.setdefault(id(a), np.where(np.isfinite(a), rng.integers(0, 9, a.shape), a).astype(float))

    edges = tuple(replace(e, cost=drawn(e.cost)) for e in t.edges)
    return replace(t, node_costs=tuple(drawn(c) for c in t.node_costs), edges=edges)


@pytest.mark.parametrize("seed", range(30))
def test_the_least_choice_is_found_by_a_plan_for_other_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    planned, first = PlanCache(), random_tables(rng)
    for tables in (first, *(other_costs(rng, first) for _ in range(3))):
        try:
            best = brute_force(tables).cost
        except Infeasible:
            with pytest.raises(Infeasible):
                planned.solve(tables)
            continue
        found = planned.solve(tables)
        verify(tables, found)
        assert found.bound == pytest.approx(best)
    assert len(planned.plans) == 1


def test_tables_that_share_less_are_planned_again() -> None:
    tables = chain_of_blocks(np.random.default_rng(0), 2, block=3, configs=3)
    apart = replace(tables, node_costs=tuple(i + c for i, c in enumerate(tables.node_costs)))
    planned = PlanCache()
    for t in (tables, apart):
        assert planned.solve(t).cost == pytest.approx(brute_force(t).cost)
