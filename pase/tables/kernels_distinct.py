"""Compiled kernel: equal rows numbered alike, without sorting."""

from __future__ import annotations

import numpy as np

from pase.compiled import jit

__all__ = ["number_rows"]


@jit("int64(uint64[:,::1], int32[::1], int32[::1], int64[::1])")
def number_rows(rows, slots, index, first):
    """Number distinct rows by their first place. Returns how many there are.

    rows: uint64 [R, C]. slots: int32, -1 everywhere, a power of two above R of them: an open hash table.
    index: int32 [R], the number of each row; first: int64 [R], the first place of each number; results.
    """
    mask = slots.size - 1
    many = 0
    for r in range(rows.shape[0]):
        # Any hash will do, since equality is checked. A key's high bits have to reach the low ones.
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
