"""Puts a plan's prediction beside a trace of the run, and says which assumption of the prediction was off.

Every second of the predicted and of the measured step is in exactly one row. Products (with convolutions and attention)
and light ops are matched by the user's source line or, if the trace has no lines, products by their FLOPs; collectives
by kind and bytes. What is left is compared as a whole. The differences by assumption add up to measured minus
predicted.

Of a pipeline, both sides are the average rank, and each rank's work and waiting stand beside the schedule's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pase.bridges.step_work import TimedWork, WorkGroup, measured_work, planned_work
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.replay.reports.spent import number_text
from pase.replay.types import CPU

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.replay.measurement.model import Measured
    from pase.replay.measurement.spending import Spending

__all__ = ["Assumption", "Beside", "BesideRow", "RankBeside", "against_plan", "plan_beside"]

_OTHER_WORK = 0.05
"""If the FLOPs of plan and trace differ by more than this, the two may not be the same step, and a note says so."""


_HOST = "cpu_host"
_SAME_STEP = 0.1
"""If the steps of a pipeline's ranks differ by more than this, they are not the same steps."""


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
class RankBeside:
    """A pipeline's rank: seconds of a step in which it works, and in which it is idle or waits for another stage.

    stages: those that it has. traced: its devices in the traces. predicted_s is None in layouts written before stages'
    times were stored.
    """

    rank: int
    stages: tuple[int, ...]
    traced: tuple[int, ...]
    predicted_s: float | None
    measured_s: float
    predicted_idle_s: float | None
    measured_idle_s: float


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A plan beside a trace. ``assumptions`` add up to ``measured_s − predicted_s``, largest first.

    ranks: of the traces; of several, both sides are the mean. stages: by a pipeline's rank; empty if it has none.
    """

    plan: str
    ranks: tuple[int, ...]
    predicted_s: float
    measured_s: float
    rows: tuple[BesideRow, ...]
    assumptions: tuple[Assumption, ...]
    matched_by: str
    notes: tuple[str, ...] = field(default=())
    stages: tuple[RankBeside, ...] = field(default=())


def against_plan(layout: Path, m: Measured, spent: Sequence[Spending]) -> JsonObject:
    """Returns ``plan_beside`` as JSON. Raises PaseError if the plan is not of such a run."""
    from dataclasses import asdict

    from pase.api import load

    out: JsonObject = asdict(plan_beside(load(layout), m, spent, str(layout)))
    return out


def plan_beside(plan: PlanData, m: Measured, spent: Sequence[Spending], where: str) -> Beside:
    """Compares a plan's step with what the slowest rank of a run measured; a pipeline's with the mean over its ranks.

    where: names the plan in errors. Raises PaseError if the plan's costs are not seconds, if the traces have no
    iteration or more ranks than the plan, or none of one of a pipeline's ranks.
    """
    if plan.unit != "s":
        raise PaseError(
            f"its costs are in {plan.unit}",
            where=where,
            fix="compile with --cost-model analytic, which predicts seconds",
        )
    if len(m.timeline.ranks) > plan.devices:
        raise PaseError(
            f"it is for {plan.devices} devices, and the traces have {len(m.timeline.ranks)} ranks",
            where=where,
            fix="give the layout of the run",
        )
    if not spent:
        raise PaseError("the trace has no complete iteration", where=where, fix="trace more steps")
    shares = _shares(plan, spent, where)
    planned = list(planned_work(plan))
    run = [w for s, share in shares for w in measured_work(m, s, share)]
    between, inside = _between_stages(plan, run)
    rows, how = _rows(planned, inside)
    idle: dict[str, float] = defaultdict(float)
    for s, share in shares:
        for cause, ns in s.idle.items():
            idle[cause] += share * ns / len(s.iterations) / 1e9
    stages = tuple(_stage_ranks(plan, m, shares))
    found = [
        *_of_products(rows),
        *_of_light("light", rows),
        *_of_light("update", rows),
        *_of_collectives(plan, planned, inside),
        *(_of_idle(idle) if plan.pipeline is None else _of_bubble(plan, stages, between, idle)),
    ]
    found = [a for a in found if a.difference_s]
    return Beside(
        plan=plan.model,
        ranks=tuple(s.rank for s, _ in shares),
        predicted_s=plan.cost,
        measured_s=math.fsum(share * s.total_ns / len(s.iterations) for s, share in shares) / 1e9,
        rows=tuple(sorted((_row(r) for r in rows), key=lambda r: -abs(r.measured_s - r.predicted_s))),
        assumptions=tuple(sorted(found, key=lambda a: -abs(a.difference_s))),
        matched_by=how,
        notes=tuple(_notes(plan, planned, inside, shares[0][0])),
        stages=stages,
    )


# -- ranks --


def _shares(plan: PlanData, spent: Sequence[Spending], where: str) -> list[tuple[Spending, float]]:
    """Returns the ranks that are compared, with their weights: the slowest; of a pipeline all, stage ranks equally."""
    p = plan.pipeline
    if p is None:
        return [(max(spent, key=lambda s: s.total_ns / len(s.iterations)), 1.0)]
    if p.replicas:
        raise PaseError(
            "its replicas are pipelines of their own, on unequal devices",
            where=where,
            fix="compare the replayed timelines: pase replay LAYOUT --against TRACES",
        )
    each = plan.mesh.devices
    traced = Counter(s.rank // each for s in spent)
    missing = [r for r in range(p.degree) if r not in traced]
    if missing:
        raise PaseError(
            f"the traces have no device of rank {missing[0]} of its pipeline: "
            f"devices {missing[0] * each} to {(missing[0] + 1) * each - 1}",
            where=where,
            fix="trace at least one device of each rank, numbered as in the run",
        )
    steps = [s.total_ns / len(s.iterations) / 1e6 for s in spent]
    if max(steps) > (1 + _SAME_STEP) * min(steps):
        raise PaseError(
            f"its ranks run the same steps, and in the traces they take {min(steps):.2f} to {max(steps):.2f} ms",
            where=where,
            fix="mark the steps: torch.profiler's step(), jax.profiler.StepTraceAnnotation",
        )
    return [(s, 1 / traced[s.rank // each] / p.degree) for s in spent]


def _between_stages(plan: PlanData, run: Sequence[TimedWork]) -> tuple[list[TimedWork], list[TimedWork]]:
    """Divides the run's work into what a pipeline's stages send one another, and all else."""
    inside = {c.kind for c in plan.collectives}
    sends = {"send_recv", "permute"} - inside if plan.pipeline is not None else set()
    between = [w for w in run if w.group == "collectives" and w.name in sends]
    return between, [w for w in run if w.group != "collectives" or w.name not in sends]


def _stage_ranks(
    plan: PlanData, m: Measured, shares: Sequence[tuple[Spending, float]]
) -> Iterable[RankBeside]:
    p = plan.pipeline
    if p is None:
        return
    each = plan.mesh.devices
    for rank in range(p.degree):
        mine = [s for s, _ in shares if s.rank // each == rank]
        idle = step = 0.0
        for s in mine:
            between, _ = _between_stages(plan, list(measured_work(m, s)))
            step += s.total_ns / len(s.iterations) / 1e9 / len(mine)
            idle += math.fsum(s.idle.values()) / len(s.iterations) / 1e9 / len(mine)
            idle += math.fsum(w.seconds for w in between) / len(mine)
        busy = None
        if p.before_s:
            micro = math.fsum(s.forward_s + s.backward_s for s in p.stages if s.rank == rank)
            busy = p.before_s[rank] + p.micro_batches * micro + p.after_s[rank]
        yield RankBeside(
            rank=rank,
            stages=tuple(k for k, s in enumerate(p.stages) if s.rank == rank),
            traced=tuple(s.rank for s in mine),
            predicted_s=busy,
            measured_s=step - idle,
            predicted_idle_s=None if busy is None else plan.cost - busy,
            measured_idle_s=idle,
        )


# -- matching --

_Sides = tuple[list[TimedWork], list[TimedWork]]


def _rows(planned: Sequence[TimedWork], run: Sequence[TimedWork]) -> tuple[list[_Sides], str]:
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


def _paired(sides: _Sides, key: Callable[[TimedWork], Hashable]) -> tuple[list[_Sides], _Sides]:
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
            f": {number_text(flops_run / seconds_run, 1e12, 0)} TFLOP/s measured over all, "
            f"{number_text(flops_planned / seconds_planned, 1e12, 0)} predicted"
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
        what=f"{what} reach{verb and 'es'} {number_text(moved / measured, 1e9, 0)} GB/s; "
        f"predicted: {number_text(moves / predicted, 1e9, 0)}, launches included "
        f"({math.fsum(i.calls for i in run):.0f} ops, predicted {math.fsum(i.calls for i in planned):.0f})",
    )


def _of_collectives(
    plan: PlanData, planned: Sequence[TimedWork], run: Sequence[TimedWork]
) -> Iterable[Assumption]:
    """Splits exposed communication: other durations than predicted, and more or less of it hidden."""
    sends, sent = ([i for i in side if i.group == "collectives"] for side in (planned, run))
    predicted = plan.communication
    hidden = plan.hidden
    if plan.pipeline is None:
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


def _of_idle(idle: Mapping[str, float]) -> Iterable[Assumption]:
    for cause, seconds in idle.items():
        yield Assumption(
            name="idle",
            difference_s=seconds,
            what=f"the device is idle, which no plan predicts: {_in_words(cause)}",
        )


def _in_words(cause: str) -> str:
    from pase.replay.measurement.breakdown import CAUSES

    return CAUSES.get(cause, "computing on the CPU").removeprefix("idle: ")


def _of_bubble(
    plan: PlanData, stages: Sequence[RankBeside], between: Sequence[TimedWork], idle: Mapping[str, float]
) -> Iterable[Assumption]:
    """Compares the idle time of the average rank with the schedule's bubble.

    A rank that waits for another stage is idle, or in a receive; a trace does not always tell which.
    """
    listed = plan.compute + plan.communication - plan.hidden
    known = [s.predicted_s for s in stages if s.predicted_s is not None]
    worked = math.fsum(known) / len(stages) if known else listed
    sends = math.fsum(w.seconds for w in between)
    measured = sends + math.fsum(idle.values())
    parts = {"in sends and receives between stages": sends}
    for cause, seconds in idle.items():
        parts[_in_words(cause)] = parts.get(_in_words(cause), 0.0) + seconds
    shown = [f"{s * 1e3:.2f} ms {what}" for what, s in sorted(parts.items(), key=lambda x: -x[1])[:3] if s]
    yield Assumption(
        name="bubble",
        difference_s=measured - (plan.cost - worked),
        what=f"the average rank is idle or waits for {measured * 1e3:.2f} ms; predicted: "
        f"{(plan.cost - worked) * 1e3:.2f} ms. Measured: {', '.join(shown) or 'none'}",
    )
    yield Assumption(
        name="stages",
        difference_s=listed - worked,
        what=f"the plan's list of ops has the splits of a middle stage ({listed * 1e3:.2f} ms a rank); its stages "
        f"together were predicted {worked * 1e3:.2f} ms a rank",
    )


def _notes(
    plan: PlanData, planned: Sequence[TimedWork], run: Sequence[TimedWork], s: Spending
) -> Iterable[str]:
    from pase.machine.load import names
    from pase.machine.recognize import machine_named

    work = _total(i.flops for i in planned if i.group == "products")
    done = math.fsum(max(i.flops, 0.0) for i in run if i.group == "products")
    unknown = len({(i.name, i.line) for i in run if i.group == "products" and i.flops < 0})
    if unknown:
        yield f"the FLOPs of {unknown} kinds of products in the trace are unknown"
    elif work > 0 and abs(done / work - 1.0) > _OTHER_WORK:
        yield (
            f"the products of the run do {done / work:.2f} times the FLOPs of the plan: is it another batch, another "
            f"number of devices, or another model?"
        )
    card = machine_named(s.device_name)
    # A machine file that is not one of pase's may be of any host.
    other = (
        plan.machine in names() and plan.machine != _HOST if s.device_name == CPU else card != plan.machine
    )
    if other and (card is not None or s.device_name == CPU):
        yield f"the plan is for the machine {plan.machine}, and the run was on {s.device_name}"
