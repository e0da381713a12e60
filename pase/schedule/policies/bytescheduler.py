"""ByteScheduler: partitioned tensors, priority by next use, and a credit of bytes in flight. Peng et al., SOSP 2019.

The partition size and the credit are tuned. The paper's tuner is Bayesian because each trial costs seconds of training.
An evaluation here takes less than a millisecond, so the whole grid is tried and then refined, which tunes at least as
well.
"""

from __future__ import annotations

import itertools

import numpy as np

from pase.schedule.chain import plain_iteration_s
from pase.schedule.plan import BucketPlan, Message, Piece
from pase.schedule.registry import MIB, Options, register
from pase.schedule.simulate import evaluate
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import fastest_link, need_order, plain_view

__all__ = ["bytescheduler", "partitioned"]

PARTITIONS = tuple(int(MIB * 2.0**k) for k in range(0, 9))
CREDITS = (1, 2, 4)
"""Credits to try, in partitions."""
MOST_MESSAGES = 4000


def partitioned(
    problem: ScheduleProblem, partition_bytes: int, *, order: list[int] | None = None
) -> list[Message]:
    """Cut each tensor into equal pieces of at most this size, one message each, in order of next use."""
    messages = []
    for t in need_order(problem) if order is None else order:
        nbytes, link = problem.tensors[t].nbytes, fastest_link(problem, t)
        cuts = np.linspace(0, nbytes, -(-nbytes // partition_bytes) + 1).round().astype(int).tolist()
        messages += [
            Message(pieces=(Piece(tensor=t, offset=a, nbytes=b - a),), link=link)
            for a, b in itertools.pairwise(cuts)
        ]
    return messages


@register("bytescheduler", "ByteScheduler: partition and credit, priority by next use, tuned")
def bytescheduler(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """The best (partition, credit) of a grid and of the neighbourhood of its best partition."""
    view = plain_view(problem) if problem.is_plain else None
    tried: dict[tuple[int, int], tuple[float, BucketPlan]] = {}

    def trial(partition: int, credits: int) -> float:
        if (partition, credits) not in tried:
            plan = BucketPlan(
                policy="bytescheduler",
                messages=tuple(partitioned(problem, partition)),
                dispatch="priority",
                credit_bytes=1 + (credits - 1) * partition,
                detail={"partition_bytes": partition, "credit_partitions": credits},
            )
            cost = (
                plain_iteration_s(problem, plan, view)
                if view is not None
                else evaluate(problem, plan, timeline=False, check=False).iteration_s
            )
            tried[partition, credits] = (cost, plan)
        return tried[partition, credits][0]

    largest = max(t.nbytes for t in problem.tensors)
    sizes = [s for s in PARTITIONS if problem.nbytes / s <= MOST_MESSAGES and s < largest] + [largest]
    best = min(((s, c) for s in sizes for c in CREDITS), key=lambda x: trial(*x))
    for factor in (0.6, 0.75, 0.875, 1.15, 1.3, 1.6):
        size = max(1, int(best[0] * factor))
        if size <= largest and problem.nbytes / size <= MOST_MESSAGES:
            trial(size, best[1])
    return min(tried.values(), key=lambda x: x[0])[1]
