"""Plain problems as heads and tails: the evaluator's answer in one pass over the messages, compiled.

A test holds these to `simulate.evaluate`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pase.schedule.plan import BucketPlan
from pase.schedule.simulate import message_seconds
from pase.schedule.types import Problem
from pase.schedule.view import PlainView, plain_view

__all__ = ["message_arrays", "plain_iteration_s", "priority_order", "sequence_s"]


def message_arrays(problem: Problem, plan: BucketPlan, view: PlainView) -> tuple[np.ndarray, ...]:
    """(release, seconds, tail, link) of each message, in the plan's order."""
    release = np.asarray([max(view.ready[p.tensor] for p in m.pieces) + m.hold_s for m in plan.messages])
    tail = np.asarray([max(view.tail[p.tensor] for p in m.pieces) for m in plan.messages])
    if plan.barrier and tail.size:
        first = float(np.max(view.compute - _after_cut(problem)))
        tail = np.full(tail.shape, first)
    link = np.asarray([m.link for m in plan.messages], np.int64)
    return release, message_seconds(problem, plan.messages), tail, link


def _after_cut(problem: Problem) -> float:
    """Compute from the first block that makes a gradient to the end of the iteration, seconds."""
    cut = min((t.ready_after or 0 for t in problem.tensors), default=0)
    return sum(b.seconds for b in problem.blocks[cut:])


def plain_iteration_s(problem: Problem, plan: BucketPlan, view: PlainView | None = None) -> float:
    """Iteration seconds of an undelayed plan on a plain problem; equals `evaluate(...).iteration_s`."""
    view = view or plain_view(problem)
    if not plan.messages:
        return view.compute
    release, seconds, tail, link = message_arrays(problem, plan, view)
    links = len(problem.links)
    if plan.dispatch == "sequence":
        return float(_sequence()(release, seconds, tail, link, links, view.compute))
    size = np.asarray([m.nbytes for m in plan.messages], float)
    worst, _ = _priority()(release, seconds, tail, link, links, size, float(plan.credit_bytes), view.compute)
    return float(worst)


def priority_order(
    release: np.ndarray, seconds: np.ndarray, tail: np.ndarray, link: np.ndarray, links: int
) -> np.ndarray:
    """The order in which messages start when each link takes the first ready one, int64 [M]."""
    size = np.ones(release.size)
    _, start = _priority()(release, seconds, tail, link, links, size, 0.5, 0.0)
    return np.argsort(start, kind="stable")


@cache
def _sequence() -> Any:
    import numba

    @numba.njit(cache=True)
    def sequence(release, seconds, tail, link, links, compute):  # type: ignore[no-untyped-def]
        free = np.zeros(links)
        worst = compute
        for m in range(release.size):
            k = link[m]
            end = max(free[k], release[m]) + seconds[m]
            free[k] = end
            if end + tail[m] > worst:
                worst = end + tail[m]
        return worst

    return sequence


@cache
def _priority() -> Any:
    import heapq

    import numba

    @numba.njit(cache=True)
    def priority(release, seconds, tail, link, links, size, credit, compute):  # type: ignore[no-untyped-def]
        n = release.size
        start = np.zeros(n)
        worst = compute
        by_release = np.argsort(release, kind="mergesort")
        for k in range(links):
            ready = [0]
            ready.pop()
            fifo = [0]
            fifo.pop()
            head = 0
            flying = 0.0
            now = 0.0
            i = 0
            while i < n or len(ready) > 0 or head < len(fifo):
                while i < n and (link[by_release[i]] != k or release[by_release[i]] <= now):
                    if link[by_release[i]] == k:
                        heapq.heappush(ready, by_release[i])
                    i += 1
                while len(ready) > 0 and flying < credit:
                    m = heapq.heappop(ready)
                    flying += size[m]
                    fifo.append(m)
                if head == len(fifo):
                    if i >= n:
                        break
                    now = release[by_release[i]]
                    continue
                m = fifo[head]
                head += 1
                start[m] = now
                end = now + seconds[m]
                # What becomes ready while it runs may be accepted in the meantime, in order of arrival.
                while i < n and (link[by_release[i]] != k or release[by_release[i]] < end):
                    j = by_release[i]
                    if link[j] == k:
                        heapq.heappush(ready, j)
                        while len(ready) > 0 and flying < credit:
                            x = heapq.heappop(ready)
                            flying += size[x]
                            fifo.append(x)
                    i += 1
                now = end
                flying -= size[m]
                if end + tail[m] > worst:
                    worst = end + tail[m]
        return worst, start

    return priority


def sequence_s(
    release: np.ndarray, seconds: np.ndarray, tail: np.ndarray, link: np.ndarray, links: int, compute: float
) -> float:
    """Iteration seconds when each link sends strictly in the order given."""
    return float(_sequence()(release, seconds, tail, link, links, compute))
