"""Delayed plans for the policy ours: k batches are merged and applied d iterations later, with d + k - 1 <= staleness.

With a delay of one iteration, compute waits for a message only if the links fall behind. The iteration is therefore
about max(compute, load / k), and few large messages, spread over the links, are best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pase.schedule.plan import BucketPlan, Message, Piece, Update
from pase.schedule.registry import MIB
from pase.schedule.simulate import evaluate
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import can_fuse, plain_view, ready_order

__all__ = ["delayed_plans"]

CAPS = (8 * MIB, 64 * MIB, 512 * MIB)


def delayed_plans(
    problem: ScheduleProblem, sync: BucketPlan, staleness: int
) -> Iterator[tuple[float, BucketPlan]]:
    """Yields (iteration seconds, plan) for every (k, d), each with the best message size."""
    view = plain_view(problem)
    for k in range(1, staleness + 2):
        for d in range(0, staleness + 2 - k):
            if k == 1 and d == 0:
                continue
            update = Update(first=0, last=k - 1, at=k - 1 + d)
            made = [
                BucketPlan(policy="ours", messages=m, dispatch=how, period=k, updates=(update,))
                for m, how in (
                    [(sync.messages, sync.dispatch)]
                    if d == 0
                    else [(_spread(problem, cap, view.ready.tolist()), "priority") for cap in CAPS]
                )
            ]
            costs = [evaluate(problem, p, timeline=False).iteration_s for p in made]
            best = min(range(len(made)), key=costs.__getitem__)
            yield costs[best], made[best]


def _spread(problem: ScheduleProblem, cap: int, ready: list[float]) -> tuple[Message, ...]:
    """Messages of about cap bytes with the tensors in ready order, each on the link that would finish it first."""
    messages: list[Message] = []
    free = [0.0] * len(problem.links)
    pieces: list[Piece] = []

    def close() -> None:
        if not pieces:
            return
        first, size = pieces[0].tensor, sum(p.nbytes for p in pieces)
        at = max(ready[p.tensor] for p in pieces)
        ends = {k: max(free[k], at) + problem.message_s(k, first, size) for k in problem.links_for(first)}
        k = min(ends, key=ends.__getitem__)
        free[k] = ends[k]
        messages.append(Message(pieces=tuple(pieces), link=k))
        pieces.clear()

    for t in ready_order(problem):
        nbytes = problem.tensors[t].nbytes
        if pieces and (
            sum(p.nbytes for p in pieces) + nbytes > cap or not can_fuse(problem, [pieces[0].tensor], t)
        ):
            close()
        parts = -(-nbytes // cap)
        edges = [nbytes * i // parts for i in range(parts + 1)]
        for a, b in itertools.pairwise(edges):
            pieces.append(Piece(tensor=t, offset=a, nbytes=b - a))
            if parts > 1:
                close()
    close()
    return tuple(messages)
