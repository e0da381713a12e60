"""The work of a step on one device as timed items: those that a plan predicts, and those that a trace shows."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pase.replay.kernels import SINGLE

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.replay.measurement.model import Measured
    from pase.replay.measurement.spending import Spending

__all__ = ["TimedWork", "WorkGroup", "measured_work", "planned_work"]

WorkGroup = Literal["products", "light", "update", "collectives"]

_LINE = re.compile(r"[\w.-]+\.py:\d+")
_MULTIPLY = ("product", "convolution", "attention")
_PRECISIONS = {
    "bfloat16": ("bf16", "16-bit"),
    "float16": ("fp16", "16-bit"),
    "float32": SINGLE,
    "float64": ("fp64",),
    "int8": ("int8", "8-bit"),
}
"""The dtype of a plan's product → the precisions of kernels that run it."""


@dataclass(frozen=True, kw_only=True)
class TimedWork:
    """Some work of a step on one device. seconds: of the step (measured: the moments attributed to it); busy_s: the sum
    of its durations. flops, nbytes: in all calls; −1 if unknown. precisions: that may run it; size: of one call."""

    group: WorkGroup
    name: str
    line: str
    size: Hashable
    calls: float
    seconds: float
    busy_s: float
    flops: float = -1.0
    nbytes: float = -1.0
    precisions: tuple[str, ...] = ()


def planned_work(plan: PlanData) -> Iterable[TimedWork]:
    """Yields the plan's items of a step; of a pipeline, those of the average rank."""
    for n in plan.nodes:
        line = _line(n.source)
        for w in n.work:
            group: WorkGroup = "products"
            if w.phase == "update":
                group = "update"
            elif w.kind == "memory":
                group = "light"
            yield TimedWork(
                group=group,
                name=n.name,
                line=line,
                size=round(w.flops) if group == "products" else None,
                calls=w.times,
                seconds=w.cost,
                busy_s=w.cost,
                flops=w.flops * w.times,
                nbytes=w.nbytes * w.times,
                precisions=_precisions(w.dtype),
            )
        # Work without items (layouts of earlier versions list none) still counts.
        rest = n.cost.compute + n.cost.update - math.fsum(w.cost for w in n.work)
        if abs(rest) > 1e-9 * max(plan.cost, 1e-30):
            yield TimedWork(
                group="light", name=n.name, line=line, size=None, calls=0, seconds=rest, busy_s=rest
            )
    for c in plan.collectives:
        yield TimedWork(
            group="collectives",
            name=c.kind,
            line="",
            size=(c.kind, c.nbytes),
            calls=c.times,
            seconds=c.cost,
            busy_s=c.cost,
            nbytes=float(c.nbytes) * c.times,
        )


def measured_work(m: Measured, s: Spending, share: float = 1.0) -> Iterable[TimedWork]:
    """Yields what one rank's mean iteration does. share: the rank's weight, if several ranks are averaged."""
    from pase.replay.types import COLLECTIVE

    t, n = m.timeline, len(s.iterations) / share
    for o, a in s.ops.items():
        events = s.events[o]
        collective = bool(events) and int(t["kind"][events[0]]) == COLLECTIVE
        group: WorkGroup = "light"
        if collective:
            group = "collectives"
        elif o.kind.startswith(_MULTIPLY):
            group = "products"
        elif o.kind == "optimizer":
            group = "update"
        size = int(t["nbytes"][events[0]]) if collective else -1
        nbytes = (
            max(size, 0) * a.calls / n if collective and size >= 0 else a.nbytes / n if a.nbytes else -1.0
        )
        yield TimedWork(
            group=group,
            name=o.kind if collective else o.name,
            line=_line(o.where),
            size=(o.kind, size) if collective else o.flops if group == "products" else None,
            calls=a.calls / n,
            seconds=a.clock_ns / n / 1e9,
            busy_s=a.busy_ns / n / 1e9,
            flops=a.flops / n if o.flops > 0 else 0.0 if group != "products" else -1.0,
            nbytes=nbytes,
            precisions=(o.precision,) if o.precision else (),
        )


def _line(text: str) -> str:
    """Returns the file and line in a text.

    >>> _line("pase/zoo/layers.py:190:11 (lookup)"), _line("layers.py:190"), _line("Linear.MLP")
    ('layers.py:190', 'layers.py:190', '')
    """
    found = _LINE.search(text)
    return found[0] if found else ""


def _precisions(dtype: str) -> tuple[str, ...]:
    return ("fp8", "8-bit") if dtype.startswith("float8") else _PRECISIONS.get(dtype, ())
