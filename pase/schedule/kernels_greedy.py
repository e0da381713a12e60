"""Compiled: the construction described in `greedy`.

This file imports numba when it is imported: import it inside functions only. Kernels are at module level, because
numba's cache does not find a function that closes over another one again.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from pase.schedule.kernels_chain import bytes_within, seconds_of

__all__ = ["greedy"]


class Front(NamedTuple):
    """The front of the line that nothing was taken from yet, for every length of it: [n + 1].

    work: seconds of its tensors; tightest: the latest end, less the target, that leaves room for them; soonest: when
    its first tensor is ready. While none of it is ready the front needs no walk.
    """

    work: np.ndarray
    tightest: np.ndarray
    soonest: np.ndarray


class Aim(NamedTuple):
    """target: makespan to meet; least: do not cut off a message shorter than that; work: float64 [n], seconds that
    each tensor is taken to cost while it waits.
    """

    target: float
    least: float
    work: np.ndarray


@numba.njit(cache=True)
def make_front(inst, work):
    n = inst.order.size
    front = Front(np.zeros(n + 1), np.full(n + 1, np.inf), np.full(n + 1, np.inf))
    for t in range(n):
        front.work[t + 1] = front.work[t] + work[t]
        front.tightest[t + 1] = min(front.tightest[t], -inst.tensors[t]["tail"] - front.work[t + 1])
        front.soonest[t + 1] = min(front.soonest[t], inst.tensors[t]["ready"])
    return front


@numba.njit(cache=True)
def startups(inst):
    """The shortest message of each link, seconds."""
    out = np.full(inst.links, np.inf)
    for row in range(inst.curves.rows.size):
        if inst.curves.rows[row]["slope"] >= 0.0:
            k = row % inst.links
            out[k] = min(out[k], inst.curves.corners[inst.curves.rows[row]["first"]]["seconds"])
    return out


@numba.njit(cache=True)
def next_place(skip, t):
    """The next place at or after t with bytes left, by path halving."""
    while skip[t] != t:
        skip[t] = skip[skip[t]]
        t = skip[t]
    return t


@numba.njit(cache=True)
def shortest_piece(inst, aim, row, left):
    """Bytes of the shortest message worth sending, of ``left``."""
    return min(left, max(1.0, bytes_within(inst.curves, row, aim.least)))


@numba.njit(cache=True)
def find_head(inst, aim, left, skip, k, now, begin, before, limit, shortest):
    """(head, latest end, work passed over): the first tensor, from place ``begin`` on, that link k can send now.

    before: work passed over so far; limit: the latest end that leaves room for it. head is -1 where there is none.
    """
    n = inst.order.size
    t = next_place(skip, begin)
    while t < n and limit >= now + shortest:
        row = inst.tensors[t]["axes"] * inst.links + k
        if inst.tensors[t]["ready"] <= now and inst.curves.rows[row]["slope"] >= 0.0:
            end = now + seconds_of(inst.curves, row, shortest_piece(inst, aim, row, left[t]))
            if end <= min(limit, aim.target - inst.tensors[t]["tail"]) + 1e-15:
                return t, min(limit, aim.target - inst.tensors[t]["tail"]), before
        before += aim.work[t] * left[t] / inst.tensors[t]["nbytes"]
        limit = min(limit, aim.target - inst.tensors[t]["tail"] - before)
        t = next_place(skip, t + 1)
    return -1, limit, before


@numba.njit(cache=True)
def bytes_to_take(inst, aim, row, left, room, size):
    """Bytes of a tensor of which ``left`` are left that join a message of ``size`` with ``room`` more; 0: none."""
    take = min(left, np.floor(room))
    if take <= 0.0:
        if size > 0.0:
            return 0.0
        take = min(left, max(1.0, np.floor(bytes_within(inst.curves, row, aim.least))))
    sliver = left - take > 0.0 and size > 0.0 and take < left - take
    if sliver and seconds_of(inst.curves, row, take) < 2.0 * aim.least:
        return 0.0  # cut from the front of a tensor it would cost the rest a startup of its own
    return take


@numba.njit(cache=True)
def fill(inst, aim, left, skip, k, now, head, latest, before, piece_at, piece_bytes):
    """(tensors finished, bytes): the largest message that starts now with ``head`` and ends by ``latest``.

    Its pieces are appended; each tensor passed over, and all passed over before (``before``), must still be in time.
    """
    n = inst.order.size
    row = inst.tensors[head]["axes"] * inst.links + k
    finished, size, skipped = 0, 0.0, 0.0
    t = next_place(skip, head)
    while t < n:
        if inst.tensors[t]["ready"] > now or inst.tensors[t]["group"] != inst.tensors[head]["group"]:
            skipped += aim.work[t] * left[t] / inst.tensors[t]["nbytes"]
            latest = min(latest, aim.target - inst.tensors[t]["tail"] - skipped - before)
            if now + seconds_of(inst.curves, row, size) > latest:
                break
        else:
            room = bytes_within(inst.curves, row, latest - now) - size
            take = bytes_to_take(inst, aim, row, left[t], room, size)
            if take <= 0.0:
                break
            piece_at.append(t)
            piece_bytes.append(take)
            size += take
            left[t] -= take
            if left[t] > 0.0:
                break
            finished += 1
            skip[t] = t + 1
        t = next_place(skip, t + 1)
    return finished, size


@numba.njit(cache=True)
def first_free(free, alive):
    """The link that is free first; -1 where none is alive."""
    k = -1
    for j in range(free.size):
        if alive[j] and (k < 0 or free[j] < free[k]):
            k = j
    return k


@numba.njit(cache=True)
def greedy(inst, target, reserve, least, from_s):
    """(message, place, bytes) per piece and (link) per message; arguments as `greedy.construct` has them."""
    n = inst.order.size
    aim = Aim(target, least, inst.tensors["fluid"] * (1.0 + reserve))
    front = make_front(inst, aim.work)
    shortest = startups(inst)
    releases = np.sort(inst.tensors["ready"])
    left = inst.tensors["nbytes"].copy()
    skip = np.arange(n + 1)
    free = from_s.copy()
    alive = np.ones(inst.links, np.bool_)
    piece_msg, piece_at, msg_link = [0 for _ in range(0)], [0 for _ in range(0)], [0 for _ in range(0)]
    piece_bytes = [0.0 for _ in range(0)]
    sent, length = 0, n
    while sent < n and len(msg_link) <= min(2 * n, 256) + 64:  # beyond: crumbs, the target is out of reach
        k = first_free(free, alive)
        if k < 0:
            break  # nobody can meet the target
        now = free[k]
        while length > 0 and front.soonest[length] <= now:
            length -= 1  # times only grow, so the front only shrinks
        head, latest, before = find_head(
            inst,
            aim,
            left,
            skip,
            k,
            now,
            length,
            front.work[length],
            target + front.tightest[length],
            shortest[k],
        )
        if head < 0:
            following = np.searchsorted(releases, now, side="right")
            if following < n:
                free[k] = releases[following]
            else:
                alive[k] = False  # nothing here in time: leave the rest to the other links
            continue
        finished, size = fill(inst, aim, left, skip, k, now, head, latest, before, piece_at, piece_bytes)
        sent += finished
        while len(piece_msg) < len(piece_at):
            piece_msg.append(len(msg_link))
        msg_link.append(k)
        free[k] = now + seconds_of(inst.curves, inst.tensors[head]["axes"] * inst.links + k, size)
    if sent < n:
        msg_link = [0 for _ in range(0)]
    return (
        np.array(piece_msg, np.int64),
        np.array(piece_at, np.int64),
        np.array(piece_bytes, np.float64),
        np.array(msg_link, np.int64),
    )
