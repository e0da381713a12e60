"""Reshard steps in numpy over all devices, against the definition of a layout."""

import numpy as np
from hypothesis import given

from pase.local.simulate import part_of, places, whole_of
from tests.local.layouts import SHAPE, cases, chain, held, moved


@given(cases())
def test_moves_bring_every_device_what_it_is_to_hold(case):
    mesh, src, dst, x = case
    steps = chain(src, dst, mesh)
    after = moved(held(x, src, mesh), steps, SHAPE, mesh)
    for place in places(mesh):
        want = part_of(x, dst, place, mesh)
        assert after[place].shape == dst.local_shape(SHAPE, mesh)
        np.testing.assert_array_equal(after[place], want)
    np.testing.assert_array_equal(whole_of(after, SHAPE, dst, mesh), x)
