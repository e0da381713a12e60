"""Numbers equal integer keys: by sorting or, once numba is loaded, with a compiled hash table."""

from __future__ import annotations

import sys

import numpy as np

__all__ = ["distinct", "numbered"]


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (index of the first occurrence of each distinct key, int64 [U]; number of each key, int32 [N]).

    The distinct keys may be in any order. keys: int64 [N], not negative and below 2^62.

    >>> first, index = distinct(np.array([7, 3, 7]))
    >>> np.array([7, 3, 7])[first][index].tolist()
    [7, 3, 7]
    """
    return hashed(keys) if "numba" in sys.modules else in_order(keys)


def in_order(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reference implementation of ``distinct``, by sorting."""
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    return first, index.reshape(-1).astype(np.int32)


def hashed(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``distinct`` with the compiled kernel."""
    return numbered(np.ascontiguousarray(keys, dtype=np.int64).view(np.uint64).reshape(-1, 1))


def numbered(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers distinct rows by their first occurrence, with the compiled kernel; returns as ``distinct``.

    rows: uint64 [R, C].
    """
    from pase.tables.kernels_distinct import number_rows

    many = len(rows)
    slots = np.full(2 << many.bit_length(), -1, np.int32)
    index, first = np.empty(many, np.int32), np.empty(many, np.int64)
    count = number_rows(rows, slots, index, first)
    return first[:count].copy(), index
