"""The construction of the fast solver: given a target makespan, send the largest messages that still meet it.

The tensors stand in a line, sorted by tail (the compute that waits for them), longest first. A free link takes the
first ready bytes of the line. With a target K, a tensor of tail q must arrive by K - q. A message that starts now may
therefore last until the earliest of: the deadline of its own first tensor; and, for every tensor u that it passes over
(because u is not ready yet, or is of another group), the deadline of u minus the work up to u. Larger messages save
startups, so each message is as large as this allows, and no tensor is cut unless it must be. The caller bisects on K
and tries several reserves for the startups that are still to come. One pass is O(messages * tensors) and compiled.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from pase.schedule.types import ScheduleProblem, SendTime, TransferGroup
from pase.schedule.view import PlainView

__all__ = ["Instance", "construct", "instance", "preemptive"]


TENSOR = np.dtype(
    [
        ("ready", float),
        ("tail", float),
        ("nbytes", float),
        ("fluid", float),
        ("group", np.int64),
        ("axes", np.int64),
    ]
)
CURVE = np.dtype([("first", np.int64), ("last", np.int64), ("slope", float)])
CORNER = np.dtype([("nbytes", float), ("seconds", float)])


class Curves(NamedTuple):
    """Cost curves. The curve of axes a on link k is row a * links + k.

    rows: CURVE [axes * links], the range of the curve's corners (first to last, exclusive) and the slope after the last
        corner. A slope of -1 means that the link does not carry these axes.
    corners: CORNER, the corners of all curves.
    """

    rows: np.ndarray
    corners: np.ndarray


class Instance(NamedTuple):
    """A plain problem as arrays. The tensors are sorted by tail (longest first), then by readiness (latest first).

    It is a named tuple of structured arrays because compiled functions accept this type.

    order: int64 [T], the problem's tensor at each place.
    tensors: TENSOR [T]. group numbers the sets of tensors that may be fused, axes selects rows of the curves, and fluid
        is the seconds that the tensor takes if all links share it.
    """

    order: np.ndarray
    tensors: np.ndarray
    curves: Curves
    links: int
    compute: float


def instance(problem: ScheduleProblem, view: PlainView) -> Instance:
    tensors = problem.tensors
    order = np.lexsort((np.arange(len(tensors)), -view.ready, -view.tail))
    groups: dict[TransferGroup, int] = {}
    group = np.asarray([groups.setdefault(t.group, len(groups)) for t in tensors], np.int64)
    names = sorted({t.axes for t in tensors}, key=str)
    axes = np.asarray([names.index(t.axes) for t in tensors], np.int64)
    rows, corners = list[tuple[int, int, float]](), list[tuple[float, float]]()
    speed = np.zeros(len(names))
    most = float(problem.nbytes)
    for g, name in enumerate(names):
        for link in problem.links:
            curve: SendTime | None = link.curve_for(name) if link.carries(name) else None
            first = len(corners)
            if curve is not None:
                corners += zip(curve.bytes_, curve.seconds, strict=True)
                if (rate := curve.best_s_per_byte(most)) > 0:
                    speed[g] += 1.0 / rate
            rows.append((first, len(corners), -1.0 if curve is None else curve.tail_s_per_byte))
    per_byte = np.where(speed > 0, 1.0 / np.where(speed > 0, speed, 1.0), 0.0)
    line = np.zeros(len(tensors), TENSOR)
    line["ready"], line["tail"], line["nbytes"] = view.ready[order], view.tail[order], view.nbytes[order]
    line["fluid"], line["group"], line["axes"] = (
        (per_byte[axes] * view.nbytes)[order],
        group[order],
        axes[order],
    )
    curves = Curves(rows=np.array(rows, CURVE), corners=np.array(corners, CORNER))
    return Instance(
        order=order, tensors=line, curves=curves, links=len(problem.links), compute=float(view.compute)
    )


def construct(
    inst: Instance, target_s: float, reserve: float, least_s: float, from_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Messages that aim at the makespan target_s: (message, place, bytes) per piece and (link) per message.

    reserve: fraction by which the remaining work is inflated to allow for startups.
    least_s: no message shorter than this is cut off, unless it is all that is left of the tensor.
    from_s: float64 [links], the time from which each link may be used.

    The array of links is empty if the target cannot be met, or if it would need too many messages.
    """
    from pase.schedule.kernels_greedy import greedy

    out: tuple[np.ndarray, ...] = greedy(inst, target_s, reserve, least_s, from_s)
    return out


def preemptive(inst: Instance) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of the preemptive priority schedule on one link, which always sends the ready tensor needed soonest.

    Each preemption ends a message, so there are at most two messages per tensor on average. With startups they cost
    more than the bound.
    """
    line = inst.tensors
    left = line["fluid"].tolist()
    total = left[:]
    by_ready = np.argsort(line["ready"], kind="stable").tolist()
    ready, nbytes = line["ready"].tolist(), line["nbytes"].tolist()
    waiting: list[int] = []
    rows: list[tuple[int, float]] = []
    gone = [0.0] * len(left)
    now, i, n = 0.0, 0, len(left)
    while i < n or waiting:
        if not waiting:
            now = max(now, ready[by_ready[i]])
        while i < n and ready[by_ready[i]] <= now:
            heapq.heappush(waiting, by_ready[i])
            i += 1
        t = waiting[0]
        if i == n or now + left[t] <= ready[by_ready[i]]:
            heapq.heappop(waiting)
            now += left[t]
            rows.append((t, nbytes[t] - gone[t]))
            continue
        size = min(float(int((ready[by_ready[i]] - now) / total[t] * nbytes[t])), nbytes[t] - gone[t] - 1.0)
        left[t] -= ready[by_ready[i]] - now
        now = ready[by_ready[i]]
        if size > 0.0:
            gone[t] += size
            rows.append((t, size))
    at, size_of = zip(*rows, strict=True)
    count = len(rows)
    return np.arange(count), np.asarray(at, np.int64), np.asarray(size_of, float), np.zeros(count, np.int64)
