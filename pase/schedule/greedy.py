"""The fast solver's construction: given a makespan to meet, send the largest messages that still meet it.

Line up the tensors by tail (compute that waits for them), longest first. At any moment a free link takes the
first ready bytes of the line. With a target K a tensor of tail q must have arrived by K - q, so a message that
starts now may last until the earliest of: the deadline of its own first tensor; and for every tensor u passed over
(not ready yet, or of another group), u's deadline less the work up to u. Bigger messages save startups, so each
is as big as that allows; nothing is cut that need not be. Bisection on K, and on how much slack to keep for the
startups still to come, does the rest. One pass is O(messages * tensors), compiled.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from pase.schedule.types import Curve, Problem
from pase.schedule.view import PlainView

__all__ = ["Instance", "construct", "instance", "preemptive"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """A plain problem as arrays, tensors sorted by tail (longest first), then by readiness (latest first).

    order: int64 [T] the problem's tensor at each place; ready, tail, nbytes: float64 [T]; group: int64 [T], fusible
    groups; axes: int64 [T], rows of the curve table. Curve of (axes a, link k) is row a * links + k:
    corners xs, ys [ptr[row]:ptr[row + 1]] and slope[row]; slope -1 = the link does not carry it.
    fluid: float64 [T], seconds per tensor if all links shared it.
    """

    order: np.ndarray
    ready: np.ndarray
    tail: np.ndarray
    nbytes: np.ndarray
    group: np.ndarray
    axes: np.ndarray
    links: int
    ptr: np.ndarray
    xs: np.ndarray
    ys: np.ndarray
    slope: np.ndarray
    fluid: np.ndarray
    compute: float

    @property
    def curves(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.ptr, self.xs, self.ys, self.slope


def instance(problem: Problem, view: PlainView) -> Instance:
    tensors = problem.tensors
    order = np.lexsort((np.arange(len(tensors)), -view.ready, -view.tail))
    groups: dict[tuple[str, str, str], int] = {}
    group = np.asarray([groups.setdefault(t.group, len(groups)) for t in tensors], np.int64)
    names = sorted({t.axes for t in tensors})
    axes = np.asarray([names.index(t.axes) for t in tensors], np.int64)
    ptr, slope = [0], list[float]()
    xs, ys = list[float](), list[float]()
    speed = np.zeros(len(names))
    most = float(problem.nbytes)
    for g, name in enumerate(names):
        for link in problem.links:
            curve: Curve | None = link.curve_for(name) if link.carries(name) else None
            if curve is not None:
                xs += curve.bytes_
                ys += curve.seconds
                if (rate := curve.best_s_per_byte(most)) > 0:
                    speed[g] += 1.0 / rate
            ptr.append(len(xs))
            slope.append(-1.0 if curve is None else curve.tail_s_per_byte)
    per_byte = np.where(speed > 0, 1.0 / np.where(speed > 0, speed, 1.0), 0.0)
    return Instance(
        order=order,
        ready=view.ready[order],
        tail=view.tail[order],
        nbytes=view.nbytes[order],
        group=group[order],
        axes=axes[order],
        links=len(problem.links),
        ptr=np.asarray(ptr, np.int64),
        xs=np.asarray(xs, float),
        ys=np.asarray(ys, float),
        slope=np.asarray(slope, float),
        fluid=(per_byte[axes] * view.nbytes)[order],
        compute=view.compute,
    )


def construct(
    inst: Instance, target_s: float, reserve: float, least_s: float, from_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    """(message, place, bytes) per piece and (link) per message, aiming at target_s.

    reserve: share by which work to come is inflated, for startups; least_s: do not cut off a message shorter than
    that, unless it is all there is;
    from_s: float64 [links], before which a link is left alone. No message at all: the target is out of reach, or
    takes too many.
    """
    from pase.schedule.kernels_greedy import greedy

    out: tuple[np.ndarray, ...] = greedy(
        inst.ready,
        inst.tail,
        inst.nbytes,
        inst.group,
        inst.axes,
        inst.links,
        *inst.curves,
        inst.fluid,
        target_s,
        reserve,
        least_s,
        from_s,
    )
    return out


def preemptive(inst: Instance) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of the preemptive priority schedule on one link: the ready tensor needed soonest, always.

    Its messages are as the preemptions cut them, at most two a tensor; with startups they cost more than the bound.
    """
    left = (inst.fluid * 1.0).tolist()
    total = left[:]
    by_ready = np.argsort(inst.ready, kind="stable").tolist()
    ready, nbytes = inst.ready.tolist(), inst.nbytes.tolist()
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
