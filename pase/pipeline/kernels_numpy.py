"""The simulator's loop, wave by wave: to read, and for as long as numba is not worth loading."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

__all__ = ["run"]


def run(
    wave: np.ndarray,
    before: np.ndarray,
    waits: np.ndarray,
    spent: np.ndarray,
    late: np.ndarray,
    begin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(when each action ends, the action that it waited for longest, -1: none); arrays as ``Order`` has them.

    spent: seconds of each action; late: of what it needs, on the way; begin: of its rank's first action.
    """
    end, by = np.zeros(spent.size), np.empty(spent.size, np.int64)
    for a, b in pairwise(wave.tolist()):
        own, other = before[a:b], waits[a:b]
        free = np.where(own >= 0, end[own], begin[a:b])
        there = np.where(other >= 0, end[other] + late[a:b], -np.inf)
        end[a:b] = np.maximum(free, there) + spent[a:b]
        by[a:b] = np.where(there > free, other, own)
    return end, by
