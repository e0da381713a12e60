"""How far a predicted step may be off, from what it is made of.

A price's error has parts for each kind of work. One is shared by all work of the kind: another version of a library,
another driver, a rate that the machine file has wrong. It was estimated as the spread of the median errors of published
tables. Light ops (what is no product, convolution or attention) have one for each family in addition, since a norm and
a lookup are other kernels: that of the families of one source around their mean. The last is an op's own, as the spread
within a table; ops of different shapes are independent of each other in it. Kinds are independent of each other. All
are the "residuals" of ``python -m bench kernels`` and ``python -m bench links``, without the rows that are kept back,
which test them. Steps were not used: they test the intervals.

What is not in it: what a program does besides the work of its model. Collectives between nodes, for which there is no
public table of measurements, are taken to be as uncertain as those within a node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pase.ir.precision import FP4, HIGHEST, stored_dtype
from pase.ir.types import itemsize
from pase.machine import Machine, load, names
from pase.plan.types import PlanData
from pase.tables.work import WorkKind

__all__ = [
    "Deviation",
    "ErrorBar",
    "StepPart",
    "alike",
    "bar_of",
    "collective_kind",
    "interval",
    "is_measured",
    "parts_of",
    "spread",
    "work_kind",
]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Standard deviations of the logarithm of measured over predicted time.

    shared: of all work of a kind together. family: of light ops of one family (norms, sums, lookups), in addition.
    own: of work of one shape, in addition.
    """

    shared: float
    own: float
    family: float = 0.0


RESIDUALS = {
    "product": Deviation(shared=0.100, own=0.120),
    "product in 8 bits": Deviation(shared=0.140, own=0.151),
    "product in 4 bits": Deviation(shared=0.111, own=0.215),
    "product in 32 bits": Deviation(shared=0.082, own=0.288),
    "product of all bits": Deviation(shared=0.048, own=0.136),
    "convolution": Deviation(shared=0.193, own=0.260),
    "attention": Deviation(shared=0.024, own=0.128),
    "light": Deviation(shared=0.254, own=0.188, family=0.257),
    "large collective": Deviation(shared=0.048, own=0.058),
    "small collective": Deviation(shared=0.078, own=0.133),
}
"""Kind -> errors over 366,000 measured kernels and collectives on A100, H100, H200, B200 and GB200 (2026-11-30)."""

_DEVIATIONS = 1.2816
"""Standard deviations on either side of the middle that contain 80% of a normal distribution."""

_LARGE_BYTES = 16e6
"""From this size on, a collective's time is that of its bytes."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """Some work of a step. shape: what tells it apart from other work of its kind. family: of a light op, its node's
    op."""

    kind: str
    shape: tuple[object, ...]
    seconds: float
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """The range that contains the real step time in 80 of 100 cases, in seconds."""

    low_s: float
    high_s: float

    def __str__(self) -> str:
        """
        >>> str(ErrorBar(low_s=0.909, high_s=1.1))
        '± 10%'
        """
        return f"± {100 * (math.sqrt(self.high_s / self.low_s) - 1):.0f}%"


def is_measured(machine: Machine) -> bool:
    """Whether kernels and collectives of the machine's card are in public tables: a machine of pase's, unchanged except
    for the size of its memory, which changes no time."""
    if machine.device.products is None or machine.name not in names():
        return False
    own = load(machine.name)
    device = replace(machine.device, memory_bytes=own.device.memory_bytes)
    return replace(machine, device=device).digest == own.digest


def _measured(plan: PlanData) -> bool:
    """Whether costs are times on a machine that was measured."""
    if plan.unit != "s" or plan.machine not in names():
        return False
    m = load(plan.machine)
    return m.digest == plan.machine_digest and is_measured(m)


def bar_of(step_s: float, parts: Iterable[StepPart]) -> ErrorBar | None:
    """Returns the interval of a step that is made of these parts, or of them and a bubble; None without parts."""
    parts = list(parts)
    total = sum(p.seconds for p in parts)
    if not total:
        return None
    width = math.exp(_DEVIATIONS * spread(parts) / total)
    return ErrorBar(low_s=step_s / width, high_s=step_s * width)


def interval(plan: PlanData) -> ErrorBar | None:
    """Returns the interval of the plan's step; None if the machine was not measured, or costs are no time."""
    return bar_of(plan.cost, parts_of(plan)) if _measured(plan) and plan.cost else None


def alike(a: PlanData, b: PlanData) -> bool:
    """Whether it is unknown which of two plans of one model is faster: the interval of their difference contains 0.

    What both do in the same way does not differ, whatever it takes.
    """
    if not (_measured(a) and _measured(b)):
        return a.cost == b.cost
    more = [*_scaled(a, 1.0), *_scaled(b, -1.0)]
    return abs(a.cost - b.cost) <= _DEVIATIONS * spread(more)


def _scaled(plan: PlanData, sign: float) -> Iterator[StepPart]:
    """A plan's parts, which add up to its cost: a pipeline's parts are those of one stage, without its bubble."""
    parts = list(parts_of(plan))
    total = sum(p.seconds for p in parts)
    for p in parts:
        yield replace(p, seconds=sign * p.seconds * plan.cost / total)


def spread(parts: Iterable[StepPart]) -> float:
    """The standard deviation of the parts' sum, in seconds. Seconds below 0 are of work that another plan has."""
    by_kind: dict[str, float] = defaultdict(float)
    by_family: dict[tuple[str, str], float] = defaultdict(float)
    by_shape: dict[tuple[object, ...], float] = defaultdict(float)
    for p in parts:
        by_kind[p.kind] += p.seconds
        by_family[p.kind, p.family] += p.seconds
        by_shape[p.kind, *p.shape] += p.seconds
    shared = sum((RESIDUALS[kind].shared * s) ** 2 for kind, s in by_kind.items())
    family = sum((RESIDUALS[kind].family * s) ** 2 for (kind, _), s in by_family.items())
    own = sum((RESIDUALS[str(shape[0])].own * s) ** 2 for shape, s in by_shape.items())
    return math.sqrt(shared + family + own)


def parts_of(plan: PlanData) -> Iterator[StepPart]:
    """The work of the plan's step, and the part of its collectives that compute does not hide."""
    for node in plan.nodes:
        for w in node.work:
            kind = work_kind(w.kind, w.dtype)
            family = node.op if kind == "light" else ""
            yield StepPart(kind=kind, shape=(w.mnk, w.flops, w.nbytes), seconds=w.cost, family=family)
    sent = sum(c.cost for c in plan.collectives)
    waited = max(1 - (plan.hidden or 0.0) / sent, 0.0) if sent else 0.0
    for c in plan.collectives:
        yield StepPart(
            kind=collective_kind(c.nbytes), shape=(c.kind, c.axes, c.nbytes), seconds=waited * c.cost
        )


def collective_kind(nbytes: float) -> str:
    """The kind of a collective of this size, as in ``RESIDUALS``."""
    return "large collective" if nbytes >= _LARGE_BYTES else "small collective"


def work_kind(kind: WorkKind, dtype: str) -> str:
    """The kind of a device's work, as in ``RESIDUALS``."""
    if kind == "memory":
        return "light"
    if kind == "attention":
        return "attention"
    if kind == "conv":
        return "convolution"
    if dtype == FP4:
        return "product in 4 bits"
    if dtype == HIGHEST:
        return "product of all bits"
    width = itemsize(stored_dtype(dtype))
    return "product in 8 bits" if width == 1 else "product" if width == 2 else "product in 32 bits"
