"""Compiled kernels for plain problems: cost curves, sequences, priorities and Jackson's bound.

Importing this module imports numba, so import it inside functions only. Kernels are at module level, because numba's
cache cannot find functions that close over another function.
"""

from __future__ import annotations

import heapq

import numpy as np

from pase.compiled import jit

__all__ = ["bytes_within", "jackson", "priority", "seconds_of", "sequence"]


@jit()
def seconds_of(curves, row, nbytes):
    """Seconds for one message of this many bytes, from the curve in ``row`` of ``Curves``; 0 for an empty message."""
    if nbytes <= 0.0:
        return 0.0
    curve, corners = curves.rows[row], curves.corners
    i, last = curve["first"], curve["last"] - 1
    if nbytes <= corners[i]["nbytes"]:
        return corners[i]["seconds"]
    if nbytes >= corners[last]["nbytes"]:
        return corners[last]["seconds"] + (nbytes - corners[last]["nbytes"]) * curve["slope"]
    while last - i > 1:  # find the corners on either side
        middle = (i + last) // 2
        if corners[middle]["nbytes"] < nbytes:
            i = middle
        else:
            last = middle
    a, b = corners[i], corners[i + 1]
    rise = (b["seconds"] - a["seconds"]) * (nbytes - a["nbytes"])
    return a["seconds"] + rise / (b["nbytes"] - a["nbytes"])


@jit()
def bytes_within(curves, row, seconds):
    """Bytes of the largest message that takes at most this long, from the curve in ``row``; 0 if there is none."""
    curve, corners = curves.rows[row], curves.corners
    last = curve["last"] - 1
    if seconds < corners[curve["first"]]["seconds"]:
        return 0.0
    if seconds >= corners[last]["seconds"]:
        if curve["slope"] <= 0.0:
            return np.inf
        return corners[last]["nbytes"] + (seconds - corners[last]["seconds"]) / curve["slope"]
    i = last - 1
    while corners[i]["seconds"] > seconds:
        i -= 1
    a, b = corners[i], corners[i + 1]
    rise = (b["nbytes"] - a["nbytes"]) * (seconds - a["seconds"])
    return a["nbytes"] + rise / (b["seconds"] - a["seconds"])


@jit()
def sequence(release, seconds, tail, link, links, compute):
    """The makespan if each link sends its messages strictly in the given order."""
    free = np.zeros(links)
    worst = compute
    for m in range(release.size):
        k = link[m]
        end = max(free[k], release[m]) + seconds[m]
        free[k] = end
        worst = max(worst, end + tail[m])
    return worst


@jit()
def priority_on_link(release, seconds, size, credit, mine, start):
    """Simulate one link and fill ``start`` (float64 [M]) for its messages.

    Whenever fewer than ``credit`` bytes are in flight, the link accepts the ready message that is first in the plan's
    order. mine: the link's messages, sorted by release.
    """
    ready = [0 for _ in range(0)]
    accepted = [0 for _ in range(0)]
    head, i = 0, 0
    flying, now = 0.0, 0.0
    while i < mine.size or len(ready) > 0 or head < len(accepted):
        while i < mine.size and release[mine[i]] <= now:
            heapq.heappush(ready, mine[i])
            i += 1
        while len(ready) > 0 and flying < credit:
            m = heapq.heappop(ready)
            flying += size[m]
            accepted.append(m)
        if head == len(accepted):
            if i == mine.size:
                break
            now = release[mine[i]]
            continue
        m = accepted[head]
        head += 1
        start[m] = now
        now += seconds[m]
        # Messages that become ready while this one is sent are accepted in the meantime, in order of arrival.
        while i < mine.size and release[mine[i]] < now:
            heapq.heappush(ready, mine[i])
            i += 1
            while len(ready) > 0 and flying < credit:
                x = heapq.heappop(ready)
                flying += size[x]
                accepted.append(x)
        flying -= size[m]


@jit()
def priority(release, seconds, tail, link, links, size, credit, compute):
    """Returns (makespan, start of each message) if each link takes the first ready message in the plan's order."""
    start = np.zeros(release.size)
    by_release = np.argsort(release, kind="mergesort")
    for k in range(links):
        priority_on_link(release, seconds, size, credit, by_release[link[by_release] == k], start)
    worst = compute
    for m in range(release.size):
        worst = max(worst, start[m] + seconds[m] + tail[m])
    return worst, start


@jit()
def jackson(ready, seconds, tail, order):
    """The least max(end + tail) on one machine with free preemption. order: the jobs sorted by readiness."""
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
