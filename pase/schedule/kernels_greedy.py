"""Compiled: the construction described in `greedy`.

This file imports numba when it is imported: import it inside functions only. Kernels stand at module level, because
numba's cache does not find a function that closes over another one again.
"""

from __future__ import annotations

import numba
import numpy as np

from pase.schedule.kernels_chain import bytes_in, seconds_of

__all__ = ["greedy"]


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
            if ready[t] <= now and slope[row] >= 0.0:
                end = now + seconds_of(
                    row,
                    min(left[t], max(1.0, bytes_in(row, least, ptr, xs, ys, slope))),
                    ptr,
                    xs,
                    ys,
                    slope,
                )
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
            sliver = rest > 0.0 and size > 0.0 and take < rest
            if sliver and seconds_of(row, take, ptr, xs, ys, slope) < 2.0 * least:
                break  # cut from the front of a tensor it would cost the rest a startup of its own
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
