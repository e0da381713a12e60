"""The kernels compiled: each is the twin of the function of the same name in kernels_numpy.

They release the GIL and use no numba threading layer (the default one kills forked children);
rows are dealt to ordinary threads by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numba
import numpy as np

__all__ = ["min_plus", "row_classes", "segment_min"]

_THREADED_WORK = 30_000_000
_C_BLOCK = 64
_Q_BLOCK = 512


def jit(signature: str) -> Callable[[Any], Any]:
    """njit with a cache on disk, or without one where no folder is writable."""

    def wrap(f: Any) -> Any:
        try:
            return numba.njit(signature, cache=True, nogil=True)(f)
        except RuntimeError:  # "cannot cache function": a read-only install without a home
            return numba.njit(signature, nogil=True)(f)

    return wrap


@jit("void(float64[:,:,::1], float64[:,:,::1], float64[:,:,::1], int64, int64, int64)")
def _min_plus_rows(left, right, out, lo, hi, unused):  # type: ignore[no-untyped-def]
    # Rows lo … hi of out seen as [X * P, Q]. Blocks of right stay in cache while rows pass by;
    # four values of c at a time, so that out is loaded and stored once per four operations.
    c_all, _, p_all = left.shape
    q_all = right.shape[2]
    for r in range(lo, hi):
        for q in range(q_all):
            out[r // p_all, r % p_all, q] = np.inf
    for c0 in range(0, c_all, _C_BLOCK):
        c1 = min(c0 + _C_BLOCK, c_all)
        for q0 in range(0, q_all, _Q_BLOCK):
            q1 = min(q0 + _Q_BLOCK, q_all)
            for r in range(lo, hi):
                x = r // p_all
                p = r - x * p_all
                o = out[x, p, q0:q1]
                c = c0
                while c + 4 <= c1:
                    a0 = left[c, x, p]
                    a1 = left[c + 1, x, p]
                    a2 = left[c + 2, x, p]
                    a3 = left[c + 3, x, p]
                    b0 = right[c, x, q0:q1]
                    b1 = right[c + 1, x, q0:q1]
                    b2 = right[c + 2, x, q0:q1]
                    b3 = right[c + 3, x, q0:q1]
                    for q in range(q1 - q0):
                        t0 = a0 + b0[q]
                        t1 = a1 + b1[q]
                        t2 = a2 + b2[q]
                        t3 = a3 + b3[q]
                        t0 = t0 if t0 < t1 else t1
                        t2 = t2 if t2 < t3 else t3
                        t0 = t0 if t0 < t2 else t2
                        o[q] = t0 if t0 < o[q] else o[q]
                    c += 4
                while c < c1:
                    a0 = left[c, x, p]
                    b0 = right[c, x, q0:q1]
                    for q in range(q1 - q0):
                        t0 = a0 + b0[q]
                        o[q] = t0 if t0 < o[q] else o[q]
                    c += 1


def min_plus(left: np.ndarray, right: np.ndarray, threads: int = 1) -> np.ndarray:
    """out[x, p, q] = min_c left[c, x, p] + right[c, x, q]; left [C, X, P], right [C, X, Q]."""
    c, x, p = left.shape
    q = right.shape[2]
    out = np.empty((x, p, q))
    rows = x * p
    if threads < 2 or rows < threads or c * rows * q < _THREADED_WORK:
        _min_plus_rows(left, right, out, 0, rows, 0)
        return out
    cuts = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(_min_plus_rows, left, right, out, a, b, 0) for a, b in pairwise(cuts)]
        for job in jobs:
            job.result()
    return out


@jit("void(float64[::1], int32[::1], int32[::1], float64[:,::1], float64[:,::1])")
def _segment_min(base, segment, rows, table, out):  # type: ignore[no-untyped-def]
    out[:] = np.inf
    for k in range(base.shape[0]):
        b = base[k]
        o = out[segment[k]]
        t = table[rows[k]]
        for q in range(t.shape[0]):
            s = b + t[q]
            o[q] = s if s < o[q] else o[q]


def segment_min(
    base: np.ndarray, segment: np.ndarray, segments: int, rows: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """out[s, :] = min over k with segment[k] == s of base[k] + table[rows[k], :]."""
    out = np.empty((segments, table.shape[1]))
    _segment_min(base, segment, rows, table, out)
    return out


@jit("int64(uint64[:,::1], int32[::1], int32[::1])")
def _row_classes(bits, cls, first):  # type: ignore[no-untyped-def]
    rows, cols = bits.shape
    size = 16
    while size < 2 * rows:
        size *= 2
    slots = np.full(size, -1, np.int32)
    count = 0
    for r in range(rows):
        # Four sums at once, for speed; any hash will do, since equality is checked.
        h0 = np.uint64(1469598103934665603)
        h1 = np.uint64(1099511628211)
        for c in range(cols):
            h0 = (h0 ^ bits[r, c]) * np.uint64(1099511628211)
        h1 = h0 ^ (h0 >> np.uint64(29))
        slot = np.int64(h1 & np.uint64(size - 1))
        while True:
            k = slots[slot]
            if k < 0:
                slots[slot] = count
                first[count] = r
                cls[r] = count
                count += 1
                break
            same = True
            f = first[k]
            for c in range(cols):
                if bits[f, c] != bits[r, c]:
                    same = False
                    break
            if same:
                cls[r] = k
                break
            slot = (slot + 1) & (size - 1)
    return count


def row_classes(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equal rows of a [R, C] matrix: (class int32 [R], first row of each class int32 [classes])."""
    bits = np.ascontiguousarray(matrix, dtype=np.float64).view(np.uint64)
    cls = np.empty(matrix.shape[0], np.int32)
    first = np.empty(matrix.shape[0], np.int32)
    count = _row_classes(bits, cls, first)
    return cls, first[:count].copy()
