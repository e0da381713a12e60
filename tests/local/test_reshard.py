"""Parts, places of indices, and maxima that are scattered, in numpy on all devices, by the definition of a layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.local.parts import held
from pase.local.reshard import along, part, places_of, resharded
from pase.local.simulate import AllDevices, part_of, places
from pase.local.types import LocalReshardStep
from pase.tables.axis_layout import AxisLayout
from tests.local.layouts import MESHES, SHAPE, states


@given(st.sampled_from(MESHES).flatmap(lambda m: st.tuples(st.just(m), states(m, False))))
def test_each_device_takes_its_part_and_finds_the_elements_in_it(case):
    mesh, layout = case[0], case[1]
    devices = AllDevices(mesh=mesh)

    def everywhere(x):
        return np.broadcast_to(x, (*mesh.sizes, *x.shape))

    x = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    mine = part(everywhere(x), SHAPE, layout, devices)
    ids = np.arange(-1, SHAPE[0] + 1)
    here, found = places_of(everywhere(ids), 0, SHAPE, layout, devices)
    for place in places(mesh):
        np.testing.assert_array_equal(mine[place], part_of(x, layout, place, mesh))
        own = held(SHAPE, layout, place, mesh)
        for dim in (0, 1):
            numbers = along(everywhere(np.arange(SHAPE[dim])), dim, SHAPE, layout, devices)
            np.testing.assert_array_equal(numbers[place], own[dim])
        np.testing.assert_array_equal(found[place], np.isin(ids, own[0]))
        np.testing.assert_array_equal(own[0][here[place][found[place]]], ids[found[place]])


def test_dims_of_one_or_no_element_and_another_size_that_is_refused():
    devices = AllDevices(mesh=MESHES[0])
    one = np.ones((2, 4, 1, 8))
    assert part(one, (16, 8), AxisLayout([(0, 2), (1, 4)]), devices).shape == (2, 4, 1, 2)
    assert part(np.ones((2, 4, 16, 0)), (16, 0), AxisLayout([(0, 2), (0, 4)]), devices).shape == (2, 4, 2, 0)
    with pytest.raises(PaseError, match=r"shape \[4, 8\] does not have the whole shape \[16, 8\]"):
        part(np.ones((2, 4, 4, 8)), (16, 8), AxisLayout([(0, 2), None]), devices)


@pytest.mark.parametrize("combine", ["max", "min"])
def test_extremes_are_scattered(combine):
    mesh = MESHES[0]
    x = np.random.default_rng(0).normal(size=(*mesh.sizes, *SHAPE))
    step = LocalReshardStep(
        kind="reduce_scatter",
        axes=("b",),
        before=AxisLayout([None, "partial"]),
        after=AxisLayout([None, (0, 4)]),
    )
    made = resharded(x, [step], SHAPE, combine, AllDevices(mesh=mesh))
    for i, k in places(mesh):
        want = getattr(x[i], combine)(0)[4 * k : 4 * k + 4]
        np.testing.assert_array_equal(made[i, k], want)
    with pytest.raises(PaseError, match="only sums, maxima and minima"):
        resharded(x, [step], SHAPE, "other", AllDevices(mesh=mesh))
