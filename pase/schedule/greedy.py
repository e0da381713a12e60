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
from functools import cache
from typing import Any

import numpy as np

from pase.schedule.types import Curve, Problem
from pase.schedule.view import PlainView

__all__ = ["Instance", "construct", "curve_kernels", "instance", "preemptive"]


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
    ptr, xs, ys, slope = [0], [], [], []
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
    that, unless it is all there is; from_s: float64 [links], before which a link is left alone. No message at all: the target is out of reach, or takes too many.
    """
    out: tuple[np.ndarray, ...] = _kernel()(
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


@cache
def curve_kernels() -> tuple[Any, Any]:
    """Compiled (seconds of bytes, bytes within seconds) on one row of the curve table."""
    import numba

    @numba.njit(cache=True)
    def seconds_of(row, n, ptr, xs, ys, slope):  # type: ignore[no-untyped-def]
        if n <= 0.0:
            return 0.0
        lo, hi = ptr[row], ptr[row + 1]
        if n <= xs[lo]:
            return ys[lo]
        if n >= xs[hi - 1]:
            return ys[hi - 1] + (n - xs[hi - 1]) * slope[row]
        i = lo + np.searchsorted(xs[lo:hi], n)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (n - xs[i - 1]) / (xs[i] - xs[i - 1])

    @numba.njit(cache=True)
    def bytes_in(row, s, ptr, xs, ys, slope):  # type: ignore[no-untyped-def]
        lo, hi = ptr[row], ptr[row + 1]
        if s < ys[lo]:
            return 0.0
        if s >= ys[hi - 1]:
            if slope[row] <= 0.0:
                return np.inf
            return xs[hi - 1] + (s - ys[hi - 1]) / slope[row]
        i = hi - 2
        while ys[i] > s:
            i -= 1
        return xs[i] + (xs[i + 1] - xs[i]) * (s - ys[i]) / (ys[i + 1] - ys[i])

    return seconds_of, bytes_in


@cache
def _kernel() -> Any:
    import numba

    seconds_of, bytes_in = curve_kernels()

    @numba.njit(cache=True)
    def greedy(  # type: ignore[no-untyped-def]
        ready, tail, nbytes, group, axes, links, ptr, xs, ys, slope, fluid, target, reserve, least, from_s
    ):
        n = ready.size
        left = nbytes.copy()
        work = fluid * (1.0 + reserve)
        # The front of the line that nothing was taken from yet, and none of which is ready, needs no walk: its
        # work, its tightest limit and its next release are known for every length.
        up_to = np.zeros(n + 1)
        tightest = np.full(n + 1, np.inf)
        soonest = np.full(n + 1, np.inf)
        for t in range(n):
            up_to[t + 1] = up_to[t] + work[t]
            tightest[t + 1] = min(tightest[t], -tail[t] - up_to[t + 1])
            soonest[t + 1] = min(soonest[t], ready[t])
        skip = np.arange(n + 1)  # next place at or after this one with bytes left, by path halving
        front = n
        releases = np.sort(ready)
        shortest = np.full(links, np.inf)
        for j in range(slope.size):
            if slope[j] >= 0.0:
                shortest[j % links] = min(shortest[j % links], ys[ptr[j]])
        free = from_s.copy()
        piece_msg = [0 for _ in range(0)]
        piece_at = [0 for _ in range(0)]
        piece_bytes = [0.0 for _ in range(0)]
        msg_link = [0 for _ in range(0)]
        sent = 0
        alive = np.ones(links, np.bool_)
        most = min(2 * n, 256) + 64
        while sent < n:
            if len(msg_link) > most:
                break  # crumbs: the target is out of reach
            # The link that is free first takes its turn.
            k = -1
            for j in range(links):
                if alive[j] and (k < 0 or free[j] < free[k]):
                    k = j
            if k < 0:
                break  # nobody can meet the target
            now = free[k]
            while front > 0 and soonest[front] <= now:
                front -= 1  # times only grow, so the front only shrinks
            head = -1
            limit = target + tightest[front]  # latest end that leaves room for what was passed over
            before = up_to[front]
            t = front - 1
            while True:
                t += 1
                while skip[t] != t:
                    skip[t] = skip[skip[t]]
                    t = skip[t]
                if t >= n or limit < now + shortest[k]:
                    break
                share = work[t] * left[t] / nbytes[t]
                row = axes[t] * links + k
                if ready[t] <= now:
                    if slope[row] >= 0.0:
                        end = now + seconds_of(row, min(left[t], max(1.0, bytes_in(row, least, ptr, xs, ys, slope))),
                                               ptr, xs, ys, slope)
                        if end <= min(limit, target - tail[t]) + 1e-15:
                            head = t
                            break
                before += share
                limit = min(limit, target - tail[t] - before)
            if head < 0:
                following = np.searchsorted(releases, now, side="right")
                if following < n:
                    free[k] = releases[following]
                else:
                    alive[k] = False  # nothing here in time: leave the rest to the other links
                continue
            row = axes[head] * links + k
            msg_link.append(k)
            m = len(msg_link) - 1
            size = 0.0
            skipped = 0.0
            latest = min(limit, target - tail[head])
            t = head - 1
            while True:
                t += 1
                while skip[t] != t:
                    skip[t] = skip[skip[t]]
                    t = skip[t]
                if t >= n:
                    break
                if ready[t] > now or group[t] != group[head]:
                    # Passed over: it must still be possible to send it, and all passed over before it, after us.
                    skipped += work[t] * left[t] / nbytes[t]
                    latest = min(latest, target - tail[t] - skipped - before)
                    if now + seconds_of(row, size, ptr, xs, ys, slope) > latest:
                        break
                    continue
                room = bytes_in(row, latest - now, ptr, xs, ys, slope) - size
                take = min(left[t], np.floor(room))
                if take <= 0.0:
                    if size > 0.0:
                        break
                    take = min(left[t], max(1.0, np.floor(bytes_in(row, least, ptr, xs, ys, slope))))
                rest = left[t] - take
                if rest > 0.0 and size > 0.0 and take < rest:
                    # A sliver cut from the front of a tensor would cost the rest of it a startup of its own.
                    if seconds_of(row, take, ptr, xs, ys, slope) < 2.0 * least:
                        break
                piece_msg.append(m)
                piece_at.append(t)
                piece_bytes.append(take)
                size += take
                left[t] -= take
                if left[t] > 0.0:
                    break
                sent += 1
                skip[t] = t + 1
            free[k] = now + seconds_of(row, size, ptr, xs, ys, slope)
        if sent < n:
            msg_link = [0 for _ in range(0)]
        return (
            np.array(piece_msg, np.int64),
            np.array(piece_at, np.int64),
            np.array(piece_bytes, np.float64),
            np.array(msg_link, np.int64),
        )

    return greedy


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
