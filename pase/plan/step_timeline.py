"""A plan's predicted step as a timeline: the stages of a pipeline, or one device's step under its bucket plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.plan.buckets import timeline_of
from pase.plan.stage_timeline import stage_timeline
from pase.plan.step_memory import step_memory
from pase.replay.types import Event, Timeline, from_events

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.schedule.plan import BucketPlan
    from pase.schedule.types import ScheduleProblem

__all__ = ["step_timeline"]


def step_timeline(plan: PlanData, schedule: tuple[ScheduleProblem, BucketPlan] | None) -> Timeline | None:
    """Return the step as `pase replay` reads it. schedule: the plan's bucket plan, if it has one.

    None if nothing is sent, or if a pipeline's layout does not have the stages' times.
    """
    if plan.pipeline is not None:
        return stage_timeline(plan)
    if schedule is None:
        return None
    problem, buckets = schedule
    t = timeline_of(problem, buckets)
    if buckets.period == 1:
        t = from_events([*t, *_held(plan, problem, t)], groups=t.groups, marks=t.marks)
    return replace(t, hosts={0: f"each of {plan.devices} devices"} if plan.devices > 1 else {})


def _held(plan: PlanData, problem: ScheduleProblem, t: Timeline) -> Iterator[Event]:
    """Yield what a device holds, by kind.

    Within each forward and backward the corners keep their proportions, because compute may wait for the network even
    if the plan's own price says that it does not. From the second micro-batch on, all gradients are held.
    """
    course = step_memory(plan)
    if course is None:
        return
    end_of = {e.name: e.start_ns + e.duration_ns for e in t if e.kind == "kernel"}
    passes = itertools.groupby(problem.blocks, key=lambda b: b.phase)
    ends = [0, *itertools.accumulate((max(end_of.get(b.name, 0) for b in of) for _, of in passes), max)]
    whole = course.times[-1]
    for kind, values in [*course.held.items(), ("buffers", (float(plan.memory.buffers),))]:
        last = -1
        for m, time, value in _corners(course.times, values, len(ends) // 2):
            begin, turn, end = ends[2 * m : 2 * m + 3]
            if time <= course.forward:
                at = begin + (turn - begin) * (time / course.forward if course.forward else 0.0)
            else:
                at = turn + (end - turn) * (time - course.forward) / (whole - course.forward)
            if m and kind == "gradients":
                value = max(values)
            if round(value) != last:
                last = round(value)
                yield Event(
                    rank=0,
                    lane="memory",
                    device=False,
                    kind="memory",
                    name=kind,
                    start_ns=round(at),
                    duration_ns=0,
                    nbytes=last,
                    iteration=0,
                )


def _corners(
    times: Sequence[float], values: Sequence[float], micro_batches: int
) -> Iterator[tuple[int, float, float]]:
    """Yield (micro-batch, time in it, value) of what is held."""
    for m in range(micro_batches):
        for time, value in zip(times, values, strict=False):
            yield m, time, value
