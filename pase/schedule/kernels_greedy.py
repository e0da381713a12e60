"""The compiled construction that `greedy` describes.

Importing this module imports numba, so import it inside functions only. Kernels are at module level, because numba's
cache cannot find functions that close over another function.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase.compiled import jit
from pase.schedule.kernels_chain import bytes_within, seconds_of

__all__ = ["greedy"]


class Front(NamedTuple):
    """Sums over the first tensors of the line, for every number of them: arrays of [n + 1].

    The front is the first tensors of the line, of which no bytes have been taken yet. While none of them is ready,
    these sums replace a walk over them.

    work: seconds of the tensors.
    tightest: the latest end of a message that leaves time for the tensors, minus the target.
    soonest: when the first of the tensors becomes ready.
    """

    work: np.ndarray
    tightest: np.ndarray
    soonest: np.ndarray


class Aim(NamedTuple):
    """The aim of a construction.

    target: the makespan to meet. least: the shortest message in seconds that may be cut off. work: float64 [n], the
    assumed seconds of each tensor that is still waiting. shortest: float64 [links], seconds of each link's shortest
    message.
    """

    target: float
    least: float
    work: np.ndarray
    shortest: np.ndarray


class Waiting(NamedTuple):
    """What is still to send. left: float64 [n], bytes of each tensor. skip: int64 [n + 1], see `next_place`."""

    left: np.ndarray
    skip: np.ndarray


class Sendable(NamedTuple):
    """The first tensor that a link can send now; -1 if there is none.

    latest: when its message must end. before: the work of the tensors that are passed over.
    """

    head: int
    latest: float
    before: float


@jit()
def make_front(inst, work):
    n = inst.order.size
    front = Front(np.zeros(n + 1), np.full(n + 1, np.inf), np.full(n + 1, np.inf))
    for t in range(n):
        front.work[t + 1] = front.work[t] + work[t]
        front.tightest[t + 1] = min(front.tightest[t], -inst.tensors[t]["tail"] - front.work[t + 1])
        front.soonest[t + 1] = min(front.soonest[t], inst.tensors[t]["ready"])
    return front


@jit()
def startups(inst):
    """Seconds of the shortest message of each link."""
    out = np.full(inst.links, np.inf)
    for row in range(inst.curves.rows.size):
        if inst.curves.rows[row]["slope"] >= 0.0:
            k = row % inst.links
            out[k] = min(out[k], inst.curves.corners[inst.curves.rows[row]["first"]]["seconds"])
    return out


@jit()
def next_place(skip, t):
    """The first place at or after t that has bytes left, found with path halving."""
    while skip[t] != t:
        skip[t] = skip[skip[t]]
        t = skip[t]
    return t


@jit()
def shortest_piece(inst, aim, row, left):
    """Bytes of the shortest message that is worth sending, at most ``left``."""
    return min(left, max(1.0, bytes_within(inst.curves, row, aim.least)))


@jit()
def find_head(inst, aim, waiting, k, now, begin, before, limit):
    """Find the first tensor, from place ``begin`` on, that link k can send now. before: the work passed over so far.
    limit: the latest end that leaves time for this work."""
    n, left, skip = inst.order.size, waiting.left, waiting.skip
    t = next_place(skip, begin)
    while t < n and limit >= now + aim.shortest[k]:
        row = inst.tensors[t]["axes"] * inst.links + k
        if inst.tensors[t]["ready"] <= now and inst.curves.rows[row]["slope"] >= 0.0:
            end = now + seconds_of(inst.curves, row, shortest_piece(inst, aim, row, left[t]))
            if end <= min(limit, aim.target - inst.tensors[t]["tail"]) + 1e-15:
                return Sendable(t, min(limit, aim.target - inst.tensors[t]["tail"]), before)
        before += aim.work[t] * left[t] / inst.tensors[t]["nbytes"]
        limit = min(limit, aim.target - inst.tensors[t]["tail"] - before)
        t = next_place(skip, t + 1)
    return Sendable(-1, limit, before)


@jit()
def bytes_to_take(inst, aim, row, left, room, size):
    """Bytes of a tensor that join a message; 0 for none.

    left: remaining bytes of the tensor. size: bytes of the message so far. room: bytes that it may still take.
    """
    take = min(left, np.floor(room))
    if take <= 0.0:
        if size > 0.0:
            return 0.0
        take = min(left, max(1.0, np.floor(bytes_within(inst.curves, row, aim.least))))
    sliver = left - take > 0.0 and size > 0.0 and take < left - take
    if sliver and seconds_of(inst.curves, row, take) < 2.0 * aim.least:
        return 0.0  # the rest of the tensor would need a startup of its own
    return take


@jit()
def fill(inst, aim, waiting, k, now, found, piece_at, piece_bytes):
    """Make the largest message of link k that starts now with what was found. Returns (tensors finished, bytes).

    The message's pieces are appended to piece_at and piece_bytes. All tensors that are passed over must still be in
    time.
    """
    n, left, skip = inst.order.size, waiting.left, waiting.skip
    head, latest, before = found
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


@jit()
def first_free(free, alive):
    """The link that becomes free first; -1 if no link is alive."""
    k = -1
    for j in range(free.size):
        if alive[j] and (k < 0 or free[j] < free[k]):
            k = j
    return k


@jit()
def greedy(inst, target, reserve, least, from_s):
    """Returns (message, place, bytes) per piece and (link) per message. The arguments are those of
    `greedy.construct`."""
    n = inst.order.size
    aim = Aim(target, least, inst.tensors["fluid"] * (1.0 + reserve), startups(inst))
    front = make_front(inst, aim.work)
    releases = np.sort(inst.tensors["ready"])
    waiting = Waiting(inst.tensors["nbytes"].copy(), np.arange(n + 1))
    free = from_s.copy()
    alive = np.ones(inst.links, np.bool_)
    piece_msg, piece_at, msg_link = [0 for _ in range(0)], [0 for _ in range(0)], [0 for _ in range(0)]
    piece_bytes = [0.0 for _ in range(0)]
    sent, length = 0, n
    while (
        sent < n and len(msg_link) <= min(2 * n, 256) + 64
    ):  # so many messages mean that the target cannot be met
        k = first_free(free, alive)
        if k < 0:
            break  # no link can meet the target
        now = free[k]
        while length > 0 and front.soonest[length] <= now:
            length -= 1  # time only increases, so the front only shrinks
        limit = target + front.tightest[length]
        found = find_head(inst, aim, waiting, k, now, length, front.work[length], limit)
        if found.head < 0:
            following = np.searchsorted(releases, now, side="right")
            if following < n:
                free[k] = releases[following]
            else:
                alive[k] = False  # this link can send nothing in time; the other links take the rest
            continue
        finished, size = fill(inst, aim, waiting, k, now, found, piece_at, piece_bytes)
        sent += finished
        while len(piece_msg) < len(piece_at):
            piece_msg.append(len(msg_link))
        msg_link.append(k)
        free[k] = now + seconds_of(inst.curves, inst.tensors[found.head]["axes"] * inst.links + k, size)
    if sent < n:
        msg_link = [0 for _ in range(0)]
    return (
        np.array(piece_msg, np.int64),
        np.array(piece_at, np.int64),
        np.array(piece_bytes, np.float64),
        np.array(msg_link, np.int64),
    )
