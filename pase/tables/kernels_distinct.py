"""Compiled kernel that gives equal rows the same number, without sorting."""

from __future__ import annotations

import numpy as np

from pase.compiled import jit

__all__ = ["number_rows"]


@jit("int64(uint64[:,::1], int32[::1], int32[::1], int64[::1])")
def number_rows(rows, slots, index, first):
    """Numbers distinct rows by their first occurrence. Returns how many there are.

    rows: uint64 [R, C]. slots: int32, all -1, an open hash table whose size is a power of two above R.
    index: int32 [R], receives the number of each row. first: int64 [R], receives the first row of each number.
    """
    mask = slots.size - 1
    many = 0
    for r in range(rows.shape[0]):
        # Any hash will do, because equality is checked. The high bits of a key must reach the low ones.
        h = np.uint64(1469598103934665603)
        for c in range(rows.shape[1]):
            h = (h ^ rows[r, c]) * np.uint64(1099511628211)
            h ^= h >> np.uint64(32)
        h *= np.uint64(0x9E3779B97F4A7C15)
        at = np.int64(h >> np.uint64(32)) & mask
        while True:
            k = slots[at]
            if k < 0:
                slots[at] = many
                first[many] = r
                index[r] = many
                many += 1
                break
            same = True
            for c in range(rows.shape[1]):
                if rows[first[k], c] != rows[r, c]:
                    same = False
                    break
            if same:
                index[r] = k
                break
            at = (at + 1) & mask
    return many
