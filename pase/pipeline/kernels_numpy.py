"""The simulator's loop, wave by wave, in numpy. It is used as long as loading numba is not worth the time."""

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
    """(the end of each action in seconds, the action that it waited for longest or -1). ``Order`` describes the arrays.

    spent: the duration of each action. late: the transfer time of the result that it needs. begin: the seconds before
    the first action of its rank.
    """
    end, by = np.zeros(spent.size), np.empty(spent.size, np.int64)
    for a, b in pairwise(wave.tolist()):
        own, other = before[a:b], waits[a:b]
        free = np.where(own >= 0, end[own], begin[a:b])
        there = np.where(other >= 0, end[other] + late[a:b], -np.inf)
        end[a:b] = np.maximum(free, there) + spent[a:b]
        by[a:b] = np.where(there > free, other, own)
    return end, by
