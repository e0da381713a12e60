"""Evaluates plans of plain problems in one compiled pass over the messages, with heads and tails.

A test checks that the results equal those of `simulate.evaluate`.
"""

from __future__ import annotations

import numpy as np

from pase.schedule.plan import BucketPlan
from pase.schedule.simulate import message_seconds
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import PlainView, plain_view

__all__ = ["message_arrays", "plain_iteration_s", "sequence_s"]


def message_arrays(problem: ScheduleProblem, plan: BucketPlan, view: PlainView) -> tuple[np.ndarray, ...]:
    """Arrays (release, seconds, tail, link) of the messages, in the plan's order."""
    release = np.asarray([max(view.ready[p.tensor] for p in m.pieces) + m.hold_s for m in plan.messages])
    tail = np.asarray([max(view.tail[p.tensor] for p in m.pieces) for m in plan.messages])
    if plan.barrier and tail.size:
        first = float(np.max(view.compute - _after_cut(problem)))
        tail = np.full(tail.shape, first)
    link = np.asarray([m.link for m in plan.messages], np.int64)
    return release, message_seconds(problem, plan.messages), tail, link


def _after_cut(problem: ScheduleProblem) -> float:
    """Seconds of compute from the first block that makes a gradient to the end of the iteration."""
    cut = min((t.ready_after or 0 for t in problem.tensors), default=0)
    return sum(b.seconds for b in problem.blocks[cut:])


def plain_iteration_s(problem: ScheduleProblem, plan: BucketPlan, view: PlainView | None = None) -> float:
    """Seconds of an iteration of an undelayed plan on a plain problem; equal to `evaluate(...).iteration_s`."""
    from pase.schedule.kernels_chain import priority, sequence

    view = view or plain_view(problem)
    if not plan.messages:
        return view.compute
    release, seconds, tail, link = message_arrays(problem, plan, view)
    links = len(problem.links)
    if plan.dispatch == "sequence":
        return float(sequence(release, seconds, tail, link, links, view.compute))
    size = np.asarray([m.nbytes for m in plan.messages], float)
    worst, _ = priority(release, seconds, tail, link, links, size, float(plan.credit_bytes), view.compute)
    return float(worst)


def sequence_s(
    release: np.ndarray, seconds: np.ndarray, tail: np.ndarray, link: np.ndarray, links: int, compute: float
) -> float:
    """Seconds of an iteration if each link sends strictly in the given order."""
    from pase.schedule.kernels_chain import sequence

    return float(sequence(release, seconds, tail, link, links, compute))
