"""Min-marginals, which prune configs, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.elimination.marginals import min_marginals
from pase.search.elimination.priced import prepare
from pase.search.limits.branches import SummedTables
from tests.search.limits.test_excess import drawn
from tests.search.random_instances import random_tables


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_min_marginals_are_the_cheapest_choice_with_each_config(seed: int, priced: bool) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    excess, mean = drawn(rng, tables)
    prices = rng.uniform(size=2) * priced
    try:
        brute_force(mean)
    except Infeasible:
        return
    ready = prepare(mean, excess.held, "numpy", 1, 0, excess.along)
    assert ready is not None
    choice, least, pool = ready.at(prices)

    def cost(c: np.ndarray) -> float:
        return cost_of(mean, c) + float(prices @ problem.sums(c))

    problem = SummedTables(
        tables=mean, held=excess.held, along=excess.along, room=np.full(2, np.inf), weights=excess.weights
    )
    assert np.isclose(cost(choice), least)
    want = [np.full(c.size, np.inf) for c in mean.node_costs]
    for every in itertools.product(*(range(c.size) for c in mean.node_costs)):
        c = cost(np.array(every))
        for v, k in enumerate(every):
            want[v][k] = min(want[v][k], c)
    for got, exact in zip(min_marginals(ready.plan, pool), want, strict=True):
        # Parts of the graph that are not connected with a node are not included in its min-marginals.
        assert np.allclose(got - got.min() + least, exact, rtol=1e-9, atol=1e-9)
