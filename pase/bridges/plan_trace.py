"""Puts a plan's prediction beside a trace of the run, and says which assumption of the prediction was off.

Every second of the predicted and of the measured step is in exactly one row. Products (with convolutions and attention)
and light ops are matched by the user's source line or, if the trace has no lines, products by their FLOPs; collectives
by kind and bytes. What is left is compared as a whole. The differences by assumption add up to measured minus
predicted.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.replay.measurement.model import Measured
    from pase.replay.measurement.spending import Spending

__all__ = ["Assumption", "Beside", "BesideRow", "against_plan", "plan_beside"]

WorkGroup = Literal["products", "light", "update", "collectives"]

_LINE = re.compile(r"[\w.-]+\.py:\d+")
_MULTIPLY = ("product", "convolution", "attention")
_PRECISIONS = {
    "bfloat16": ("bf16", "16-bit"),
    "float16": ("fp16", "16-bit"),
    "float32": ("f32", "tf32", "fp32"),
    "float64": ("fp64",),
    "int8": ("int8",),
}
"""The dtype of a plan's product → the precisions of kernels that run it."""
_OTHER_WORK = 0.05
"""If the FLOPs of plan and trace differ by more than this, the two may not be the same step, and a note says so."""


@dataclass(frozen=True, kw_only=True)
class _TimedWork:
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


@dataclass(frozen=True, kw_only=True)
class BesideRow:
    """Matched work: what the plan predicts for it and what the trace shows, in one step on one device.

    predicted: the plan's names; measured: the trace's; either is empty if only the other has such work. Seconds of
    collectives are whole durations, hidden or not. flops and nbytes are −1 if unknown.
    """

    group: WorkGroup
    where: str
    predicted: tuple[str, ...]
    measured: tuple[str, ...]
    predicted_s: float
    measured_s: float
    predicted_calls: float
    measured_calls: float
    predicted_flops: float = -1.0
    measured_flops: float = -1.0
    predicted_bytes: float = -1.0
    measured_bytes: float = -1.0


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """An assumption of the prediction, and the part of measured minus predicted that it explains, in seconds."""

    name: str
    difference_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A plan beside a trace. ``assumptions`` add up to ``measured_s − predicted_s``, largest first."""

    plan: str
    rank: int
    predicted_s: float
    measured_s: float
    rows: tuple[BesideRow, ...]
    assumptions: tuple[Assumption, ...]
    matched_by: str
    notes: tuple[str, ...] = field(default=())


def against_plan(layout: Path, m: Measured, spent: Sequence[Spending]) -> JsonObject:
    """Returns ``plan_beside`` for the slowest rank as JSON. Raises PaseError if the plan is not of such a run."""
    from dataclasses import asdict

    from pase.api import load

    if not spent:
        raise PaseError("the trace has no complete iteration", where=str(layout), fix="trace more steps")
    found = plan_beside(
        load(layout), m, max(spent, key=lambda s: s.total_ns / len(s.iterations)), str(layout)
    )
    out: JsonObject = asdict(found)
    return out


def plan_beside(plan: PlanData, m: Measured, s: Spending, where: str) -> Beside:
    """Compares a plan's step with what one rank of a run measured. where: names the plan in errors.

    Raises PaseError if the plan's costs are not seconds of one device's step, or if the run has more ranks.
    """
    if plan.unit != "s":
        raise PaseError(
            f"its costs are in {plan.unit}",
            where=where,
            fix="compile with --cost-model analytic, which predicts seconds",
        )
    if plan.pipeline is not None:
        raise PaseError(
            "it is a pipeline, in which each rank runs a stage of its own",
            where=where,
            fix="compare the replayed timelines: pase replay LAYOUT --against TRACES",
        )
    if len(m.timeline.ranks) > plan.devices:
        raise PaseError(
            f"it is for {plan.devices} devices, and the traces have {len(m.timeline.ranks)} ranks",
            where=where,
            fix="give the layout of the run",
        )
    planned, run = list(_planned(plan)), list(_run(m, s))
    rows, how = _rows(planned, run)
    measured_s = s.total_ns / len(s.iterations) / 1e9
    found = [
        *_of_products(rows),
        *_of_light("light", rows),
        *_of_light("update", rows),
        *_of_collectives(plan, planned, run),
        *_of_idle(s),
    ]
    found = [a for a in found if a.difference_s]
    return Beside(
        plan=plan.model,
        rank=s.rank,
        predicted_s=plan.cost,
        measured_s=measured_s,
        rows=tuple(sorted((_row(r) for r in rows), key=lambda r: -abs(r.measured_s - r.predicted_s))),
        assumptions=tuple(sorted(found, key=lambda a: -abs(a.difference_s))),
        matched_by=how,
        notes=tuple(_notes(plan, planned, run, s)),
    )


# -- the two sides --


def _planned(plan: PlanData) -> Iterable[_TimedWork]:
    for n in plan.nodes:
        line = _line(n.source)
        for w in n.work:
            group: WorkGroup = "products"
            if w.phase == "update":
                group = "update"
            elif w.kind == "memory":
                group = "light"
            yield _TimedWork(
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
            yield _TimedWork(
                group="light", name=n.name, line=line, size=None, calls=0, seconds=rest, busy_s=rest
            )
    for c in plan.collectives:
        yield _TimedWork(
            group="collectives",
            name=c.kind,
            line="",
            size=(c.kind, c.nbytes),
            calls=c.times,
            seconds=c.cost,
            busy_s=c.cost,
            nbytes=float(c.nbytes) * c.times,
        )


def _run(m: Measured, s: Spending) -> Iterable[_TimedWork]:
    from pase.replay.types import COLLECTIVE

    t, n = m.timeline, len(s.iterations)
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
        yield _TimedWork(
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
    return ("fp8",) if dtype.startswith("float8") else _PRECISIONS.get(dtype, ())


# -- matching --

_Sides = tuple[list[_TimedWork], list[_TimedWork]]


def _rows(planned: Sequence[_TimedWork], run: Sequence[_TimedWork]) -> tuple[list[_Sides], str]:
    """Matches both sides; returns the rows and how products were matched."""
    out: list[_Sides] = []
    left: Mapping[WorkGroup, _Sides] = {
        g: ([i for i in planned if i.group == g], [i for i in run if i.group == g])
        for g in ("products", "light", "update", "collectives")
    }
    by_line, by_size = (_paired(left["products"], key) for key in (attrgetter("line"), attrgetter("size")))
    tried = {"source line": by_line, "FLOPs of a call": by_size}
    # The key under which the larger part of the measured time has a partner.
    how = max(tried, key=lambda h: sum(i.seconds for _, r in tried[h][0] for i in r))
    matched, rest = tried[how]
    out += matched
    if how == "source line":
        more, rest = _paired(rest, attrgetter("size"))
        out += more
    out.append(rest)
    light, rest = _paired(left["light"], attrgetter("line"))
    out += [*light, rest, left["update"]]
    sent, rest = _paired(left["collectives"], attrgetter("size"))
    more, (only_planned, only_run) = _paired(rest, attrgetter("name"))
    out += [*sent, *more]
    for name in dict.fromkeys(i.name for i in (*only_planned, *only_run)):
        out.append(([i for i in only_planned if i.name == name], [i for i in only_run if i.name == name]))
    return [r for r in out if r[0] or r[1]], how


def _paired(sides: _Sides, key: Callable[[_TimedWork], Hashable]) -> tuple[list[_Sides], _Sides]:
    """Returns the items whose key both sides have, as rows, and the others."""
    groups: dict[Hashable, _Sides] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for item in sides[side]:
            groups[key(item)][side].append(item)
    good = [r for k, r in groups.items() if k not in ("", None, 0, -1) and r[0] and r[1]]
    kept = {id(i) for r in good for side in r for i in side}
    return good, ([i for i in sides[0] if id(i) not in kept], [i for i in sides[1] if id(i) not in kept])


def _row(sides: _Sides) -> BesideRow:
    planned, run = sides
    first = (planned or run)[0]
    whole = first.group == "collectives"
    lines = {i.line for i in (*planned, *run)}
    where = next(iter(lines)) if len(lines) == 1 else ""
    if whole:
        sizes = {i.size for i in (*planned, *run)}
        size = next(iter(sizes)) if len(sizes) == 1 else None
        where = bytes_text(size[1]) if isinstance(size, tuple) and size[1] >= 0 else ""
    return BesideRow(
        group=first.group,
        where=where,
        predicted=tuple(dict.fromkeys(i.name for i in planned)),
        measured=tuple(dict.fromkeys(i.name for i in run)),
        predicted_s=math.fsum(i.busy_s if whole else i.seconds for i in planned),
        measured_s=math.fsum(i.busy_s if whole else i.seconds for i in run),
        predicted_calls=math.fsum(i.calls for i in planned),
        measured_calls=math.fsum(i.calls for i in run),
        predicted_flops=_total(i.flops for i in planned),
        measured_flops=_total(i.flops for i in run),
        predicted_bytes=_total(i.nbytes for i in planned),
        measured_bytes=_total(i.nbytes for i in run),
    )


def _total(values: Iterable[float]) -> float:
    """Returns the sum; −1 if one of the values is unknown."""
    known = list(values)
    return -1.0 if any(x < 0 for x in known) else math.fsum(known)


# -- what was off --


def _of_products(rows: Sequence[_Sides]) -> Iterable[Assumption]:
    """Splits each row's difference: another amount of FLOPs at the predicted rate, and another rate, op by op.

    An op's rate counts as precision if the kernel has a precision that the plan's products of the row do not have.
    """
    amount = precision = rate = 0.0
    lower: dict[str, float] = defaultdict(float)
    slower: dict[str, float] = defaultdict(float)
    flops_planned = flops_run = seconds_planned = seconds_run = 0.0
    for planned, run in (r for r in rows if (r[0] or r[1])[0].group == "products"):
        predicted = math.fsum(i.seconds for i in planned)
        measured = math.fsum(i.seconds for i in run)
        work, done = _total(i.flops for i in planned), _total(i.flops for i in run)
        where = _row((planned, run)).where or (planned or run)[0].name
        if not planned or not run:
            amount += measured - predicted
            continue
        if work <= 0 or done < 0:
            done = work = 1.0  # unknown FLOPs are taken to be those of the plan
        amount += predicted * (done / work - 1.0)
        flops_planned, flops_run = flops_planned + work, flops_run + done
        seconds_planned, seconds_run = seconds_planned + predicted, seconds_run + measured
        allowed = {p for i in planned for p in i.precisions}
        for i in run:
            share = i.flops / done if i.flops >= 0 and done > 1 else i.seconds / measured if measured else 0.0
            more = i.seconds - predicted * (done / work) * share
            if allowed and i.precisions and not allowed.intersection(i.precisions):
                precision += more
                lower[f"{where} in {i.precisions[0]}"] += more
            else:
                rate += more
                slower[where] += more
    rates = ""
    if seconds_planned and seconds_run and flops_planned > 1:
        rates = (
            f": {flops_run / seconds_run / 1e12:.0f} TFLOP/s measured over all, "
            f"{flops_planned / seconds_planned / 1e12:.0f} predicted"
        )
    yield Assumption(
        name="rate of products",
        difference_s=rate,
        what=f"products run at another rate than predicted{rates}; most: {_most(slower)}",
    )
    yield Assumption(
        name="precision",
        difference_s=precision,
        what=f"products run in another precision than the plan's: {_most(lower)}",
    )
    yield Assumption(
        name="products",
        difference_s=amount,
        what="products that only one of the two has, and other numbers of FLOPs",
    )


def _most(by: Mapping[str, float]) -> str:
    shown = sorted(by, key=lambda k: -abs(by[k]))[:3]
    return ", ".join(f"{k} ({by[k] * 1e3:+.2f} ms)" for k in shown)


def _of_light(group: WorkGroup, rows: Sequence[_Sides]) -> Iterable[Assumption]:
    """Compares all light ops together: compilers fuse them across lines, so only their sum has a meaning."""
    here = [r for r in rows if (r[0] or r[1])[0].group == group]
    planned, run = [i for p, _ in here for i in p], [i for _, r in here for i in r]
    predicted, measured = math.fsum(i.seconds for i in planned), math.fsum(i.seconds for i in run)
    what, verb = ("light ops", "") if group == "light" else ("the update", "s")
    moves, moved = _total(i.nbytes for i in planned), math.fsum(max(i.nbytes, 0.0) for i in run)
    known = math.fsum(i.seconds for i in run if i.nbytes >= 0)
    if not predicted or moves <= 0 or known < 0.9 * measured or not measured:
        yield Assumption(
            name=what,
            difference_s=measured - predicted,
            what=f"{what} take{verb} another time than predicted; the trace does not say how many bytes they move",
        )
        return
    amount = predicted * (moved / moves - 1.0)
    yield Assumption(
        name=f"bytes of {what}",
        difference_s=amount,
        what=f"{what} move{verb} {bytes_text(round(moved))}; predicted: {bytes_text(round(moves))}. "
        + ("More is fused than assumed" if amount < 0 else "Less is fused than assumed, or more is copied"),
    )
    yield Assumption(
        name=f"rate of {what}",
        difference_s=measured - predicted - amount,
        what=f"{what} reach{verb and 'es'} {moved / measured / 1e9:.0f} GB/s; "
        f"predicted: {moves / predicted / 1e9:.0f}, launches included "
        f"({math.fsum(i.calls for i in run):.0f} ops, predicted {math.fsum(i.calls for i in planned):.0f})",
    )


def _of_collectives(
    plan: PlanData, planned: Sequence[_TimedWork], run: Sequence[_TimedWork]
) -> Iterable[Assumption]:
    """Splits exposed communication: other durations than predicted, and more or less of it hidden."""
    sends, sent = ([i for i in side if i.group == "collectives"] for side in (planned, run))
    predicted = plan.communication
    hidden = math.fsum(i.seconds for i in planned if i.group != "collectives") + predicted - plan.cost
    busy, exposed = math.fsum(i.busy_s for i in sent), math.fsum(i.seconds for i in sent)
    for kind in dict.fromkeys(i.name for i in (*sends, *sent)):
        before = math.fsum(i.busy_s for i in sends if i.name == kind)
        after = math.fsum(i.busy_s for i in sent if i.name == kind)
        sizes = [_total(i.nbytes for i in side if i.name == kind) for side in (sends, sent)]
        yield Assumption(
            name=f"time of {kind}",
            difference_s=after - before,
            what=f"{kind}: {after * 1e3:.2f} ms, waiting for other ranks included, for "
            f"{bytes_text(round(sizes[1])) if sizes[1] >= 0 else 'unknown bytes'}; predicted {before * 1e3:.2f} ms for "
            f"{bytes_text(round(sizes[0])) if sizes[0] >= 0 else 'unknown bytes'}",
        )
    listed = math.fsum(i.busy_s for i in sends)
    yield Assumption(
        name="overlap",
        difference_s=hidden - (busy - exposed) + (listed - predicted),
        what=f"{(busy - exposed) * 1e3:.2f} ms of communication run beside compute; predicted: {hidden * 1e3:.2f} ms",
    )


def _of_idle(s: Spending) -> Iterable[Assumption]:
    from pase.replay.measurement.breakdown import CAUSES

    for cause, ns in s.idle.items():
        yield Assumption(
            name="idle",
            difference_s=ns / len(s.iterations) / 1e9,
            what="the device is idle, which no plan predicts: "
            + CAUSES.get(cause, "computing on the CPU").removeprefix("idle: "),
        )


def _notes(
    plan: PlanData, planned: Sequence[_TimedWork], run: Sequence[_TimedWork], s: Spending
) -> Iterable[str]:
    from pase.machine.recognize import machine_named

    work = _total(i.flops for i in planned if i.group == "products")
    done = math.fsum(max(i.flops, 0.0) for i in run if i.group == "products")
    unknown = sum(i.flops < 0 for i in run if i.group == "products")
    if unknown:
        yield f"the FLOPs of {unknown} kinds of products in the trace are unknown"
    elif work > 0 and abs(done / work - 1.0) > _OTHER_WORK:
        yield (
            f"the products of the run do {done / work:.2f} times the FLOPs of the plan: is it another batch, another "
            f"number of devices, or another model?"
        )
    card = machine_named(s.device_name) if s.device_name else None
    if card is not None and card != plan.machine:
        yield f"the plan is for the machine {plan.machine}, and the run was on {s.device_name}"
