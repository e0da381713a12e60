"""Coarsens thousands of tensors to a few hundred places for the local search, and refines the result.

A run of neighbouring tensors that a plan sends uncut in one message becomes a few places. Places are small at both ends
of the run (1, 2, 4, … tensors), because the search moves the run's boundaries. A place becomes ready with its last
tensor and is needed with its first, so a refined plan is at least as good as the coarse one.
"""

from __future__ import annotations

import numpy as np

from pase.schedule.greedy import Instance
from pase.schedule.improve import Pieces

__all__ = ["coarsen", "refine"]


def coarsen(inst: Instance, pieces: Pieces) -> tuple[Instance, Pieces, np.ndarray]:
    """Returns (instance of places, the plan on it, first tensor of each place: int64 [places + 1])."""
    msg, at, nbytes, link = pieces
    n = inst.order.size
    count = np.bincount(at, minlength=n)
    of = np.full(n, -1)
    of[at] = msg
    of = np.where(count == 1, of, -1 - np.arange(n))  # a tensor that is cut gets its own place
    key = np.stack((of, inst.tensors["group"]))
    starts = np.flatnonzero(np.concatenate(([True], (key[:, 1:] != key[:, :-1]).any(0))))
    first: list[int] = []
    for a, b in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        step, lo, hi, ends = 1, a, b, []
        while hi - lo > 2 * step:
            first.append(lo)
            ends.append(hi - step)
            lo, hi, step = lo + step, hi - step, 2 * step
        first += [lo, *reversed(ends)]
    at_first = np.asarray(first, np.int64)
    line = inst.tensors[at_first]
    for field in ("ready", "tail"):
        line[field] = np.maximum.reduceat(inst.tensors[field], at_first)
    for field in ("nbytes", "fluid"):
        line[field] = np.add.reduceat(inst.tensors[field], at_first)
    small = inst._replace(order=at_first, tensors=line)
    place = np.searchsorted(at_first, at, side="right") - 1
    merged: dict[tuple[int, int], float] = {}
    for m, p, size in zip(msg.tolist(), place.tolist(), nbytes.tolist(), strict=True):
        merged[m, p] = merged.get((m, p), 0.0) + size
    keys = np.asarray(list(merged), np.int64)
    made = (keys[:, 0].copy(), keys[:, 1].copy(), np.asarray(list(merged.values())), link)
    return small, made, np.concatenate((at_first, [n]))


def refine(inst: Instance, pieces: Pieces, first: np.ndarray) -> Pieces:
    """The plan on tensors. If a place is cut between messages, its first tensors go to the first message."""
    msg, at, nbytes, link = pieces
    rows: list[tuple[int, int, float]] = []
    left = inst.tensors["nbytes"].copy()
    cursor = first[:-1].copy()
    for a in np.lexsort((at, msg)).tolist():
        p, need = int(at[a]), float(nbytes[a])
        while need > 0.5 and cursor[p] < first[p + 1]:
            t = int(cursor[p])
            take = min(need, float(left[t]))
            rows.append((int(msg[a]), t, take))
            left[t] -= take
            need -= take
            if left[t] <= 0.5:
                cursor[p] += 1
    messages, tensors, sizes = zip(*rows, strict=True)
    return np.asarray(messages, np.int64), np.asarray(tensors, np.int64), np.asarray(sizes, float), link
