"""Reshard steps whose parts do not nest, as rounds of permutes, against the definition of a layout."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.local.exchange import _handed, _matching, exchange, nests
from pase.local.simulate import AllDevices, part_of, places
from pase.local.types import LocalReshardStep
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, Digit
from tests.local.layouts import chain, moved


@pytest.mark.parametrize("seed", range(8))
def test_rounds_bring_every_device_what_it_is_to_hold(seed):
    """Random layouts on meshes with ways of 2 and 3, with digits below digits that no axis holds."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(48, 24))

    def layout(mesh):
        out, blocks = [None] * len(mesh.sizes), [int(rng.choice([1, 2, 3])), 1]
        for a in rng.permutation(len(mesh.sizes)):
            dim = int(rng.integers(-1, 2))
            wide = blocks[dim] * mesh.sizes[a]
            if dim >= 0 and x.shape[dim] % wide == 0:
                out[a] = Digit(dim, wide)
                blocks[dim] = wide * int(rng.choice([1, 2])) if x.shape[dim] % (2 * wide) == 0 else wide
        return AxisLayout(out)

    checked = 0
    for _ in range(200):
        sizes = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (6, 2)][rng.integers(6)]
        mesh = Mesh(names=("a", "b", "c")[: len(sizes)], sizes=sizes)
        for move in chain(layout(mesh), layout(mesh), mesh):
            if move.kind in ("all_to_all", "permute") and not nests(move, x.shape, mesh):
                parts = AllDevices(mesh=mesh).together(part_of(x, move.before, p, mesh) for p in places(mesh))
                after = moved(parts, [move], x.shape, mesh)
                for place in places(mesh):
                    np.testing.assert_array_equal(after[place], part_of(x, move.after, place, mesh))
                checked += 1
    assert checked > 5


@given(st.integers(2, 6), st.integers(0, 2**20))
def test_what_goes_from_whom_to_whom_is_a_sum_of_permutations(n, seed):
    """For any table with equal sums, everything is sent, and in each round all targets differ."""
    rng = np.random.default_rng(seed)
    left = sum(int(rng.integers(1, 5)) * np.eye(n, dtype=int)[rng.permutation(n)] for _ in range(4))
    while left.any():
        targets, amount = _matching(left)
        assert sorted(targets) == list(range(n)) and amount > 0
        left[range(n), targets] -= amount
        assert left.min() >= 0


def test_of_replicas_each_sends_to_one():
    """If several devices hold an element and several others need it, each of these gets it once."""
    for count in (2, 3):
        had = [np.array([k // count]) for k in range(2 * count)]
        has = [np.array([1 - k // count]) for k in range(2 * count)]
        sent = _handed(had, has, 2)
        assert sorted(k for k, _ in sent) == sorted(k for _, k in sent) == list(range(2 * count))
        assert all(units == [source // count] for (source, _), units in sent.items())


def test_parts_of_different_sizes_are_refused():
    mesh = Mesh(names=("a",), sizes=(2,))
    move = LocalReshardStep(
        kind="all_to_all", axes=("a",), before=AxisLayout([(0, 2)]), after=AxisLayout([(1, 2)])
    )
    with pytest.raises(PaseError, match="different sizes") as e:
        exchange(replace(move, after=AxisLayout([None])), (4, 4), mesh)
    assert e.value.where == "all_to_all over a"
