"""Arrays of a model in stages: where they are, how cut stacks are merged, and which cuts are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pase.backends.jax.pipeline.arrays import (
    ArrayPlacement,
    StackCut,
    is_cut,
    joined,
    merged,
    on_rank,
    registered,
    rows_of,
)
from pase.errors import PaseError

GRID = np.array(jax.devices()[:8]).reshape(2, 2, 2)
X = np.arange(16.0, dtype=np.float32).reshape(4, 4)


def test_an_array_is_on_all_devices_of_its_ranks():
    for ranks in ((0,), (1,), (0, 1)):
        there = ArrayPlacement(ranks, GRID, ("a", "b"), P("a", "b")).put(X)
        assert there.devices() == set(GRID[list(ranks)].ravel())
        for shard in there.addressable_shards:
            _, a, b = (int(k[0]) for k in np.where(shard.device == GRID))
            np.testing.assert_array_equal(shard.data, X[2 * a : 2 * a + 2, 2 * b : 2 * b + 2])


def test_an_array_that_is_there_is_not_copied():
    place = ArrayPlacement((0, 1), GRID, ("a", "b"), P("a"))
    there = place.put(X)
    assert place.put(there) is there


def test_the_parts_of_two_ranks_are_joined_without_a_copy():
    place = ArrayPlacement((0, 1), GRID, ("a", "b"), P(None, "b"))
    there = place.put(X)
    parts = [on_rank(there, place, rank) for rank in (0, 1)]
    for rank, part in enumerate(parts):
        assert part.devices() == set(GRID[rank].ravel())
        np.testing.assert_array_equal(part, X)
    again = joined(parts, place)
    assert again.sharding == there.sharding
    np.testing.assert_array_equal(again, X)
    pointers = [{s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for x in (again, there)]
    assert pointers[0] == pointers[1]


def test_a_leaf_is_that_of_the_first_tree_that_has_it():
    registered(StackCut)
    whole, other = StackCut((jnp.zeros(1), jnp.ones(1))), StackCut((jnp.ones(1), None))
    made = merged({"a": None, "b": other, "c": 3, "d": None}, {"a": 1, "b": whole, "c": 4, "d": None})
    assert made["a"] == 1 and made["c"] == 3 and made["d"] is None
    assert made["b"] is whole and is_cut(made["b"]) and not is_cut(made["c"])


def test_a_cut_stack_is_a_pytree_of_its_parts():
    registered(StackCut)
    registered(StackCut)  # a second call changes nothing
    cut = StackCut((jnp.zeros(2), jnp.ones(3)))
    assert [x.shape for x in jax.tree.leaves(cut)] == [(2,), (3,)]


def test_rows_of_a_stack_are_those_of_the_stages():
    rows = [(0, 1), (1, 4)]
    for given in (X, StackCut((X[:1], X[1:]))):
        first, rest = rows_of(given, rows, "layers")
        np.testing.assert_array_equal(first, X[:1])
        np.testing.assert_array_equal(rest, X[1:])
    with pytest.raises(PaseError, match=r"\[2, 2\].*\[1, 3\]") as e:
        list(rows_of(StackCut((X[:2], X[2:])), rows, "layers"))
    assert e.value.where == "'layers'" and "gathered" in e.value.fix
