"""Measured tables: interpolation between their points."""

import numpy as np
import pytest

from pase.machine import MatmulTable
from pase.machine.tables import curve_s, matmul_flops_per_s
from tests.costmodels.machines import CURVES, TABLE


def test_a_curve_between_points_is_a_startup_and_a_rate():
    c = CURVES[0].curve
    mid = float(curve_s(c, np.array(sum(c.nbytes[:2]) / 2)))
    assert mid == pytest.approx(sum(c.seconds[:2]) / 2)
    # Below the table: its first time. Above: its last rate.
    assert curve_s(c, np.array([1.0, 4e9])) == pytest.approx([2e-5, 8e-2])


def test_a_product_between_points_takes_seconds_straight_in_each_extent():
    """A cost of launch, operands, result and multiply-adds is interpolated exactly between the corners."""

    def seconds(m, n, k):
        return 1e-6 + 1e-9 * (m * n + 2 * n * k + 3 * m * k) + 1e-11 * m * n * k

    extents = (8, 128, 2048)
    rates = tuple(m * n * k * 2 / seconds(m, n, k) for m in extents for n in extents for k in extents)
    table = MatmulTable(dtype="float32", m=extents, n=extents, k=extents, flops_per_s=rates)
    for m, n, k in ((8, 128, 2048), (24, 500, 129), (2000, 9, 1024)):
        rate = matmul_flops_per_s(table, *(np.array(float(x)) for x in (m, n, k)))
        assert float(rate) == pytest.approx(2 * m * n * k / seconds(m, n, k))
    assert float(matmul_flops_per_s(TABLE, np.array(1e9), np.array(1.0), np.array(1.0))) == pytest.approx(
        8e12
    )
