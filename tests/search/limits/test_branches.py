"""Branch and bound over parts of the configs, and the min-marginals that prune them, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.elimination.marginals import min_marginals
from pase.search.elimination.priced import prepare
from pase.search.limits.branches import Branches, SummedTables
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


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 1.2), st.sampled_from([0, 1, 400]))
def test_branches_are_brute_force(seed: int, loose: float, most: int) -> None:
    """Two excess sums and one limited sum. However early the search ends, the bound holds."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    excess, mean = drawn(rng, tables)
    try:
        brute_force(mean)
    except Infeasible:
        return
    limited = [rng.integers(0, 50, c.size).astype(float) for c in mean.node_costs]
    room = loose * sum(float(h.mean()) for h in limited)
    problem = SummedTables(
        tables=mean,
        held=excess.joined([h[:, None] for h in limited]),
        along=excess.along_joined(1),
        room=np.array([room, np.inf, np.inf]),
        weights=np.append(0.0, excess.weights),
    )
    best = [1e6]

    def paid(choice: np.ndarray) -> float:
        sums = problem.sums(choice)
        if sums[0] > room:
            return np.inf
        return excess.cost(cost_of(mean, choice), choice)

    def offer(choice: np.ndarray) -> None:
        best[0] = min(best[0], paid(choice))

    every = map(np.array, itertools.product(*(range(c.size) for c in mean.node_costs)))
    want = min(map(paid, every), default=np.inf)
    branches = Branches(
        problem=problem, kernel="numpy", seed=0, offer=offer, top=lambda: best[0], stop=lambda: False
    )
    bound = branches.run(np.append(0.0, excess.weights), most)
    assert bound is not None
    assert bound <= min(want, 1e6) + 1e-9 * (1 + abs(min(want, 1e6)))
    if branches.parts < 16 and most == 400:
        assert best[0] == pytest.approx(min(want, 1e6), rel=1e-9, abs=1e-9)
        assert bound == pytest.approx(best[0], rel=1e-8, abs=1e-8)
