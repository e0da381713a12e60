"""The rising table nearest to a measured one: more work never takes less time."""

from __future__ import annotations

import numpy as np

__all__ = ["smoothed"]


def smoothed(seconds: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Seconds that rise weakly along every axis; the largest relative change; where (flat index).

    The geometric mean of the smallest rising table above and the largest one below, so a fall of x between
    two points moves each by about x/2. What rises already stays as it is.

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
