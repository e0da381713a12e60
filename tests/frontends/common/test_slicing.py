"""Slices, joins, broadcasts and lookups: their shapes, what is read in place, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.common.slicing import join, part, spread, take, take_along
from pase.frontends.common.values import Value, known
from tests.frontends.common.site import OneOp
from tests.ops.evaluated import kinds


def gates(c: OneOp, order: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Value, list[Value]]:
    """A weight [8, 6] and its four slices of two rows, in an order."""
    w = c.weight(8, 6)
    cuts = [part(c, w, (2, 6), (False, True), "slice", (0, 2 * i, 2 * i + 2)) for i in order]
    return w, cuts


def test_slices_of_a_weight_that_are_joined_again_are_the_weight() -> None:
    """It is then stored in the other order, and nothing is moved."""
    c = OneOp()
    w, cuts = gates(c, (2, 0, 3, 1))
    assert join(c, cuts, 0) is w and not c.b.nodes


def test_some_of_the_slices_are_not_the_weight() -> None:
    c = OneOp()
    _, cuts = gates(c)
    assert join(c, cuts[:3], 0).shape == (6, 6)
    assert [n.ops[0].name for n in c.b.nodes] == ["parameter", "slice", "slice", "slice", "concatenate"]


def test_one_of_equal_parts_may_be_split_within_the_part() -> None:
    c = OneOp()
    cut = part(c, c.input(8, 6), (2, 6), (False, True), "slice", (0, 2))
    assert cut.shape == (2, 6) and set(kinds(c.b.nodes[-1], "parallel")) == {"d0", "d1"}
    odd = part(c, c.input(8, 6), (3, 6), (False, True), "slice", (0, 2))
    assert odd.shape == (3, 6) and kinds(c.b.nodes[-1], "parallel") == ["d1"]


def test_joins_of_what_has_no_elements() -> None:
    c = OneOp()
    x, empty = c.input(2, 3), c.nothing((0, 3), "float32")
    assert join(c, [x, empty], 0) is x
    assert join(c, [empty, empty], 0).shape == (0, 3)
    assert join(c, [x, c.input(4, 3)], -2).shape == (6, 3)


@pytest.mark.parametrize(
    ("other", "axis", "what"),
    [
        ((2, 4), 0, "concatenated along dim 0"),
        ((2,), 0, "concatenated"),
        ((2, 3), 2, "out of range"),
    ],
)
def test_joins_that_do_not_fit_are_refused(other: tuple[int, ...], axis: int, what: str) -> None:
    c = OneOp()
    with pytest.raises(PaseError, match=what):
        join(c, [c.input(2, 3), c.input(*other)], axis)


def test_broadcasts_are_numpys() -> None:
    c = OneOp()
    x = c.input(3, 1)
    y = spread(c, x, (2, 3, 4))
    np.testing.assert_array_equal(c.computed(y), np.broadcast_to(c.array(x), (2, 3, 4)))
    assert spread(c, x, (3, 1)) is x and spread(c, known(1.0), (5,)).tensor is None


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_shape_of_a_lookup_is_numpys(axis: int) -> None:
    c = OneOp()
    x, ids = c.input(4, 5, 6), c.input(2, 3)
    wanted = np.take(c.array(x), np.zeros((2, 3), int), axis)
    assert take(c, x, ids, axis).shape == wanted.shape
    assert c.b.nodes[-1].kind == "gather" and len(kinds(c.b.nodes[-1], "reduction")) == 1


def test_a_single_known_index_is_a_slice() -> None:
    c = OneOp()
    row = take(c, c.input(4, 5), known(np.array(2)), 0)
    assert row.shape == (5,) and not any(n.kind == "gather" for n in c.b.nodes)


def test_elements_are_taken_along_a_dim() -> None:
    """The other dims may be split, if the index has all of them."""
    c = OneOp()
    made = take_along(c, c.input(4, 5), c.input(4, 1), 1)
    assert made.shape == (4, 1) and c.b.nodes[-1].kind == "gather"
    assert take_along(c, c.input(4, 5), c.input(2, 3), 1).shape == (2, 3)
    assert c.b.nodes[-1].kind == "view"
    with pytest.raises(PaseError, match=r"indices have shape \[4\]"):
        take_along(c, c.input(4, 5), c.input(4), 1)
