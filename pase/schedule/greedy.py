"""The fast solver's construction: given a makespan to meet, send the largest messages that still meet it.

Line up the tensors by tail (compute that waits for them), longest first. At any moment a free link takes the
first ready bytes of the line. With a target K a tensor of tail q must have arrived by K - q, so a message that
starts now may last until the earliest of: the deadline of its own first tensor; and for every tensor u passed over
(not ready yet, or of another group), u's deadline less the work up to u. Bigger messages save startups, so each
is as big as that allows; nothing is cut that need not be. Bisection on K, and on how much slack to keep for the
startups still to come, does the rest. One pass is O(messages * tensors), compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pase.schedule.types import Curve, Problem
from pase.schedule.view import PlainView

__all__ = ["Instance", "construct", "instance"]


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


def construct(inst: Instance, target_s: float, reserve: float, least_s: float) -> tuple[np.ndarray, ...]:
    """(message, place, bytes) per piece and (link) per message, aiming at target_s.

    reserve: share by which work to come is inflated, for startups; least_s: do not cut off a message shorter than
    that, unless it is all there is.
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
        ready, tail, nbytes, group, axes, links, ptr, xs, ys, slope, fluid, target, reserve, least
    ):
        n = ready.size
        left = nbytes.copy()
        work = fluid * (1.0 + reserve)
        free = np.zeros(links)
        piece_msg = [0 for _ in range(0)]
        piece_at = [0 for _ in range(0)]
        piece_bytes = [0.0 for _ in range(0)]
        msg_link = [0 for _ in range(0)]
        first = 0  # everything before it is sent
        sent = 0
        alive = np.ones(links, np.bool_)
        most = 2 * n + 512
        while sent < n:
            if len(msg_link) > most:
                alive[:] = False  # crumbs: the target is out of reach
            # The link that is free first takes its turn.
            k = -1
            for j in range(links):
                if alive[j] and (k < 0 or free[j] < free[k]):
                    k = j
            forced = k < 0
            if forced:
                for j in range(links):
                    if k < 0 or free[j] < free[k]:
                        k = j
            now = free[k]
            while first < n and left[first] <= 0.0:
                first += 1
            head = -1
            wake = np.inf
            limit = np.inf  # latest end that leaves room for what was passed over
            before = 0.0
            for t in range(first, n):
                if left[t] <= 0.0:
                    continue
                share = work[t] * left[t] / nbytes[t]
                row = axes[t] * links + k
                if ready[t] <= now:
                    if slope[row] >= 0.0:
                        end = now + seconds_of(row, min(left[t], max(1.0, bytes_in(row, least, ptr, xs, ys, slope))),
                                               ptr, xs, ys, slope)
                        if end <= min(limit, target - tail[t]) + 1e-15 or (forced and head < 0):
                            head = t
                            break
                        # Another release may come to nothing for this one, but a faster link may take it.
                elif ready[t] < wake:
                    wake = ready[t]
                before += share
                limit = min(limit, target - tail[t] - before)
            if head < 0:
                for t in range(first, n):
                    if left[t] > 0.0 and now < ready[t] < wake:
                        wake = ready[t]
                if wake < np.inf and not forced:
                    free[k] = wake
                elif not forced:
                    alive[k] = False  # nothing here in time: leave the rest to the other links
                else:
                    # Nobody can meet the target. Send what is needed soonest wherever it ends first.
                    t = first
                    best, best_end = -1, np.inf
                    for j in range(links):
                        row = axes[t] * links + j
                        if slope[row] >= 0.0:
                            end = max(free[j], ready[t]) + seconds_of(row, left[t], ptr, xs, ys, slope)
                            if end < best_end:
                                best, best_end = j, end
                    msg_link.append(best)
                    piece_msg.append(len(msg_link) - 1)
                    piece_at.append(t)
                    piece_bytes.append(left[t])
                    left[t] = 0.0
                    sent += 1
                    free[best] = best_end
                continue
            row = axes[head] * links + k
            msg_link.append(k)
            m = len(msg_link) - 1
            size = 0.0
            skipped = 0.0
            latest = min(limit, target - tail[head])
            if forced:
                latest = max(latest, now + seconds_of(row, left[head], ptr, xs, ys, slope))
            for t in range(head, n):
                if left[t] <= 0.0:
                    continue
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
                    take = left[t] if forced else min(left[t], max(1.0, np.floor(
                        bytes_in(row, least, ptr, xs, ys, slope))))
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
                if left[t] <= 0.0:
                    sent += 1
                else:
                    break
            free[k] = now + seconds_of(row, size, ptr, xs, ys, slope)
        return (
            np.array(piece_msg, np.int64),
            np.array(piece_at, np.int64),
            np.array(piece_bytes, np.float64),
            np.array(msg_link, np.int64),
        )

    return greedy
