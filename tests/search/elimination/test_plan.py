"""Elimination orders: any gives the same cost, and dependent sets are those of theorem 2."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.search import (
    dependent_sets,
    find_best_strategy,
    generate_seq,
    solve,
)
from tests.search.answers import answer
from tests.search.random_instances import random_tables


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_any_order_gives_the_same_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    order = tuple(int(v) for v in rng.permutation(len(tables.node_costs)))
    assert answer(lambda t: find_best_strategy(t, order), tables) == answer(solve, tables)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_theorem_2_dependent_sets(seed: int) -> None:
    """Theorem 2: D(i) is the set of later nodes adjacent to the component of v_i among the first i nodes."""
    tables = random_tables(np.random.default_rng(seed))
    order = generate_seq(tables)
    near: list[set[int]] = [set() for _ in tables.node_costs]
    for e in tables.edges:
        near[e.src].add(e.dst)
        near[e.dst].add(e.src)
    for i, depend in enumerate(dependent_sets(tables, order)):
        early, component, todo = set(order[:i]), {order[i]}, [order[i]]
        while todo:
            for u in near[todo.pop()] & early - component:
                component.add(u)
                todo.append(u)
        assert depend == set().union(*(near[u] for u in component)) - component - early
