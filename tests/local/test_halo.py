"""Halos in numpy on all devices: rows of the whole tensor, and the transpose for their gradients."""

import numpy as np
import pytest

from pase.ir import functions
from pase.local.halo import borders_of, widened, widened_back
from pase.local.simulate import AllDevices, part_of, places
from pase.machine import Mesh
from pase.ops import GraphBuilder, windows
from pase.tables.axis_layout import AxisLayout

MESH = Mesh(names=("a", "b", "c"), sizes=(2, 2, 2))
SHAPE, LAYOUT = (12, 8), AxisLayout([(0, 4), (1, 2), (0, 2)])
"""The first dim is split by axis c, and within that by axis a."""


@pytest.mark.parametrize(
    "borders",
    [{0: (2, 1)}, {0: (0, 3), 1: (2, 0)}, {0: (-1, 2), 1: (1, 1)}, {1: (2, -1), 0: (-1, -1)}],
)
def test_each_device_gets_the_rows_around_its_part(borders):
    devices, rng = AllDevices(mesh=MESH), np.random.default_rng(0)
    whole = rng.normal(size=SHAPE)
    x = devices.each(lambda at: part_of(whole, LAYOUT, at, MESH))
    wide = widened(x, borders, LAYOUT, 7.0, devices)
    around = np.pad(whole, 3, constant_values=7.0)
    for a, b, c in places(MESH):
        ranges = []
        for dim, (begin, size) in enumerate(((6 * c + 3 * a, 3), (4 * b, 4))):
            before, behind = borders.get(dim, (0, 0))
            ranges.append(slice(3 + begin - before, 3 + begin + size + behind))
        np.testing.assert_array_equal(wide[a, b, c], around[tuple(ranges)])
    g = rng.normal(size=wide.shape)
    back = widened_back(g, borders, LAYOUT, devices)
    zero_edges = widened(x, borders, LAYOUT, None, devices)
    assert back.shape == x.shape
    np.testing.assert_allclose((back * x).sum(), (g * zero_edges).sum(), rtol=1e-12)


def test_borders_are_those_of_the_dims_under_a_window():
    """Also if the op reads a dim for examples that the operand does not have."""
    b = GraphBuilder("g")
    x = b.input("x", (1, 8, 8, 4), "float32")
    slides = windows.Sliding(strides=(1, 1, 1, 1), padding=(0, 1, 2, 0))
    windows.window_reduce(b, functions.WINDOW_SUM, x, x.shape, (1, 3, 5, 1), slides)
    op = b.finish().nodes[-1].main
    assert borders_of(op, range(4), 4) == {1: (1, 1), 2: (2, 2)}
    assert borders_of(op, [0, 2], 3) == {0: (1, 1)}
