"""Smooths a measured table so that more work never takes less time."""

from __future__ import annotations

import numpy as np

__all__ = ["smoothed"]


def smoothed(seconds: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Returns (times that do not decrease along any axis, the largest relative change, its flat index).

    The result is the geometric mean of the smallest non-decreasing table above the measured one and the largest one
    below it. So a decrease by x between two points changes each by about x/2. A non-decreasing table is unchanged.

    >>> smoothed(np.array([1.0, 4.0, 1.0, 8.0]))
    (array([1., 2., 2., 8.]), 1.0, 1)
    """
    above, below = seconds.copy(), seconds.copy()
    for axis in range(seconds.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    best = np.sqrt(above * below)
    change = np.maximum(best / seconds, seconds / best) - 1.0
    at = int(change.argmax())
    return best, float(change.flat[at]), at
