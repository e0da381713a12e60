"""Labels hold every choice that matters, against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.elimination.priced import prepare
from pase.search.limits.labels import label_choices
from pase.search.limits.sums import sums_of
from tests.search.random_instances import chain_of_blocks, random_memory, random_tables, seeds


@settings(max_examples=200, deadline=None)
@given(seeds, st.floats(0.0, 3.0), st.floats(0.0, 2.0))
def test_labels_are_all_that_matters_below_the_cap(seed: int, price: float, part: float) -> None:
    """The cheapest choice within the sums that costs at most the cap above the bound at these prices is among the
    labels, with its true cost."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_choices=500)
    memory = random_memory(rng, tables)
    try:
        brute_force(tables)
    except Infeasible:
        return
    points = int(memory.stop.max(initial=0))
    if not points:
        return
    groups = [rng.random(points) < 0.7 for _ in range(int(rng.integers(1, 4)))]
    groups = [g if g.any() else np.ones(points, bool) for g in groups]
    sums = sums_of(memory, groups)
    prices = rng.uniform(0.0, price + 1e-9, len(groups))
    priced = prepare(tables, sums.held, "numpy", 1, 0)
    assert priced is not None
    _, least, pool = priced.at(prices)
    cap = part * (1.0 + abs(least))
    got = label_choices(priced, pool, prices, least, sums.room, cap, 10**6)
    assert got.whole
    want = np.inf
    for choice in np.ndindex(*(c.size for c in tables.node_costs)):
        chosen = np.array(choice)
        cost, used = cost_of(tables, chosen), sums.used(chosen)
        if cost + sums.room @ prices <= least + cap * (1 - 1e-9) and (used <= sums.room).all():
            want = min(want, cost)
    for i in range(got.cost.size):
        choice = got.choice(i)
        assert np.isclose(got.cost[i], cost_of(tables, choice), rtol=1e-9, atol=1e-6)
        assert (sums.used(choice) <= sums.room * (1 + 1e-9) + 1e-6).all()
    assert want == np.inf or got.cost[0] <= want + 1e-9 * (1 + abs(want))


@settings(max_examples=200, deadline=None)
@given(seeds, st.floats(0.01, 2.0))
def test_labels_hold_the_cheapest_with_an_excess(seed: int, part: float) -> None:
    """Under a limit, with excess sums: the cheapest choice up to the cap above the bound is among the labels."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_choices=500)
    try:
        brute_force(tables)
    except Infeasible:
        return
    limited = int(rng.integers(0, 2))
    held = tuple(
        np.hstack([rng.uniform(0, 5, (c.size, limited)), rng.uniform(-3, 3, (c.size, 2))])
        for c in tables.node_costs
    )
    if not held:
        return
    room = np.append(rng.uniform(1, 3 * len(held), limited), [np.inf, np.inf])
    prices = np.append(rng.uniform(0, 0.5, limited), rng.choice([0.0, 0.3, 0.8, 1.0], 2))
    priced = prepare(tables, held, "numpy", 1, 0)
    assert priced is not None
    _, least, pool = priced.at(prices)
    bound = least - float(prices[:limited] @ room[:limited])
    cap = part * (1.0 + abs(least))
    got = label_choices(priced, pool, prices, least, room, cap, 10**6)
    assert got.whole

    def paid(cost: float, used: np.ndarray) -> float:
        return cost + float(np.maximum(used[limited:], 0.0).sum())

    want = np.inf
    for choice in np.ndindex(*(c.size for c in tables.node_costs)):
        used = np.sum([h[k] for h, k in zip(held, choice, strict=True)], axis=0)
        if (used[:limited] <= room[:limited]).all():
            want = min(want, paid(cost_of(tables, np.array(choice)), used))
    found = min((paid(c, u) for c, u in zip(got.cost, got.used, strict=True)), default=np.inf)
    if np.isinf(want):
        assert np.isinf(found)
        return
    assert found >= want - 1e-9 * (1 + abs(want))
    if want <= bound + cap * (1 - 1e-9):
        assert found <= want + 1e-9 * (1 + abs(want))


def test_what_a_budget_leaves_out_is_said_and_the_rest_is_true() -> None:
    """Beyond the budget, the labels of a step are few, and those that are left are choices with their true costs."""
    rng = np.random.default_rng(0)
    tables = chain_of_blocks(rng, 12, configs=12)
    held = tuple(rng.uniform(0.0, 1.0, (c.size, 2)) for c in tables.node_costs)
    room = np.full(2, 0.5 * len(held))
    priced = prepare(tables, held, "numpy", 1, 0)
    assert priced is not None
    prices = np.full(2, 0.1)
    _, least, pool = priced.at(prices)
    cap = 0.5 * abs(least)
    got, more = (label_choices(priced, pool, prices, least, room, cap, n) for n in (10_000, 1_000_000))
    assert not got.whole and got.made < more.made
    assert got.cost.size
    for i in range(got.cost.size):
        choice = got.choice(i)
        np.testing.assert_allclose(got.cost[i], cost_of(tables, choice))
        assert (sum(h[k] for h, k in zip(held, choice, strict=True)) <= room + 1e-9).all()
