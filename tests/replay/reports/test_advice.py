"""Advice on single ops, each tried by replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pase.replay.measurement.model import measure
from pase.replay.reports.diagnose import Finding, diagnose_run
from pase.replay.types import CompiledOp, Event, Mark, Timeline, from_events

US = 1000
FLOPS = 2 * 4096**3


def product(n: int, dtype: str = "bf16", kernel: str = "nvjet") -> CompiledOp:
    return CompiledOp(
        part="forward",
        operands=((4096, 4096), (4096, n)),
        product=((4096, 4096), (4096, n), (4096, n)),
        itemsize=2,
        work="product",
        flops=2 * 4096 * 4096 * n,
        nbytes=2 * (4096 * 4096 + 2 * 4096 * n),
        dtype=dtype,
        op_name=f"jit(f)/Layer/product{n}",
        source="model.py:3",
        kernel=kernel,
    )


def steps(ops: dict[str, tuple[CompiledOp, int]], beside_us: int = 0) -> Timeline:
    """Five steps of ops with these durations in µs, one after another; another stream is busy for ``beside_us``."""
    events, marks, at = [], [], 0
    for k in range(5):
        begin = at
        device: dict[str, Any] = {"rank": 0, "device": True, "kind": "kernel", "iteration": k}
        for name, (_, us) in ops.items():
            events.append(Event(name=name, lane="s", start_ns=at, duration_ns=us * US, **device))
            at += us * US
        if beside_us:
            events.append(
                Event(name="beside", lane="s2", start_ns=begin, duration_ns=beside_us * US, **device)
            )
            at = max(at, begin + beside_us * US)
        marks.append(Mark(rank=0, iteration=k, start_ns=begin, end_ns=at))
    t = from_events(events, marks=tuple(marks))
    return replace(t, compiled={n: op for n, (op, _) in ops.items()}, devices={0: "NVIDIA H100 80GB HBM3"})


def found(t: Timeline, kind: str) -> list[Finding]:
    return [f for f in diagnose_run(measure(t)).findings if f.kind == kind]


FAST_US = round(FLOPS / 700e12 * 1e6)


def test_a_padded_product_is_as_fast_as_aligned_ones_of_the_run() -> None:
    ops = {"dot.1": (product(4096), FAST_US), "dot.2": (product(4097), 3 * FAST_US)}
    (f,) = found(steps(ops), "pad")
    assert "4097 to 4160" in f.title
    assert f.cost_ns == pytest.approx((3 - 4160 / 4096) * FAST_US * US, rel=0.01)
    assert f.cost_ns <= f.measured_ns == 3 * FAST_US * US


def test_what_another_stream_does_meanwhile_limits_the_gain() -> None:
    ops = {"dot.1": (product(4096), FAST_US), "dot.2": (product(4097), 3 * FAST_US)}
    (f,) = found(steps(ops, beside_us=round(3.5 * FAST_US)), "pad")
    assert f.cost_ns == pytest.approx(0.5 * FAST_US * US, rel=0.02)


def test_aligned_products_need_no_padding() -> None:
    assert not found(steps({"dot.1": (product(4096), 3 * FAST_US)}), "pad")


def test_products_in_float32_are_faster_in_bfloat16() -> None:
    ops = {"dot.1": (product(4096, "f32", "sm90_xmma_gemm_f32f32_tf32f32_f32"), 4 * FAST_US)}
    (f,) = found(steps(ops), "precision")
    assert f.cost_ns == pytest.approx(2 * FAST_US * US, rel=0.01)


def test_of_a_device_that_is_unknown_nothing_is_said_about_precision() -> None:
    t = steps({"dot.1": (product(4096, "f32"), 4 * FAST_US)})
    assert not found(replace(t, devices={0: "NVIDIA H800"}), "precision")
