"""Compiled kernel: equal whole numbers numbered alike, without sorting."""

from __future__ import annotations

from pase.compiled import jit

__all__ = ["number_keys"]


@jit("int64(int64[::1], int32[::1], int32[::1], int64[::1])")
def number_keys(keys, slots, index, first):
    """Number distinct keys by their first place. Returns how many there are.

    keys: int64 [N], below 2^62 and not negative. slots: int32, -1 everywhere, a power of two above N of them: an open
    hash table. index: int32 [N], the number of each key; first: int64 [N], the first place of each number; results.
    """
    mask = slots.size - 1
    many = 0
    for i in range(keys.size):
        key = keys[i]
        # Of three parts, so that no product overflows.
        mixed = (key & 0xFFFFF) * 0x9E3779B1 + (key >> 20 & 0xFFFFF) * 0x85EBCA77 + (key >> 40) * 0xC2B2AE3D
        at = (mixed ^ mixed >> 17 ^ mixed >> 34) & mask
        while True:
            j = slots[at]
            if j < 0:
                slots[at] = many
                first[many] = i
                index[i] = many
                many += 1
                break
            if keys[first[j]] == key:
                index[i] = j
                break
            at = (at + 1) & mask
    return many
