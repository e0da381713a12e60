"""The cost of a choice, recomputed from the tables, and the faults of a solution that are noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force, cost_of, verify
from pase.tables.types import CostTables, EdgeTable

A, B = np.array([1.0, 5.0]), np.array([2.0, 3.0, 7.0])
PAIRS = np.array([[0.0, 10.0], [20.0, np.inf]])
EDGE = EdgeTable(src=1, dst=0, cost=PAIRS, src_class=np.array([0, 1, 1]), dst_class=np.array([0, 1]))
TABLES = CostTables(node_costs=(A, B), edges=(EDGE,))
HELD = MemoryProfile.all_live((np.array([4.0, 1.0]), np.array([3.0, 2.0, 1.0])), 5.0)


def test_a_choice_costs_its_nodes_and_its_pairs() -> None:
    for i, j in np.ndindex(2, 3):
        assert cost_of(TABLES, np.array([i, j])) == A[i] + B[j] + PAIRS[min(j, 1), i]


def test_brute_force_is_the_least_choice_that_fits() -> None:
    free = brute_force(TABLES)
    assert (free.choice.tolist(), free.cost, free.bound) == ([0, 0], 3.0, 3.0)
    # (0, 0) holds 7 bytes and (0, 1) holds 6. (1, 0) holds 4.
    held = brute_force(TABLES, HELD)
    assert held.choice.tolist() == [1, 0] and held.cost == verify(TABLES, held, HELD) == 17.0
    with pytest.raises(Infeasible, match="within the memory limit"):
        brute_force(TABLES, replace(HELD, limit_bytes=1.0))
    with pytest.raises(ValueError, match="at most"):
        brute_force(CostTables(node_costs=(np.zeros(3000),) * 2, edges=()))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"choice": np.array([0])}, "1 choices for 2 nodes"),
        ({"choice": np.array([0, 3])}, "config 3 is out of range"),
        ({"cost": 3.1}, "states a cost of 3.1"),
        ({"bound": 3.5}, "the bound 3.5 exceeds"),
        ({"choice": np.array([1, 1]), "cost": np.inf}, "forbidden config or pair"),
    ],
)
def test_a_wrong_solution_is_refused(changed: dict[str, object], says: str) -> None:
    right = brute_force(TABLES)
    assert verify(TABLES, right) == 3.0
    with pytest.raises(ValueError, match=says):
        verify(TABLES, replace(right, **changed))  # type: ignore[arg-type]


def test_a_feasible_solution_keeps_to_the_limit() -> None:
    right = brute_force(TABLES)
    with pytest.raises(ValueError, match="exceeds the memory limit"):
        verify(TABLES, right, HELD)
    assert verify(TABLES, replace(right, feasible=False), HELD) == 3.0
