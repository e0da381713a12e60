"""Rates from traces. The ops take what another machine's file predicts, so the figures to find are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase import machine
from pase.calibrate.trace_rates import corrected
from pase.costmodels.analytic import Analytic
from pase.machine import Machine
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Amount, Spending

SHAPES = ((4096, 4096, 4096), (8192, 1024, 4096), (512, 2048, 1024))


def spending(true: Machine, more: tuple[Origin, ...] = ()) -> list[Spending]:
    """A step of products and light ops that take what ``true`` predicts."""
    model = Analytic(true)
    origins = [
        Origin(
            kind="product bf16",
            name=f"p{i}",
            product=((m, k), (k, n), (m, n)),
            flops=2 * m * n * k,
            nbytes=2 * (m * k + k * n + m * n),
            precision="bf16",
        )
        for i, (m, n, k) in enumerate(SHAPES)
    ]
    origins += [Origin(kind="norm", name=f"l{b}", flops=0, nbytes=b) for b in (1 << 27, 1 << 24)]
    origins += more
    ops = {}
    for o in origins:
        if o.product:
            m, n = o.product[2]
            ns = model.compute("matmul", "bfloat16", o.flops, o.nbytes, mnk=(m, n, o.product[0][1])) * 1e9
        else:
            ns = model.compute("memory", "float32", 0.0, o.nbytes) * 1e9
        calls = 20
        busy = round(float(np.ravel(ns)[0]) * calls)
        ops[o] = Amount(calls=calls, kernels=calls, clock_ns=busy, busy_ns=busy)
    return [
        Spending(
            rank=0,
            iterations=(0, 1),
            total_ns=1,
            kinds={},
            ops=ops,
            events={},
            idle={},
            device=None,
            device_name="",
        )
    ]


def test_the_true_rates_are_found() -> None:
    base = machine.load("h100x8")
    kernels = base.device.products
    assert kernels is not None
    true = replace(
        base,
        device=replace(
            base.device,
            efficiency={**base.device.efficiency, "memory": 0.7},
            products=replace(kernels, rate={**kernels.rate, "bfloat16": 0.6}),
        ),
    )
    # A product in float32 whose rows are not aligned says nothing of the rate of aligned ones.
    odd = Origin(
        kind="product f32",
        name="odd",
        product=((64, 50), (50, 257), (64, 257)),
        flops=2 * 64 * 50 * 257,
        precision="32-bit",
        rows=(50, 257),
    )
    found, done, left = corrected(base, spending(true, (odd,)), Analytic)
    # Figures that nothing determines stay at the file's, which pulls at all others by less than a thousandth.
    assert found.device.efficiency["memory"] == pytest.approx(0.7, rel=1e-3)
    assert found.device.products is not None
    # float16 is run by the same units.
    rates = {**kernels.rate, "bfloat16": 0.6, "float16": 0.6}
    assert found.device.products.rate == pytest.approx(rates, rel=1e-3)
    assert {c.figure for c in done} == {"efficiency.memory", "products.rate bfloat16"} and not left
    for c in done:
        assert c.after == pytest.approx(
            0.7 if c.figure == "efficiency.memory" else 0.6 * kernels.steady, rel=1e-3
        )
        assert c.predicted_s != pytest.approx(c.measured_s, rel=0.05)


def test_a_card_that_does_not_throttle_keeps_the_other_rates() -> None:
    base = machine.load("h100x8")
    kernels = base.device.products
    assert kernels is not None
    free = replace(
        base,
        device=replace(
            base.device, products=replace(kernels, rate={**kernels.rate, "bfloat16": 0.95}, steady=1.0)
        ),
    )
    found, _, left = corrected(base, spending(free), Analytic)
    assert not left
    for dtype, reached in (("bfloat16", 0.95), ("float32", base.device.reached("matmul", "float32"))):
        # The part that is left at the power limit also divides the writes of results, which are about a percent.
        assert found.device.reached("matmul", dtype) == pytest.approx(reached, rel=1e-2)
    assert machine.parse(machine.dumps(found), "again") == found
    conv = [
        float(Analytic(x).compute("conv", "bfloat16", 1e12, 1e6, mnk=(4096.0, 4096.0, 3e4)))
        for x in (base, found)
    ]
    assert conv[1] == pytest.approx(conv[0], rel=1e-2)


def test_what_no_card_can_do_is_left() -> None:
    base = machine.load("h100x8")
    fast = replace(base, device=replace(base.device, memory_bandwidth_bytes_per_s=5e12, launch_s=1e-9))
    _, done, left = corrected(base, spending(fast), Analytic)
    assert "efficiency.memory" in left and "efficiency.memory" not in {c.figure for c in done}
