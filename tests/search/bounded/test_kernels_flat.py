"""Compiled passes over flat tables: their bounds hold and their moves are exact, against brute force."""

from __future__ import annotations

import numpy as np

from pase.search.bounded.flat import Flat, flatten
from pase.tables.types import CostTables
from tests.search.bounded.instances import optimum
from tests.search.random_instances import random_tables


def flat_of(tables: CostTables) -> Flat | None:
    """Flat arrays of the tables, with parallel edges added up. None if some config has no finite partner."""
    matrices: dict[tuple[int, int], np.ndarray] = {}
    for e in tables.edges:
        a, b, m = (e.src, e.dst, e.dense()) if e.src < e.dst else (e.dst, e.src, e.dense().T)
        matrices[a, b] = matrices[a, b] + m if (a, b) in matrices else m
    if any(not np.isfinite(c).all() for c in tables.node_costs):
        return None
    for m in matrices.values():
        if not (np.isfinite(m.min(axis=0)).all() and np.isfinite(m.min(axis=1)).all()):
            return None
    return flatten(list(tables.node_costs), list(matrices), list(matrices.values()))


def test_message_passing_bounds_and_forced_configs() -> None:
    """A sweep's bound never exceeds the optimum, and bound + excess never exceeds the best choice with a config."""
    from pase.search.bounded.kernels_flat import trws_pass

    checked = 0
    for seed in range(400):
        tables = random_tables(np.random.default_rng(seed), max_choices=500)
        flat = flat_of(tables)
        want = optimum(tables)
        if flat is None or want is None:
            continue
        checked += 1
        best_with = np.full(flat.cost.size, np.inf)
        sizes = np.diff(flat.slot)
        for i in range(int(sizes.prod())):
            choice = np.array(np.unravel_index(i, sizes), np.int64).reshape(-1)
            at = flat.slot[:-1] + choice
            best_with[at] = np.minimum(best_with[at], flat.cost_of(choice))
        message, reduced = np.zeros(flat.messages), np.zeros(flat.cost.size)
        choice, before = np.zeros(flat.n, np.int64), -np.inf
        for sweep in range(12):
            bound = trws_pass(flat.graph, flat.cost, message, choice, reduced, sweep % 2 == 0, True)
            assert bound <= want + 1e-6 * max(1, abs(want))
            assert bound >= before - 1e-6 * max(1, abs(want))
            assert (before + reduced <= best_with + 1e-6 * max(1, abs(want))).all()
            assert flat.cost_of(choice) >= want
            before = bound
    assert checked > 150


def test_forest_moves_are_exact_on_forests() -> None:
    from pase.search.bounded.kernels_memory import polish

    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed), max_choices=500)
        flat = flat_of(tables)
        if flat is None:
            continue
        want = optimum(tables)
        choice = np.zeros(flat.n, np.int64)
        before = flat.cost_of(choice)
        polish(flat.graph, flat.cost, choice, 1, seed)
        assert flat.cost_of(choice) <= before
        if flat.head.size == 0 or len({*flat.head, *flat.tail}) == flat.head.size + 1:  # one tree, at most
            assert flat.cost_of(choice) == want
