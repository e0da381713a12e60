"""US-Byte: tensor blocks of unequal size, then a greedy search over the order. Gao et al., TPDS 2023."""

from __future__ import annotations

import heapq
import math

import numpy as np

from pase.schedule.chain import message_arrays, sequence_s
from pase.schedule.plan import BucketPlan, Message, Piece
from pase.schedule.registry import MIB, Options, register
from pase.schedule.types import ScheduleProblem, SendTime
from pase.schedule.view import fastest_link, need_order, plain_view

__all__ = ["us_byte"]

BLOCK_BYTES = 1 * MIB
"""The basic block S_p. A message is a multiple of it."""
PASSES = 2


@register("us_byte", "US-Byte: blocks sized to the gaps of backward, then a greedy order", plain_only=True)
def us_byte(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """US-Byte's two phases.

    Phase 1: while backward runs, whenever the link is free, the ready layer that is needed soonest sends as many basic
    blocks as fit before the next gradient, at least one. Phase 2: the rest of each layer is one message, in order of
    next use. Then, from the last layer down, a layer's priority is raised while this shortens the iteration.
    """
    view = plain_view(problem)
    messages: list[Message] = []
    phase2 = 0
    links = sorted({fastest_link(problem, t) for t in range(len(problem.tensors))})
    for link in links:
        mine = [t for t in need_order(problem) if fastest_link(problem, t) == link]
        early, late = _fill(problem, link, mine, view.ready)
        messages = messages[: len(messages) - phase2] + early + messages[len(messages) - phase2 :] + late
        phase2 += len(late)
    plan = BucketPlan(policy="us_byte", messages=tuple(messages))
    release, seconds, tail, on = message_arrays(problem, plan, view)
    order = np.arange(len(messages))

    def cost(o: np.ndarray) -> float:
        return sequence_s(release[o], seconds[o], tail[o], on[o], len(problem.links), view.compute)

    best, first = cost(order), len(messages) - phase2
    for _ in range(PASSES):
        before = best
        for i in range(len(messages) - 1, first, -1):
            at = int(np.flatnonzero(order == i)[0])
            while at > first:
                trial = order.copy()
                trial[[at - 1, at]] = trial[[at, at - 1]]
                c = cost(trial)
                if c >= best - 1e-15:
                    break
                best, order, at = c, trial, at - 1
        if best >= before:
            break
    return BucketPlan(
        policy="us_byte", messages=tuple(messages[i] for i in order), detail={"block_bytes": BLOCK_BYTES}
    )


def _fill(
    problem: ScheduleProblem, link: int, tensors: list[int], ready: np.ndarray
) -> tuple[list[Message], list[Message]]:
    """The messages of phase 1 in the order of sending, and those of phase 2. tensors: in order of next use."""
    place = {t: i for i, t in enumerate(tensors)}
    coming = sorted(tensors, key=lambda t: (ready[t], place[t]))
    backward_end = float(max(ready[t] for t in tensors))
    sent = dict.fromkeys(tensors, 0)
    waiting: list[int] = []
    early: list[Message] = []
    now, i = 0.0, 0
    while True:
        while i < len(coming) and ready[coming[i]] <= now:
            heapq.heappush(waiting, place[coming[i]])
            i += 1
        if now >= backward_end:
            break
        if not waiting:
            now = float(ready[coming[i]])
            continue
        t = tensors[waiting[0]]
        gap = float(ready[coming[i]]) - now if i < len(coming) else math.inf
        left = problem.tensors[t].nbytes - sent[t]
        curve = problem.links[link].curve_for(problem.tensors[t].axes)
        nbytes = min(left, _blocks(curve, gap) * BLOCK_BYTES)
        early.append(Message(pieces=(Piece(tensor=t, offset=sent[t], nbytes=nbytes),), link=link))
        sent[t] += nbytes
        now += curve.seconds_for(nbytes)
        if sent[t] == problem.tensors[t].nbytes:
            heapq.heappop(waiting)
    late = [
        Message(
            pieces=(Piece(tensor=t, offset=sent[t], nbytes=problem.tensors[t].nbytes - sent[t]),), link=link
        )
        for t in tensors
        if sent[t] < problem.tensors[t].nbytes
    ]
    return early, late


def _blocks(curve: SendTime, gap_s: float) -> int:
    """ceil((gap - alpha) / (beta S_p)), at least 1. The beta of a table is its rise over one block."""
    beta = curve.seconds_for(2 * BLOCK_BYTES) - curve.seconds_for(BLOCK_BYTES)
    if gap_s <= curve.startup_s:
        return 1
    if math.isinf(gap_s) or beta <= 0:
        return 2**31
    return max(1, math.ceil((gap_s - curve.startup_s) / beta))
