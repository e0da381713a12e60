"""A residual problem keeps what was learnt of the one it came from."""

from __future__ import annotations

import numpy as np

from pase.errors import Infeasible
from pase.search.bounded.contract import contract, restrict
from pase.search.bounded.kernels_flat import trws_pass
from pase.search.bounded.residual import Residual
from tests.search.random_instances import random_tables


def test_a_smaller_problem_keeps_the_bound_of_the_one_it_came_from() -> None:
    """Messages are kept: after configs were dropped, the first sweep proves at least as much as the last one before."""
    checked = 0
    for seed in range(200):
        tables = random_tables(np.random.default_rng(seed))
        try:
            left = contract(tables, until=0.0)
        except Infeasible:
            continue
        old = Residual(left, None)
        if not old.flat.head.size:
            continue
        reduced, before = np.zeros(old.flat.cost.size), -np.inf
        for sweep in range(6):
            before = trws_pass(
                old.flat.graph, old.flat.cost, old.message, old.choice, reduced, sweep % 2 == 0, True
            )
        keep = [np.ones(c.size, bool) for c in left.costs]
        wide = int(np.argmax([c.size for c in left.costs]))
        if keep[wide].size < 2:
            continue
        keep[wide][int(left.costs[wide].argmax())] = False
        constant = left.constant
        try:
            new = Residual(restrict(left, keep, until=0.0), None)
        except Infeasible:
            continue
        new.inherit(old)
        choice, least = np.zeros(new.flat.n, np.int64), np.zeros(new.flat.cost.size)
        after = trws_pass(new.flat.graph, new.flat.cost, new.message, choice, least, True, True)
        assert after + new.left.constant >= before + constant - 1e-6 * max(1.0, abs(before)), seed
        checked += 1
    assert checked > 60
