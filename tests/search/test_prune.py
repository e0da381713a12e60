"""Pruned configs are in no choice below the known cost, and the bound holds, in any order of the edges."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import brute_force
from pase.search.check import cost_of
from pase.search.prune import Pruner
from pase.tables.types import CostTables, EdgeTable
from tests.search.random_instances import random_tables


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2.0))
def test_no_choice_below_the_known_cost_is_lost(seed: int, part: float) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_choices=2000)
    try:
        best = brute_force(tables).cost
    except Infeasible:
        return
    below = best * part + (part - 1)
    sift = Pruner(tables.node_costs, below)
    left = list(tables.edges)
    rng.shuffle(left)  # type: ignore[arg-type]
    while left and not sift.empty:
        take = [left.pop() for _ in range(min(len(left), int(rng.integers(1, 3))))]
        sift.add(
            EdgeTable(
                src=e.src,
                dst=e.dst,
                cost=e.cost,
                src_class=e.src_class[sift.kept[e.src]],
                dst_class=e.dst_class[sift.kept[e.dst]],
            )
            for e in take
        )
        sift.run(2)
    rounding = 1e-9 * (1 + abs(best))
    assert sift.bound <= best + rounding
    if sift.empty:
        assert best >= below - rounding
        return
    rest = sift.tables()
    for choice in np.ndindex(*(c.size for c in tables.node_costs)):
        chosen = np.array(choice)
        if cost_of(tables, chosen) < below - rounding:
            assert all(k in kept for k, kept in zip(chosen, sift.kept, strict=True))
    some = np.array([rng.integers(k.size) for k in sift.kept])
    whole = np.array([k[i] for k, i in zip(sift.kept, some, strict=True)])
    assert np.isclose(cost_of(rest, some), cost_of(tables, whole)) or np.isinf(cost_of(tables, whole))


def test_a_tree_is_proven_by_one_pass() -> None:
    """On a tree, the bound is the optimum, so at its cost nothing is left."""
    rng = np.random.default_rng(0)
    sizes = [4] * 6
    edges = tuple(
        EdgeTable(src=v - 1, dst=v, cost=rng.random((4, 4)), src_class=np.arange(4), dst_class=np.arange(4))
        for v in range(1, 6)
    )
    tables = CostTables(node_costs=tuple(rng.random(k) for k in sizes), edges=edges)
    best = brute_force(tables).cost
    sift = Pruner(tables.node_costs, best * 2)
    sift.add(edges)
    sift.run(3)
    assert np.isclose(sift.bound, best)
