"""The kernels in numpy: the reference for the compiled kernels, and used for small problems."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["min_plus", "row_classes", "segment_min"]

_BLOCK = 1 << 18


def min_plus(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """out[x, p, q] = min_c left[c, x, p] + right[c, x, q], for left [C, X, P] and right [C, X, Q]."""
    c, x, p = left.shape
    q = right.shape[2]
    out = np.empty((x, p, q))
    rows = max(1, _BLOCK // max(1, c * q))
    for i in range(x):
        for j in range(0, p, rows):
            block = left[:, i, j : j + rows, None] + right[:, i, None, :]
            block.min(axis=0, out=out[i, j : j + rows])
    return out


def segment_min(
    base: np.ndarray, segment: np.ndarray, segments: int, parts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """out[s, :] = min over k with segment[k] == s of base[k] + the sum of table[rows[k], :] over the parts.

    base: float64 [K]. segment: int32 [K]; every segment must occur. parts: (rows int32 [K], table float64 [R, Q]).
    """
    order = np.argsort(segment, kind="stable")
    starts = np.searchsorted(segment[order], np.arange(segments))
    added = sum(table[rows[order]] for rows, table in parts)
    return np.minimum.reduceat(base[order, None] + added, starts, axis=0)


def row_classes(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds equal rows of a [R, C] matrix: (class int32 [R], first row of each class int32 [classes])."""
    classes: dict[bytes, int] = {}
    cls = np.empty(matrix.shape[0], np.int32)
    first: list[int] = []
    for r in range(matrix.shape[0]):
        c = classes.setdefault(matrix[r].tobytes(), len(classes))
        if c == len(first):
            first.append(r)
        cls[r] = c
    return cls, np.array(first, np.int32)
