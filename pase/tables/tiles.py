"""Arrays in tiles: on a TPU an array lies in memory in tiles of 8 rows by 128 lanes, and its extents along both are
rounded up. What is rounded up is moved, and multiplied, like the rest.

Which two dims lie along rows and lanes is the compiler's choice (XLA for TPU: whichever pads least). A head of 64
values would fill half of the lanes, so queries of 197 tokens lie with the tokens along the lanes, 197 in 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["padding", "rounded"]


def rounded(extent: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    """How much larger an extent is once rounded up to a multiple of ``step``, as a factor."""
    extent = np.maximum(np.asarray(extent, dtype=float), 1.0)
    return np.ceil(extent / step) * step / extent


def padding(extents: Sequence[np.ndarray], tile: tuple[int, ...]) -> np.ndarray:
    """Elements that an array takes over elements that it has, at least 1.

    extents: per dim, the local extents under each config, float [configs]; tile: rows, lanes. Arrays of one dim lie
    densely. Few rows take a lower tile (XLA's T(4,128), T(2,128)).

    >>> padding([np.array([32.0]), np.array([197.0]), np.array([16.0]), np.array([64.0])], (8, 128)).round(3).tolist()
    [1.299]
    >>> padding([np.array([4.0]), np.array([1024.0]), np.array([12.0]), np.array([64.0])], (8, 128)).tolist()
    [1.0]
    """
    if len(extents) < 2:
        return np.ones(1)
    rows, lanes = tile
    along = [rounded(e, lanes) for e in extents]
    across = []
    for e in extents:
        lowest = 2.0 ** np.ceil(np.log2(np.maximum(e, 1.0)))
        across.append(rounded(e, np.minimum(rows, lowest)))
    pairs = (a * b for j, a in enumerate(along) for i, b in enumerate(across) if i != j)
    best = next(pairs)
    for p in pairs:
        best = np.minimum(best, p)
    return np.asarray(best)
