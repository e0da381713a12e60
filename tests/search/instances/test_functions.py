"""Cost functions as nodes and edges: an assignment costs what the functions say, by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import Infeasible, PaseError
from pase.search import brute_force
from pase.search.instances.functions import CostFunction, cells, tables_of

SIZES = (2, 3, 2)
SCOPES = ((), (1,), (2, 0), (1, 2), (2, 0, 1))


@pytest.mark.parametrize("seed", range(10))
def test_the_best_assignment_is_that_of_the_functions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    functions = []
    for scope in SCOPES:
        cost = rng.integers(0, 20, [SIZES[v] for v in scope]).astype(float)
        functions.append(CostFunction(scope=scope, cost=np.where(rng.random(cost.shape) < 0.2, np.inf, cost)))
    tables = tables_of(SIZES, functions, "abc")
    want = min(
        sum(float(f.cost[tuple(at[v] for v in f.scope)]) for f in functions) for at in np.ndindex(SIZES)
    )
    if np.isinf(want):
        with pytest.raises(Infeasible):
            brute_force(tables)
        return
    found = brute_force(tables)
    assert found.cost == want
    assert sum(float(f.cost[tuple(found.choice[v] for v in f.scope)]) for f in functions) == want
    assert tables.names is not None and tables.names[3:] == ("function of c a b",)


def test_equal_functions_share_an_array() -> None:
    cost = np.arange(4.0).reshape(2, 2)
    functions = [CostFunction(scope=s, cost=cost.copy()) for s in ((0, 2), (2, 0))]
    a, b = tables_of(SIZES, functions, "abc").edges
    assert a.cost is b.cost and (a.src, a.dst, b.src, b.dst) == (0, 2, 2, 0)


def test_a_problem_without_variables_is_refused() -> None:
    with pytest.raises(PaseError, match="no variables"):
        tables_of((), [], ())


def test_cells_are_the_assignments_of_a_scope() -> None:
    assert cells(SIZES, (0, 1)) == 6 and cells(SIZES, ()) == 1
