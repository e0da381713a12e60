"""Padding of arrays that are stored in tiles.

On a TPU, an array lies in memory in tiles of 8 rows by 128 lanes, and its extents along both are rounded up. The
padding is moved and multiplied like the rest.

The compiler chooses which two dims lie along rows and lanes (XLA for TPU: those with the least padding). A head of 64
values would fill half of the lanes, so queries of 197 tokens lie with the tokens along the lanes, 197 in 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["padding", "rounded"]


def rounded(extent: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    """The factor by which an extent grows when it is rounded up to a multiple of ``step``."""
    extent = np.maximum(np.asarray(extent, dtype=float), 1.0)
    return np.ceil(extent / step) * step / extent


def padding(extents: Sequence[np.ndarray], tile: tuple[int, ...]) -> np.ndarray:
    """The number of elements that an array occupies per element that it holds, at least 1.

    extents: per dim, the local extents under each config, float [configs]. tile: (rows, lanes). One-dimensional arrays
    are dense. Arrays with few rows use a lower tile (XLA's T(4,128), T(2,128)).

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
