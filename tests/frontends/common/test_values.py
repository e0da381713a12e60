"""Values of a framework's graph: views are made when they are read, and numbers become part of ops."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.common.values import Value, known
from pase.ir import functions
from tests.frontends.common.site import OneOp


def test_a_reshape_that_nobody_reads_is_not_made() -> None:
    c = OneOp()
    x = c.input(2, 3, 4)
    y = c.reshape(c.reshape(x, (6, 4)), (2, 12))
    assert len(c.b.nodes) == 1
    np.testing.assert_array_equal(c.computed(y), c.array(x).reshape(2, 12))
    assert len(c.b.nodes) == 2  # from the first value, in one step
    assert c.reshape(y, (2, 3, 4)) is x and c.reshape(x, (2, 3, 4)) is x


def test_a_value_is_made_once_and_where_it_was_asked_for() -> None:
    c = OneOp()
    x = c.input(2, 3)
    with c.b.region("loop", "0.", times=5):
        y = c.reshape(x, (6,))
    assert c.tensor(y) is c.tensor(y)
    assert c.b.nodes[-1].ops[0].times == 5


def test_contents_are_known_only_if_they_will_not_change() -> None:
    a = np.arange(6)
    assert known(a).known is a and known(a).dtype == "int64" and known(3.0).literal
    weight = Value(shape=(6,), dtype="float32", read=lambda: a)
    assert weight.data is a and weight.known is None and not weight.literal
    c = OneOp()
    reshaped = c.reshape(known(a), (2, 3))
    assert reshaped.known is not None
    np.testing.assert_array_equal(reshaped.known, a.reshape(2, 3))


def test_numbers_become_part_of_the_op() -> None:
    c = OneOp()
    x = c.input(2, 3)
    y = c.elementwise([x, known(np.float32(2.0))], functions.MUL)
    assert y.shape == (2, 3) and len(c.b.nodes[-1].ops[0].reads) == 1
    both = c.elementwise([known(1.0), known(2.0)], functions.ADD)
    assert both.shape == () and both.tensor is None


def test_comparisons_are_boolean_and_results_broadcast() -> None:
    c = OneOp()
    y = c.elementwise([c.input(2, 1), c.input(3)], functions.EQUAL)
    assert y.dtype == "bool" and y.shape == (2, 3)


def test_rows_of_a_merged_value_are_what_was_merged() -> None:
    c = OneOp()
    x = c.input(2, 4, 8)
    assert c.unmerged(c.reshape(x, (8, 8))) is x
    assert c.unmerged(x) is x
    assert c.unmerged(c.reshape(x, (2, 32))).shape == (2, 32)


def test_a_transpose_that_changes_nothing_is_the_value() -> None:
    c = OneOp()
    x = c.input(2, 3, 4)
    assert c.transpose(x, (0, 1, 2)) is x
    np.testing.assert_array_equal(c.computed(c.transpose(x, (2, 0, 1))), c.array(x).transpose(2, 0, 1))


def test_a_value_without_elements_cannot_be_read() -> None:
    c = OneOp()
    empty = c.nothing((0, 3), "float32")
    assert c.elementwise([empty, c.input(3)], functions.ADD).shape == (0, 3)
    with pytest.raises(PaseError, match="has no elements"):
        c.tensor(empty)


def test_axes_count_from_the_end_too() -> None:
    c = OneOp()
    assert c.axis(-1, 3) == 2 and c.axes([0, -1], 3) == [0, 2]
    with pytest.raises(PaseError, match="axis 3 is out of range for a tensor of 3 dims") as e:
        c.axis(3, 3)
    assert e.value.where == c.place
    with pytest.raises(PaseError, match="name a dim twice"):
        c.axes([1, -2], 3)


@pytest.mark.parametrize("shape", [(-1, 3), (1 << 40, 1 << 40), (1,) * 65])
def test_shapes_that_are_none_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PaseError, match="is not valid"):
        OneOp().shape(shape)


def test_a_reshape_keeps_the_number_of_elements() -> None:
    c = OneOp()
    with pytest.raises(PaseError, match=r"\[2, 3\] cannot be reshaped to \[4\]"):
        c.reshape(c.input(2, 3), (4,))
    with pytest.raises(PaseError, match=r"\[2\], \[3\] do not broadcast"):
        c.broadcast((2,), (3,))
