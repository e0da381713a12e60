"""Corrects a machine's rates of products and light ops by what a trace shows of them.

A trace has the ops of one program, not a grid of sizes. So each figure of the machine file of which a trace says
something is scaled by one factor, at which the traced ops together take the time that they took. The form of the
prediction (waves, starts, memory beside arithmetic) stays that of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pase.machine import CostModel, Device, Machine, ProductKernels
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Spending

__all__ = ["Corrected", "corrected"]

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f32": "float32",
    "tf32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}
_SPAN = 16.0
"""A file that is off by more than this factor is of another device."""
_HALVINGS = 60
_FEWEST_S = 1e-4
"""Ops that take less than this in a step say little of a rate."""
_LIGHT = ("norm", "elementwise", "copy", "embedding", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A figure of the device that was scaled. before, after: its values; ops: kinds of ops that it was scaled by;
    measured_s: what they take in a step; predicted_s: what the file said they take."""

    figure: str
    before: float
    after: float
    ops: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class _Ops:
    """Ops of one kind: durations in a step, FLOPs and bytes of a call, calls in a step, extents of products."""

    kind: str
    dtype: str
    seconds: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray
    calls: np.ndarray
    mnk: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    def predicted_s(self, model: CostModel) -> float:
        each = model.compute(self.kind, self.dtype, self.flops, self.nbytes, mnk=self.mnk)
        return float((each * self.calls).sum())


def corrected(
    machine: Machine, spent: Sequence[Spending], model: Callable[[Machine], CostModel]
) -> tuple[Machine, list[Corrected], dict[str, str]]:
    """Returns the machine with corrected rates, what was corrected, and what was not: figure → why.

    model: makes the cost model that predicts with a machine.
    """
    done: list[Corrected] = []
    left: dict[str, str] = {}
    for ops in _found(spent):
        figure, before, scaled = _figure(machine.device, ops)
        measured = float(ops.seconds.sum())
        if measured < _FEWEST_S:
            left[figure] = f"its ops take {measured * 1e6:.0f} µs a step, too little to say something"
            continue

        predicted = partial(_predicted_s, ops, model, machine, scaled)
        factor, why = _factor(predicted, measured)
        if why:
            left[figure] = why
        elif before * factor > 1.0:
            left[figure] = (
                f"the traced ops would need {before * factor:.2f} times the file's peak rate, "
                "as ops whose operands stay in a cache do"
            )
        else:
            done.append(
                Corrected(
                    figure=figure,
                    before=before,
                    after=before * factor,
                    ops=len(ops.seconds),
                    measured_s=measured,
                    predicted_s=predicted(1.0),
                )
            )
            machine = replace(machine, device=scaled(factor))
    return machine, done, left


def _predicted_s(
    ops: _Ops,
    model: Callable[[Machine], CostModel],
    machine: Machine,
    scaled: Callable[[float], Device],
    factor: float,
) -> float:
    return ops.predicted_s(model(replace(machine, device=scaled(factor))))


def _factor(predicted_s: Callable[[float], float], measured: float) -> tuple[float, str]:
    """Returns the factor of a rate at which the prediction is what was measured, or why there is none."""
    low, high = math.log(1 / _SPAN), math.log(_SPAN)
    if predicted_s(math.exp(high)) > measured:
        return 1.0, "the traced ops are faster than their other limits in the file allow at any rate"
    if predicted_s(math.exp(low)) < measured:
        return (
            1.0,
            f"the traced ops run at less than a {_SPAN:.0f}th of the file's rate: is it another device?",
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_s(math.exp(middle)) > measured else (low, middle)
    return math.exp((low + high) / 2), ""


def _found(spent: Sequence[Spending]) -> list[_Ops]:
    """Returns the ops of all ranks with known FLOPs or bytes; times are means over ranks."""
    groups: dict[tuple[str, str], list[tuple[Origin, float, float]]] = {}
    for s in spent:
        for o, a in s.ops.items():
            key = _key(o)
            if key is not None and a.calls and a.busy_ns:
                each = len(s.iterations) * len(spent)
                groups.setdefault(key, []).append((o, a.busy_ns / each / 1e9, a.calls / each))
    out = []
    # Light ops first: products of little work are limited by the memory's rate, too.
    for (kind, dtype), found in sorted(groups.items(), key=lambda g: (g[0][0] != "memory", g[0])):
        extents = [_mnk(o) for o, _, _ in found]
        out.append(
            _Ops(
                kind=kind,
                dtype=dtype,
                seconds=np.array([s for _, s, _ in found]),
                flops=np.array([max(o.flops, 0) for o, _, _ in found], dtype=float),
                nbytes=np.array([max(o.nbytes, 0) for o, _, _ in found], dtype=float),
                calls=np.array([n for _, _, n in found]),
                mnk=tuple(np.array(x) for x in zip(*extents, strict=True)) if kind == "matmul" else None,  # type: ignore[arg-type]
            )
        )
    return out


def _key(o: Origin) -> tuple[str, str] | None:
    """Returns the kind of local work and the dtype; None if the op says nothing of a rate.

    Products whose rows are not aligned are left out: libraries run them by other kernels.
    """
    first = o.kind.partition(" ")[0]
    if first in _LIGHT:
        return ("memory", "float32") if o.nbytes > 0 else None
    dtype = _DTYPES.get(o.precision)
    if dtype is None or o.flops <= 0:
        return None
    if first == "product":
        width = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}.get(dtype, 1)
        aligned = all(d * width % 16 == 0 for x in o.product for d in x[-2:])
        return ("matmul", dtype) if o.product and aligned else None
    return ("conv", dtype) if first == "convolution" else None


def _mnk(o: Origin) -> tuple[float, float, float]:
    """Returns the extents of a product, without its batch.

    >>> _mnk(Origin(kind="product", name="", flops=2 * 8 * 3 * 5 * 7, product=((8, 3, 7), (8, 7, 5), (8, 3, 5))))
    (3.0, 5.0, 7.0)
    """
    if not o.product:
        return 1.0, 1.0, 1.0
    result = o.product[2]
    return float(result[-2]), float(result[-1]), o.flops / 2 / math.prod(result)


def _figure(device: Device, ops: _Ops) -> tuple[str, float, Callable[[float], Device]]:
    """Returns the figure that sets the rate of these ops: its name, its value as a part of the peak, and the device
    with a multiple of it."""
    if ops.kind == "memory" and device.memory_curve is not None:
        curve = device.memory_curve
        largest = curve.nbytes[-1] / curve.seconds[-1] / device.memory_bandwidth_bytes_per_s
        return (
            "memory_curve",
            min(largest, 1.0),
            lambda f: replace(
                device, memory_curve=replace(curve, seconds=tuple(s / f for s in curve.seconds))
            ),
        )
    table = next((t for t in device.matmul_tables if t.dtype == ops.dtype), None)
    if ops.kind == "matmul" and table is not None:
        others = tuple(t for t in device.matmul_tables if t is not table)
        return (
            f"matmul_tables {ops.dtype}",
            max(table.flops_per_s) / device.peak(ops.dtype),
            lambda f: replace(
                device,
                matmul_tables=(
                    *others,
                    replace(table, flops_per_s=tuple(r * f for r in table.flops_per_s)),
                ),
            ),
        )
    kernels = device.products
    if ops.kind == "matmul" and kernels is not None:
        return (
            f"products.rate {ops.dtype}",
            kernels.rate_of(ops.dtype) * kernels.steady,
            lambda f: _faster_products(device, kernels, ops.dtype, f),
        )
    name = {"memory": "memory", "conv": f"conv.{ops.dtype}", "matmul": f"matmul.{ops.dtype}"}[ops.kind]
    if ops.kind == "conv" and kernels is not None:
        name = "conv"  # the only figure of convolutions that is read beside product kernels
    before = device.reached(ops.kind, ops.dtype)
    return (
        f"efficiency {name}",
        before,
        lambda f: replace(device, efficiency={**device.efficiency, name: before * f}),
    )


def _faster_products(device: Device, kernels: ProductKernels, dtype: str, factor: float) -> Device:
    """Returns the device with another rate of one dtype's products.

    A rate above the peak before throttling means that the card throttles less than the file says. Then that figure is
    changed, and all others so that their rates while the card throttles stay.
    """
    rate = kernels.rate_of(dtype) * factor
    if rate <= 1.0:
        return replace(device, products=replace(kernels, rate={**kernels.rate, dtype: rate}))
    back = min(rate, 1.0 / kernels.steady)  # the new part that is left at the power limit, by the old one
    efficiency = {k: v / back if k == "conv" else v for k, v in device.efficiency.items()}
    others = {k: v / back for k, v in kernels.rate.items()}
    return replace(
        device,
        efficiency=efficiency,
        products=replace(
            kernels,
            steady=kernels.steady * back,
            rate={**others, dtype: 1.0},
            unaligned={k: v / back for k, v in kernels.unaligned.items()},
        ),
    )
