"""Branch and bound over parts of the configs, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.limits.branches import Branches, SummedTables
from tests.search.limits.test_excess import drawn
from tests.search.random_instances import random_tables


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
