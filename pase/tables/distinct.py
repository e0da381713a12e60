"""Equal whole numbers, numbered: by sorting, and once numba is loaded by a compiled hash table."""

from __future__ import annotations

import sys

import numpy as np

__all__ = ["distinct"]


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first place of each distinct key, int64 [U]; the number of each key's, int32 [N]). The order of the distinct
    keys is any. keys: int64 [N], below 2^62 and not negative.

    >>> first, index = distinct(np.array([7, 3, 7]))
    >>> np.array([7, 3, 7])[first][index].tolist()
    [7, 3, 7]
    """
    return hashed(keys) if "numba" in sys.modules else in_order(keys)


def in_order(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``distinct`` by its definition."""
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    return first, index.reshape(-1).astype(np.int32)


def hashed(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``distinct`` by the kernel."""
    from pase.tables.kernels_distinct import number_keys

    slots = np.full(2 << keys.size.bit_length(), -1, np.int32)
    index, first = np.empty(keys.size, np.int32), np.empty(keys.size, np.int64)
    many = number_keys(np.ascontiguousarray(keys, dtype=np.int64), slots, index, first)
    return first[:many].copy(), index
