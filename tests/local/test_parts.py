"""The digits of tensor dims: what does not nest is refused, and where parts are contiguous."""

import pytest

from pase.errors import PaseError
from pase.local.parts import digits
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from tests.local.layouts import MESHES


def test_digits_that_cut_across_each_other_are_refused():
    mesh = Mesh(names=("a", "b"), sizes=(2, 3))
    with pytest.raises(PaseError, match="goes to another axis"):
        digits((6,), AxisLayout([(0, 2), None]), AxisLayout([None, (0, 3)]), mesh)


def test_a_minor_digit_has_no_placement():
    mesh = MESHES[0]
    assert AxisLayout([None, (0, 8)]).placement(2, mesh) is None
    assert AxisLayout([(1, 2), (1, 8)]).placement(2, mesh) == ((), ("a", "b"))
