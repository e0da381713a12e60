"""The figures of a device that timed ops determine, and their fit to the times.

All calibrations that begin with a machine's file use it: a card's own ops (``card``), a table of ops that others
measured (``op_table``), the ops of a program's traces (``trace_rates``). The form of a prediction stays that of the
file; a fit changes its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pase.machine import CostModel, Curve, Device, Machine, MatmulTable, ProductKernels

__all__ = ["ROW_BYTES", "FittedFigure", "PricedOp", "RateKind", "figures", "fitted", "prices", "product"]

RateKind = tuple[str, str, bool]
"""Kind, dtype, and whether rows are aligned."""

ROW_BYTES = 16
"""Products whose rows in memory are no multiple of this are run by other kernels."""
_PRIOR = 3.0
"""How far a figure may be from the file's before it counts as much as an op that is off by 10%: a factor e^3. It only
decides figures of which no op says something."""
_OFF = 0.1
_STEP = 0.03
"""The relative step of derivatives. Waves are whole, so a smaller step may change nothing."""


@dataclass(frozen=True, kw_only=True)
class PricedOp:
    """An op as ``CostModel.compute`` takes it. aligned: whether the rows of a product's operands are multiples of 16
    bytes, as libraries want them."""

    kind: Literal["matmul", "conv", "memory"]
    dtype: str
    flops: float
    nbytes: float
    mnk: tuple[float, float, float] | None = None
    aligned: bool = True

    @property
    def rate_kind(self) -> RateKind:
        return self.kind, self.dtype, self.aligned


@dataclass(frozen=True, kw_only=True)
class FittedFigure:
    """A figure of a device.

    name: its place in the machine file. most: its largest value. put: the device with another value.
    kinds: of the ops whose rate it is; empty for a figure that is no rate.
    """

    name: str
    value: float
    put: Callable[[Device, float], Device]
    most: float = 1.0
    kinds: frozenset[RateKind] = frozenset()


def product(dtype: str, width: float, batch: float, m: float, n: float, k: float) -> PricedOp:
    """A batch of products. width: bytes of an element; operands are read and the result is written once."""
    return PricedOp(
        kind="matmul",
        dtype=dtype,
        flops=2.0 * batch * m * n * k,
        nbytes=width * batch * (m * k + k * n + m * n),
        mnk=(m, n, k),
        aligned=n * width % ROW_BYTES == 0 == k * width % ROW_BYTES,
    )


def prices(model: CostModel, works: Sequence[PricedOp], least_s: float | None = None) -> np.ndarray:
    """The seconds of ops, float [ops]. least_s: what the smallest kernel takes, if the gaps before kernels were not
    timed. Otherwise, light ops have the device's launch."""
    device, out = model.machine.device, np.empty(len(works))
    more = 0.0 if least_s is None else least_s - device.launch_s
    by: dict[tuple[RateKind, bool], list[int]] = {}
    for i, w in enumerate(works):
        by.setdefault((w.rate_kind, w.mnk is None), []).append(i)
    for ((kind, dtype, aligned), evenly), at in by.items():
        flops, nbytes = (np.array([getattr(works[i], x) for i in at]) for x in ("flops", "nbytes"))
        slow = 1.0 if aligned or device.products is None else device.products.slowdown(dtype)
        extents = None
        if not evenly:
            m, n, k = np.array([works[i].mnk for i in at]).T
            extents = m * slow, n, k
        out[at] = model.compute(kind, dtype, flops * slow, nbytes, mnk=extents)
        if kind == "memory":
            out[at] += more
    return out


def fitted(
    base: Machine,
    of: Sequence[FittedFigure],
    works: Sequence[PricedOp],
    measured_s: np.ndarray,
    model: Callable[[Machine], CostModel],
    *,
    least_s: float | None = None,
    sums: np.ndarray | None = None,
) -> tuple[Machine, list[float]]:
    """Returns the machine whose logarithms of prices are nearest to those of the times, times that are far off apart,
    and the figures' values.

    measured_s: float [times]. sums: how many of each op a time has, float [times, ops]; by default, each op has a time
    of its own. model: makes the cost model that prices an op.
    """
    from scipy.optimize import least_squares

    # The unknowns are logarithms of the figures over their values in the base file, plus one, so that steps of the
    # derivatives are of equal size.
    top = np.array([1 + math.log(f.most / f.value) if math.isfinite(f.most) else np.inf for f in of])
    times = np.log(measured_s)

    def values(x: np.ndarray) -> list[float]:
        return [min(f.value * r, f.most) for f, r in zip(of, np.exp(x - 1).tolist(), strict=True)]

    def at(x: np.ndarray) -> Machine:
        device = base.device
        for f, value in zip(of, values(x), strict=True):
            device = f.put(device, value)
        return replace(base, device=device)

    def off(x: np.ndarray) -> np.ndarray:
        each = prices(model(at(x)), works, least_s)
        each = np.log(each if sums is None else sums @ each) - times
        return np.concatenate([each / _OFF, (x - 1) / _PRIOR])

    found = least_squares(
        off,
        np.minimum(1.0, top - 1e-6),
        bounds=(np.full(len(of), -np.inf), top),
        loss="soft_l1",
        diff_step=[_STEP],
    )
    return at(found.x), values(found.x)


def figures(device: Device, works: Sequence[PricedOp], *, throttled: bool) -> list[FittedFigure]:
    """The figures of which the ops say something.

    throttled: whether the ops ran one after the other in a step, and not alone. Then rates of products are those that
        are left at the power limit.
    """
    seen = dict.fromkeys(w.rate_kind for w in works)
    timed = {dtype for kind, dtype, _ in seen if kind == "matmul"}
    out: list[FittedFigure] = []
    if device.products is not None and timed:
        for name in ("start_s", "output_bytes_per_s", "split_s", "memory"):
            if getattr(device.products, name) > 0:
                out.append(_of_products(device.products, name))
    for kind, dtype, aligned in seen:
        own = frozenset(k for k in seen if k[:2] == (kind, dtype))
        alike = frozenset(k for k in seen if k[0] == kind)
        if kind == "memory" and device.memory_curve is not None:
            out.append(_of_curve(device, device.memory_curve, alike))
        elif kind == "matmul" and (
            table := next((t for t in device.matmul_tables if t.dtype == dtype), None)
        ):
            out.append(_of_table(device, table, own))
        elif kind == "matmul" and device.products is not None:
            out.append(_of_dtype(device, dtype, timed, aligned=aligned, throttled=throttled))
        elif kind == "memory" or device.products is not None:
            # Beside product kernels, convolutions of all dtypes have one figure; light ops always do.
            out.append(_of_efficiency(device, kind, dtype, kind, alike))
        else:
            out.append(_of_efficiency(device, kind, dtype, f"{kind}.{dtype}", own))
    return list({f.name: f for f in out}.values())


def _of_products(products: ProductKernels, name: str) -> FittedFigure:
    def put(d: Device, x: float) -> Device:
        changed: Any = {name: x}
        return replace(d, products=replace(_products(d), **changed))

    most = 1.0 if name == "memory" else math.inf
    return FittedFigure(name=f"products.{name}", value=getattr(products, name), most=most, put=put)


def _of_dtype(device: Device, dtype: str, timed: set[str], *, aligned: bool, throttled: bool) -> FittedFigure:
    products, name = _products(device), "rate" if aligned else "unaligned"
    known: dict[str, float] = getattr(products, name)
    value = known.get(dtype, products.rate_of(dtype))
    # The units run float16 as they run bfloat16, so a dtype of the same peak and rate changes with it.
    same = device.peak(dtype)
    alike = [d for d, x in known.items() if x == value and device.peak(d) == same and d not in timed]

    def put(d: Device, x: float) -> Device:
        rate = x / d.left_at_limit(dtype) if throttled else x
        if rate > 1.0:
            # Of what never throttles, no more than the peak can be stated.
            d, rate = d if d.multiplies_on_vector_units(dtype) else _less_throttled(d, rate), 1.0
        p = _products(d)
        changed: Any = {name: {**getattr(p, name), **dict.fromkeys([dtype, *alike], rate)}}
        return replace(d, products=replace(p, **changed))

    return FittedFigure(
        name=f"products.{name} {dtype}",
        value=value * (device.left_at_limit(dtype) if throttled else 1.0),
        put=put,
        kinds=frozenset({("matmul", dtype, aligned)}),
    )


def _less_throttled(device: Device, by: float) -> Device:
    """The device that throttles less by this factor. All rates at the power limit stay as they are."""
    p = _products(device)
    by = min(by, 1.0 / p.steady)

    def shared(rates: dict[str, float]) -> dict[str, float]:
        return {k: v if device.multiplies_on_vector_units(k) else v / by for k, v in rates.items()}

    return replace(
        device,
        efficiency={k: v / by if k == "conv" else v for k, v in device.efficiency.items()},
        products=replace(
            p,
            steady=p.steady * by,
            rate=shared(p.rate),
            unaligned=shared(p.unaligned),
        ),
    )


def _of_efficiency(
    device: Device, kind: str, dtype: str, name: str, kinds: frozenset[RateKind]
) -> FittedFigure:
    def put(d: Device, x: float) -> Device:
        return replace(d, efficiency={**d.efficiency, name: x})

    return FittedFigure(name=f"efficiency.{name}", value=device.reached(kind, dtype), put=put, kinds=kinds)


def _of_curve(device: Device, curve: Curve, kinds: frozenset[RateKind]) -> FittedFigure:
    value = min(curve.nbytes[-1] / curve.seconds[-1] / device.memory_bandwidth_bytes_per_s, 1.0)

    def put(d: Device, x: float) -> Device:
        seconds = tuple(s * value / x for s in curve.seconds)
        return replace(d, memory_curve=replace(curve, seconds=seconds))

    return FittedFigure(name="memory_curve", value=value, put=put, kinds=kinds)


def _of_table(device: Device, table: MatmulTable, kinds: frozenset[RateKind]) -> FittedFigure:
    value = min(max(table.flops_per_s) / device.peak(table.dtype), 1.0)

    def put(d: Device, x: float) -> Device:
        scaled = replace(table, flops_per_s=tuple(r * x / value for r in table.flops_per_s))
        tables = tuple(scaled if t.dtype == table.dtype else t for t in d.matmul_tables)
        return replace(d, matmul_tables=tables)

    return FittedFigure(name=f"matmul_tables {table.dtype}", value=value, put=put, kinds=kinds)


def _products(device: Device) -> ProductKernels:
    assert device.products is not None  # its figures are fitted
    return device.products
