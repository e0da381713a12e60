"""A problem in flat arrays costs what its tables cost."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from pase.search.bounded.flat import Flat, flatten
from tests.search.random_instances import seeds


def drawn(rng: np.random.Generator) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray], Flat]:
    """Return node costs, matrices by pair (in either order, some of them shared), and the flat problem."""
    n = int(rng.integers(1, 6))
    sizes = rng.integers(1, 4, n)
    costs = [rng.integers(0, 9, k).astype(float) for k in sizes]
    tables: dict[tuple[int, int], np.ndarray] = {}
    known: dict[tuple[int, int], np.ndarray] = {}
    for v in range(n):
        for u in range(v):
            if rng.random() < 0.6:
                pair = (u, v) if rng.random() < 0.5 else (v, u)
                shape = int(sizes[pair[0]]), int(sizes[pair[1]])
                fresh = rng.integers(0, 9, shape).astype(float)
                fresh[rng.random(shape) < 0.2] = np.inf
                tables[pair] = known.setdefault(shape, fresh) if rng.random() < 0.5 else fresh
    return costs, tables, flatten(costs, list(tables), list(tables.values()))


@given(seeds)
def test_a_choice_costs_what_its_matrices_say(seed: int) -> None:
    costs, tables, flat = drawn(np.random.default_rng(seed))
    assert flat.n == len(costs) and (flat.head < flat.tail).all()
    for at in np.ndindex(*(c.size for c in costs)):
        want = sum(c[k] for c, k in zip(costs, at, strict=True))
        want += sum(m[at[a], at[b]] for (a, b), m in tables.items())
        assert flat.cost_of(np.array(at)) == want


@given(seeds)
def test_a_forbidden_pair_costs_more_than_any_choice_without_one(seed: int) -> None:
    costs, _, flat = drawn(np.random.default_rng(seed))
    soft = flatten(costs, [], [])
    every = [np.array(at) for at in np.ndindex(*(c.size for c in costs))]
    hard = [flat.cost_of(c) for c in every]
    width = np.diff(flat.slot)[flat.tail]
    entries = flat.softened.entries
    price = [
        soft.cost_of(c) + float(entries[flat.matrix + c[flat.head] * width + c[flat.tail]].sum())
        for c in every
    ]
    dearest = max((h for h in hard if np.isfinite(h)), default=0.0)
    for h, p in zip(hard, price, strict=True):
        assert p == h if np.isfinite(h) else dearest < p < np.inf


@given(seeds)
def test_every_edge_is_listed_at_both_of_its_nodes(seed: int) -> None:
    costs, tables, flat = drawn(np.random.default_rng(seed))
    for v in range(len(costs)):
        mine = sorted(flat.edge[flat.ptr[v] : flat.ptr[v + 1]].tolist())
        assert mine == [e for e, pair in enumerate(tables) if v in pair]
