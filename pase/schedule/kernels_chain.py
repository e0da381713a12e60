"""Compiled: cost curves, sequences and priorities on plain problems, Jackson's bound.

This file imports numba when it is imported: import it inside functions only. Kernels stand at module level, because
numba's cache does not find a function that closes over another one again.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

__all__ = ["bytes_in", "jackson", "priority", "seconds_of", "sequence"]


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


@numba.njit(cache=True)
def jackson(ready, seconds, tail, order):  # type: ignore[no-untyped-def]
    left = seconds.copy()
    waiting = [(0.0, 0) for _ in range(0)]
    now, worst, i, n = 0.0, 0.0, 0, len(order)
    while i < n or len(waiting) > 0:
        if len(waiting) == 0:
            now = max(now, ready[order[i]])
        while i < n and ready[order[i]] <= now:
            heapq.heappush(waiting, (-tail[order[i]], order[i]))
            i += 1
        j = waiting[0][1]
        done = now + left[j]
        if i == n or done <= ready[order[i]]:
            heapq.heappop(waiting)
            now = done
            worst = max(worst, now + tail[j])
        else:
            left[j] -= ready[order[i]] - now
            now = ready[order[i]]
    return worst
