"""Figures of a device are found again from ops that take what another device predicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.calibrate.figures import FittedFigure, PricedOp, figures, fitted, prices, product
from pase.costmodels.analytic import Analytic
from pase.ir.precision import HIGHEST
from pase.machine import Curve, Machine, MatmulTable, load

WORKS = [product("bfloat16", 2, 1, m, n, k) for m in (512, 4096) for n in (1024, 8192) for k in (1024, 8192)]
LIGHT = [PricedOp(kind="memory", dtype="float32", flops=0.0, nbytes=b) for b in (1e7, 1e9)]
CONVS = [PricedOp(kind="conv", dtype="bfloat16", flops=1e12, nbytes=1e8, mnk=(200704.0, 512.0, 4608.0))]


def put(base: Machine, name: str, times: float, *, throttled: bool) -> tuple[Machine, FittedFigure]:
    """The machine with a multiple of a figure."""
    found = figures(base.device, [*WORKS, *LIGHT, *CONVS], throttled=throttled)
    figure = next(f for f in found if f.name == name)
    return replace(base, device=figure.put(base.device, figure.value * times)), figure


@pytest.mark.parametrize("name", ["h100x8", "v100x8"])
def test_every_figure_is_found_from_the_ops_that_it_prices(name: str) -> None:
    base, works = load(name), [*WORKS, *LIGHT, *CONVS]
    found = figures(base.device, works, throttled=True)
    assert len({f.name for f in found}) == len(found) >= 3
    for f in found:
        made, _ = put(base, f.name, 0.7, throttled=True)
        times = prices(Analytic(made), works)
        again, values = fitted(base, found, works, times, Analytic)
        assert prices(Analytic(again), works) == pytest.approx(times, rel=0.01), f.name
        if f.kinds:
            assert values[found.index(f)] == pytest.approx(0.7 * f.value, rel=0.02)


def test_measured_tables_are_scaled_as_a_whole() -> None:
    base = load("v100x8")
    table = MatmulTable(
        dtype="bfloat16", m=(512, 4096), n=(512, 4096), k=(512, 4096), flops_per_s=(1e13, 2e13) * 4
    )
    curve = Curve(nbytes=(1e6, 1e9), seconds=(5e-6, 2e-3))
    base = replace(base, device=replace(base.device, matmul_tables=(table,), memory_curve=curve))
    works = [*WORKS, *LIGHT]
    found = figures(base.device, works, throttled=True)
    assert [f.name for f in found] == ["matmul_tables bfloat16", "memory_curve"]
    device = base.device
    for f in found:
        device = f.put(device, f.value / 2)
    assert device.matmul_tables[0].flops_per_s == pytest.approx([x / 2 for x in table.flops_per_s])
    assert device.memory_curve is not None
    assert device.memory_curve.seconds == pytest.approx([2 * s for s in curve.seconds])


def test_sums_of_ops_determine_a_rate() -> None:
    """As in a trace, of which only the time of all ops together is fitted."""
    base = load("h100x8")
    made, figure = put(base, "products.rate bfloat16", 0.6, throttled=True)
    sums = np.ones((1, len(WORKS))) * 3
    times = sums @ prices(Analytic(made), WORKS)
    _, (value,) = fitted(base, [figure], WORKS, times, Analytic, sums=sums)
    assert value == pytest.approx(0.6 * figure.value, rel=0.01)


def test_a_rate_above_the_power_limit_s_keeps_other_dtypes() -> None:
    """The part that is left at the power limit grows, and what other dtypes and convolutions reach does not change."""
    base = load("h100x8")
    made, figure = put(base, "products.rate bfloat16", 1.25, throttled=True)
    assert made.device.products is not None and base.device.products is not None
    assert made.device.products.steady > base.device.products.steady
    assert made.device.reached("matmul", "bfloat16") == pytest.approx(1.25 * figure.value)
    for dtype in ("float32", "float8_e4m3fn", HIGHEST):
        assert made.device.reached("matmul", dtype) == pytest.approx(base.device.reached("matmul", dtype))
    one, other = (prices(Analytic(m), CONVS) for m in (base, made))
    assert one == pytest.approx(other, rel=0.01)


def test_rows_that_are_not_aligned_have_a_rate_of_their_own() -> None:
    base = load("h100x8")
    odd = product("bfloat16", 2, 1, 4096, 4097, 4096)
    assert not odd.aligned and product("float32", 4, 1, 4096, 4100, 4096).aligned
    names = {f.name for f in figures(base.device, [odd], throttled=False)}
    assert "products.unaligned bfloat16" in names and "products.rate bfloat16" not in names
    assert (
        prices(Analytic(base), [odd])[0]
        > 2 * prices(Analytic(base), [product("bfloat16", 2, 1, 4096, 4096, 4096)])[0]
    )
