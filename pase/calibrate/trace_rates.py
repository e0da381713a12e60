"""Corrects a machine's rates of products and light ops by what a trace shows of them.

A trace has the ops of one program, not a grid of sizes. So only rates are fitted (``figures``), each to the time that
its ops take together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pase.calibrate.figures import ROW_BYTES, FittedFigure, PricedOp, figures, fitted, prices
from pase.machine import CostModel, Machine
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Spending

__all__ = ["Corrected", "corrected"]

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "32-bit": "float32",
    "tf32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}
_SPAN = 16.0
"""A file that is off by more than this factor is of another device."""
_TOP = 0.999
"""A figure that the fit leaves this near to its largest value would be larger."""
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
class _TracedOp:
    """A kind of op. seconds: of one call, without the gaps before it. calls: in a step of one rank."""

    work: PricedOp
    seconds: float
    calls: float


def corrected(
    machine: Machine, spent: Sequence[Spending], model: Callable[[Machine], CostModel]
) -> tuple[Machine, list[Corrected], dict[str, str]]:
    """Returns the machine with corrected rates, what was corrected, and what was not: figure → why.

    model: makes the cost model that predicts with a machine.
    """
    left: dict[str, str] = {}
    every = list(_found(spent))
    rates: dict[FittedFigure, list[_TracedOp]] = {}
    for f in figures(machine.device, [o.work for o in every], throttled=True):
        ops = [o for o in every if o.work.rate_kind in f.kinds]
        measured = _measured_s(ops)
        if measured >= _FEWEST_S:
            rates[f] = ops
        elif ops:
            left[f.name] = f"its ops take {measured * 1e6:.0f} µs a step, too little to say something"
    while rates:
        works, times = [o.work for o in every], np.array([_measured_s(ops) for ops in rates.values()])
        sums = np.array([[o.calls if o in ops else 0.0 for o in every] for ops in rates.values()])
        made, values = fitted(machine, [*rates], works, times, model, sums=sums)
        off = {f: why for f, x in zip(rates, values, strict=True) if (why := _impossible(f, x))}
        left |= {f.name: why for f, why in off.items()}
        if not off:
            before = sums @ prices(model(machine), works)
            facts = zip(rates.items(), values, times.tolist(), before.tolist(), strict=True)
            done = [
                Corrected(
                    figure=f.name, before=f.value, after=x, ops=len(ops), measured_s=s, predicted_s=predicted
                )
                for (f, ops), x, s, predicted in facts
            ]
            return made, done, left
        rates = {f: ops for f, ops in rates.items() if f not in off}
    return machine, [], left


def _measured_s(ops: Iterable[_TracedOp]) -> float:
    return math.fsum(o.seconds * o.calls for o in ops)


def _impossible(figure: FittedFigure, value: float) -> str:
    """Returns why a figure cannot have this value, or nothing."""
    if value > _TOP * figure.most:
        return "the traced ops would need more than the peak rate, as ops whose operands stay in a cache do"
    if value * _SPAN < figure.value:
        return f"the traced ops run at less than a {_SPAN:.0f}th of the file's rate: is it another device?"
    return ""


def _found(spent: Sequence[Spending]) -> Iterator[_TracedOp]:
    """Yields the ops of all ranks with known FLOPs or bytes; times are means over ranks."""
    times: dict[PricedOp, tuple[float, float]] = {}
    for s in spent:
        for o, a in s.ops.items():
            work = _work(o)
            if work is not None and a.calls and a.busy_ns:
                each = len(s.iterations) * len(spent)
                seconds, calls = times.get(work, (0.0, 0.0))
                times[work] = seconds + a.busy_ns / each / 1e9, calls + a.calls / each
    for work, (seconds, calls) in times.items():
        yield _TracedOp(work=work, seconds=seconds / calls, calls=calls)


def _work(o: Origin) -> PricedOp | None:
    """Returns the op as it is priced; None if it says nothing of a rate.

    Products whose rows are not aligned are left out: libraries pad them, or run them by other kernels.
    """
    first, nbytes = o.kind.partition(" ")[0], float(max(o.nbytes, 0))
    if first in _LIGHT:
        return PricedOp(kind="memory", dtype="float32", flops=0.0, nbytes=nbytes) if nbytes else None
    dtype = _DTYPES.get(o.precision)
    if dtype is None or o.flops <= 0:
        return None
    if first == "convolution":
        return PricedOp(kind="conv", dtype=dtype, flops=float(o.flops), nbytes=nbytes)
    if first != "product" or not o.product:
        return None
    width = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}.get(dtype, 1)
    if any(d * width % ROW_BYTES for x in o.product for d in x[-2:]):
        return None
    result = o.product[2]
    return PricedOp(
        kind="matmul",
        dtype=dtype,
        flops=float(o.flops),
        nbytes=nbytes,
        mnk=(float(result[-2]), float(result[-1]), o.flops / 2 / math.prod(result)),
    )
