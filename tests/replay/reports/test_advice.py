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
    assert "4097 to 4104" in f.title  # the next multiple of 16 bytes, which is the reason that is given
    assert f.cost_ns == pytest.approx((3 - 4104 / 4096) * FAST_US * US, rel=0.01)
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


def launched(kernels: list[tuple[str, int]], every_us: int) -> Timeline:
    """Five steps in which a thread launches a kernel (name, µs) at this interval; each begins with its call's end."""
    events, marks = [], []
    long = every_us * len(kernels) + 100
    for k in range(5):
        zero = k * long * US
        free = zero
        for i, (name, us) in enumerate(kernels):
            number = k * len(kernels) + i
            call = zero + i * every_us * US
            free = max(free, call + 2 * US)
            both: dict[str, Any] = {"rank": 0, "iteration": k, "correlation": number}
            events += [
                Event(
                    lane="t",
                    device=False,
                    kind="runtime",
                    name="cudaLaunchKernel",
                    start_ns=call,
                    duration_ns=2 * US,
                    **both,
                ),
                Event(
                    lane="s",
                    device=True,
                    kind="kernel",
                    name=name,
                    start_ns=free,
                    duration_ns=us * US,
                    **both,
                ),
            ]
            free += us * US
        marks.append(Mark(rank=0, iteration=k, start_ns=zero, end_ns=zero + long * US))
        events.append(
            Event(
                rank=0,
                lane="t",
                device=False,
                kind="annotation",
                name="ProfilerStep",
                start_ns=zero,
                duration_ns=long * US,
                iteration=k,
            )
        )
    return from_events(events, marks=tuple(marks))


def test_a_fused_optimizer_needs_one_launch() -> None:
    """Twenty launches, 50 µs apart, of which one is left: 19 intervals are saved."""
    gemm = [("gemm", 30)] * 4
    (f,) = found(launched([*gemm, *[("multi_tensor_apply_kernel<adam>", 3)] * 20], 50), "optimizer")
    assert "20 kernels" in f.title
    assert f.cost_ns == pytest.approx(19 * 50 * US, rel=0.05) and f.cost_ns <= f.measured_ns
    few = launched([*gemm, *[("multi_tensor_apply_kernel<adam>", 3)] * 7], 50)
    assert not found(few, "optimizer")


def test_a_run_that_waits_for_launches_has_room_for_a_larger_batch() -> None:
    """Kernels of 20 µs, launched every 50 µs: those of twice the examples still fit in between."""
    (f,) = found(launched([("gemm", 20)] * 20, 50), "larger-batch")
    assert f.cost_ns == pytest.approx(1100 * US / 2, rel=0.1) and f.cost_ns <= f.measured_ns
    assert not found(steps({"dot.1": (product(4096), FAST_US)}), "larger-batch")


def test_a_run_that_computes_on_the_cpu_is_promised_no_larger_batch() -> None:
    """As with gloo: threads compute for 400 µs of each step, longer for more examples, and one message follows."""
    events, marks = [], []
    for k in range(5):
        begin = k * 600 * US
        step: dict[str, Any] = {"rank": 0, "iteration": k}
        for i in range(4):
            at = begin + i * 100 * US
            thread: dict[str, Any] = {
                "lane": "t",
                "device": False,
                "kind": "host",
                "name": "aten::mm",
                **step,
            }
            events.append(Event(start_ns=at, duration_ns=100 * US, **thread))
        asked: dict[str, Any] = {"lane": "t", "device": False, "kind": "runtime", "name": "c10d::allreduce_"}
        sent: dict[str, Any] = {
            "lane": "gloo",
            "device": True,
            "kind": "collective",
            "name": "gloo:all_reduce",
        }
        step |= {"start_ns": begin + 400 * US, "correlation": k}
        events.append(Event(duration_ns=US, **asked, **step))
        events.append(Event(duration_ns=200 * US, operation="all_reduce", **sent, **step))
        marks.append(Mark(rank=0, iteration=k, start_ns=begin, end_ns=begin + 600 * US))
    assert not found(from_events(events, marks=tuple(marks)), "larger-batch")


def test_a_collective_hides_at_most_behind_the_compute_that_there_is() -> None:
    """An all-reduce of 300 µs after 200 µs of compute: 200 µs of it can hide."""
    events, marks = [], []
    for k in range(5):
        at: dict[str, Any] = {"rank": 0, "device": True, "iteration": k}
        zero = k * 500 * US
        events += [
            Event(lane="s", kind="kernel", name="gemm", start_ns=zero, duration_ns=200 * US, **at),
            Event(
                lane="c",
                kind="collective",
                name="ncclDevKernel_AllReduce",
                operation="all_reduce",
                start_ns=zero + 200 * US,
                duration_ns=300 * US,
                nbytes=1 << 20,
                **at,
            ),
        ]
        marks.append(Mark(rank=0, iteration=k, start_ns=zero, end_ns=zero + 500 * US))
    (f,) = found(from_events(events, marks=tuple(marks)), "overlap")
    assert "1 call of all_reduce" in f.title and f.measured_ns == 300 * US
    assert f.cost_ns <= 200 * US
