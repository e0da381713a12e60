"""Compiled kernels. Each corresponds to the function of the same name in kernels_numpy.

They release the GIL and use no numba threading layer (the default one kills forked children).
The caller distributes rows over ordinary threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from pase.compiled import jit
from pase.tables.distinct import numbered

__all__ = ["min_plus", "row_classes", "segment_min"]

_THREADED_WORK = 20_000_000
_C_BLOCK = 64
_Q_BLOCK = 512
_SEGMENT_BLOCK = 128


@jit(inline=True)
def _add_to_row(left, right, out, values, x, p, part):
    """Lower row p of out[x], in a part of it, by each of a range of values c."""
    row = out[x, p, part[0] : part[1]]
    for c in range(values[0], values[1]):
        a, b = left[c, x, p], right[c, x, part[0] : part[1]]
        for q in range(b.size):
            t = a + b[q]
            row[q] = t if t < row[q] else row[q]


@jit(inline=True)
def _add_to_four_rows(left, right, out, values, x, p, part):
    """The same for four rows from p on, two values at a time. Returns the first value that is left over.

    Each loaded value of right serves four rows, and rows of out are loaded and stored once per two operations (twice as
    fast as one row by four values).
    """
    start, stop = part
    o0, o1 = out[x, p, start:stop], out[x, p + 1, start:stop]
    o2, o3 = out[x, p + 2, start:stop], out[x, p + 3, start:stop]
    c = values[0]
    while c + 2 <= values[1]:
        a0, a1, a2, a3 = left[c, x, p], left[c, x, p + 1], left[c, x, p + 2], left[c, x, p + 3]
        d0, d1, d2, d3 = (
            left[c + 1, x, p],
            left[c + 1, x, p + 1],
            left[c + 1, x, p + 2],
            left[c + 1, x, p + 3],
        )
        b, e = right[c, x, start:stop], right[c + 1, x, start:stop]
        for q in range(b.size):
            b0, e0 = b[q], e[q]
            t0, t1, t2, t3 = a0 + b0, a1 + b0, a2 + b0, a3 + b0
            u0, u1, u2, u3 = d0 + e0, d1 + e0, d2 + e0, d3 + e0
            t0 = t0 if t0 < u0 else u0
            t1 = t1 if t1 < u1 else u1
            t2 = t2 if t2 < u2 else u2
            t3 = t3 if t3 < u3 else u3
            o0[q] = t0 if t0 < o0[q] else o0[q]
            o1[q] = t1 if t1 < o1[q] else o1[q]
            o2[q] = t2 if t2 < o2[q] else o2[q]
            o3[q] = t3 if t3 < o3[q] else o3[q]
        c += 2
    return c


@jit("void(float64[:,:,::1], float64[:,:,::1], float64[:,:,::1], int64, int64)")
def _min_plus_rows(left, right, out, lo, hi):
    """Rows lo … hi of out, seen as [X * P, Q]. Blocks of right stay in cache while rows are processed."""
    c_all, _, p_all = left.shape
    q_all = right.shape[2]
    for r in range(lo, hi):
        for q in range(q_all):
            out[r // p_all, r % p_all, q] = np.inf
    for c0 in range(0, c_all, _C_BLOCK):
        c1 = min(c0 + _C_BLOCK, c_all)
        for q0 in range(0, q_all, _Q_BLOCK):
            q1 = min(q0 + _Q_BLOCK, q_all)
            r = lo
            while r < hi:
                x = r // p_all
                p = r - x * p_all
                c, rows = c0, 1
                if r + 4 <= hi and p + 4 <= p_all:
                    rows = 4
                    c = _add_to_four_rows(left, right, out, (c0, c1), x, p, (q0, q1))
                for i in range(rows):
                    _add_to_row(left, right, out, (c, c1), x, p + i, (q0, q1))
                r += rows


def _dealt(count: int, threads: int, unit: int, job: Callable[[int, int], None]) -> None:
    """Run ``job(lo, hi)`` over 0 … count, one part per thread. Cuts are at multiples of ``unit``."""
    cuts = [count * i // threads // unit * unit for i in range(threads)] + [count]
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(job, a, b) for a, b in pairwise(cuts)]
        for j in jobs:
            j.result()


def min_plus(left: np.ndarray, right: np.ndarray, threads: int = 1) -> np.ndarray:
    """out[x, p, q] = min_c left[c, x, p] + right[c, x, q], for left [C, X, P] and right [C, X, Q]."""
    c, x, p = left.shape
    q = right.shape[2]
    out = np.empty((x, p, q))
    rows = x * p
    if threads < 2 or rows < 4 * threads or c * rows * q < _THREADED_WORK:
        _min_plus_rows(left, right, out, 0, rows)
    else:
        _dealt(rows, threads, 4, lambda lo, hi: _min_plus_rows(left, right, out, lo, hi))
    return out


_PART = "Tuple((int32[::1], float64[:,::1]))"


@jit(f"void(float64[::1], int32[::1], {_PART}, float64[:,::1], int64, int64)")
def _segment_min(base, segment, part, out, lo, hi):
    # Columns lo … hi, in blocks that stay in cache while configs are processed.
    rows, table = part
    for q0 in range(lo, hi, _SEGMENT_BLOCK):
        q1 = min(q0 + _SEGMENT_BLOCK, hi)
        for s in range(out.shape[0]):
            for q in range(q0, q1):
                out[s, q] = np.inf
        for k in range(base.shape[0]):
            b = base[k]
            o = out[segment[k], q0:q1]
            t = table[rows[k], q0:q1]
            for q in range(q1 - q0):
                s0 = b + t[q]
                o[q] = s0 if s0 < o[q] else o[q]


@jit(f"void(float64[::1], int32[::1], {_PART}, {_PART}, float64[:,::1], int64, int64)")
def _segment_min_2(base, segment, part, another, out, lo, hi):
    rows, table = part
    more, other = another
    for q0 in range(lo, hi, _SEGMENT_BLOCK):
        q1 = min(q0 + _SEGMENT_BLOCK, hi)
        for s in range(out.shape[0]):
            for q in range(q0, q1):
                out[s, q] = np.inf
        for k in range(base.shape[0]):
            b = base[k]
            o = out[segment[k], q0:q1]
            t = table[rows[k], q0:q1]
            u = other[more[k], q0:q1]
            for q in range(q1 - q0):
                s0 = b + (t[q] + u[q])
                o[q] = s0 if s0 < o[q] else o[q]


def segment_min(
    base: np.ndarray,
    segment: np.ndarray,
    segments: int,
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    threads: int = 1,
) -> np.ndarray:
    """out[s, :] = min over k with segment[k] == s of base[k] + the sum of table[rows[k], :] over the parts.

    base: float64 [K]. segment: int32 [K]. parts: one or two (rows int32 [K], table float64 [R, Q]).
    """
    part, *more = parts
    columns = part[1].shape[1]
    out = np.empty((segments, columns))

    def job(lo: int, hi: int) -> None:
        if more:
            _segment_min_2(base, segment, part, more[0], out, lo, hi)
        else:
            _segment_min(base, segment, part, out, lo, hi)

    if threads < 2 or columns < 2 * _SEGMENT_BLOCK or 8 * base.size * columns < _THREADED_WORK:
        job(0, columns)
    else:
        _dealt(columns, threads, _SEGMENT_BLOCK, job)
    return out


def row_classes(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds equal rows of a [R, C] matrix: (class int32 [R], first row of each class int32 [classes])."""
    first, cls = numbered(np.ascontiguousarray(matrix, dtype=np.float64).view(np.uint64))
    return cls, first.astype(np.int32)
