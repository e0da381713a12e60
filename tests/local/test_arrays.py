"""Operations that are written once over the collectives of a framework, in numpy on all devices."""

import numpy as np
import pytest

from pase.errors import PaseError
from pase.local.arrays import check_combine
from pase.local.simulate import AllDevices
from pase.machine import Mesh

DEVICES = AllDevices(mesh=Mesh(names=("a", "one", "b"), sizes=(2, 1, 3)))


def test_axes_of_one_device_are_not_wide():
    assert DEVICES.wide(("a", "one", "b")) == ("a", "b") and DEVICES.ways(("a", "one", "b")) == 6


def test_dims_are_reordered_only_if_their_order_changes():
    x = np.arange(36.0).reshape(2, 1, 3, 6)
    assert DEVICES.rearranged(x, (2, 3), (0, 1), (3, 2)).base is x.base
    made = DEVICES.rearranged(x, (2, 3), (1, 0), (6,))
    np.testing.assert_array_equal(made[1, 0, 2], x[1, 0, 2].reshape(2, 3).T.reshape(6))


def test_neighbours_exchange_rows_and_ends_receive_zeros():
    x = np.arange(1.0, 13.0).reshape(2, 1, 3, 2)
    before, behind = DEVICES.neighbours(x, ("b",), 0, 1, 2)
    np.testing.assert_array_equal(before[1, 0], [[0, 0], [7, 8], [9, 10]])
    np.testing.assert_array_equal(behind[1, 0], [[9], [11], [0]])


def test_each_device_takes_one_of_two_values_by_its_place():
    x = np.arange(1.0, 13.0).reshape(2, 1, 3, 2)
    number = DEVICES.number(("b", "a"))
    made = DEVICES.either(number >= 3, lambda: [x, x[..., 0]], lambda: [-x, x[..., 1]])
    for at in np.ndindex(2, 1, 3):
        later = 2 * at[2] + at[0] >= 3
        np.testing.assert_array_equal(made[0][at], x[at] if later else -x[at])
        assert made[1][at] == x[at][0 if later else 1]
    np.testing.assert_array_equal(DEVICES.selected(number == 0, lambda: x, lambda: -x)[0, 0, 0], x[0, 0, 0])


def test_what_goes_around_visits_all_devices_and_returns():
    """Each device visits the array of each device; the sum of what all visits return arrives at its owner."""
    axes, x = ("a", "b"), np.arange(6.0).reshape(2, 1, 3, 1)
    visited = []

    def visit(t, passed, state):
        visited.append((t, passed[0].ravel().tolist()))
        return [sum(state) + passed[0], 10.0 ** DEVICES.number(axes, 1)]

    (total,), (sums,) = DEVICES.around(axes, [x], 1, visit)
    assert visited == [(t, [(i - t) % 6 for i in range(6)]) for t in range(6)]
    assert (total == 15).all() and (sums == 111111).all()


def test_only_sums_and_extremes_are_reduced():
    check_combine("max", ("a",))
    with pytest.raises(PaseError, match="only sums, maxima and minima") as e:
        check_combine("other", ("a", "b"))
    assert e.value.where == "the reduction over a, b" and e.value.fix
