"""One order, eliminated at many prices per byte: each time the least sum of costs and priced bytes, by brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from pase.errors import Infeasible
from pase.search import brute_force, cost_of
from pase.search.elimination.priced import HeldAlong, prepare
from tests.search.random_instances import random_tables, seeds


@settings(max_examples=50)
@given(seeds)
def test_every_price_gives_the_least_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, max_choices=500)
    try:
        brute_force(tables)
    except Infeasible:
        return
    held = [rng.integers(0, 9, (c.size, 2)).astype(float) for c in tables.node_costs]
    along = [
        HeldAlong(
            src=e.src,
            dst=e.dst,
            src_class=e.src_class,
            dst_class=e.dst_class,
            held=rng.integers(0, 9, (*e.cost.shape, 2)).astype(float),
        )
        for e in tables.edges[:1]
    ]
    made = prepare(tables, held, "numpy", 1, 0, along)
    assert made is not None
    for prices in (np.zeros(2), np.array([1.0, 0.0]), np.array([0.5, 3.0])):
        costs = tuple(c + h @ prices for c, h in zip(tables.node_costs, held, strict=True))
        edges = tuple(
            replace(e, cost=e.cost + along[i].held @ prices) if i < len(along) else e
            for i, e in enumerate(tables.edges)
        )
        priced = replace(tables, node_costs=costs, edges=edges)
        best = brute_force(priced).cost
        choice, least, _ = made.at(prices)
        assert least == pytest.approx(best) == cost_of(priced, choice)
