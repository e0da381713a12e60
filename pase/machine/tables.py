"""Measured tables: their validity, and interpolation. Seconds are linear in bytes, and in the extents of products.

A single line of latency + bandwidth is 31-50% off below 32 MB on measured NCCL tables. A line between two neighbouring
points is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pase.machine.types import AttentionCurve, Curve, MatmulTable

__all__ = ["check_attention", "check_curve", "check_matmul", "curve_s", "matmul_flops_per_s"]

_MATMUL_SLACK = 0.10


def _falls(values: Sequence[float]) -> int | None:
    return next((i for i in range(1, len(values)) if values[i] <= values[i - 1]), None)


def check_curve(curve: Curve) -> str | None:
    """What is wrong with a curve, phrased to follow its place in a file; None if nothing is."""
    if len(curve.nbytes) != len(curve.seconds) or len(curve.nbytes) < 2:
        return (
            f"needs as many seconds as nbytes, two or more; got {len(curve.seconds)} and {len(curve.nbytes)}"
        )
    if min(curve.nbytes) <= 0 or min(curve.seconds) <= 0:
        return "must have nbytes and seconds above 0"
    i = _falls(curve.nbytes)
    if i is not None:
        return f"is not monotone: nbytes {curve.nbytes[i]:g} follows {curve.nbytes[i - 1]:g}"
    for a, b, at in zip(curve.seconds, curve.seconds[1:], curve.nbytes[1:], strict=False):
        if b < a:
            return (
                f"is not monotone: {b:g} s at {at:g} bytes, less than {a:g} s for fewer bytes; measure again"
            )
    return None


def check_attention(curve: AttentionCurve) -> str | None:
    """What is wrong with the curve of a fused kernel, in the form of ``check_curve``."""
    if len(curve.keys) != len(curve.efficiency) or not curve.keys:
        return f"needs as many efficiencies as keys, one or more; got {len(curve.efficiency)} and {len(curve.keys)}"
    if not all(0 < e <= 1 for e in curve.efficiency):
        return "must have efficiencies above 0 and up to 1"
    i = _falls(curve.keys)
    return None if i is None else f"is not monotone: keys {curve.keys[i]} follows {curve.keys[i - 1]}"


def check_matmul(table: MatmulTable) -> str | None:
    """What is wrong with a matmul table. More work may not take over 10% less time."""
    for name, extents in (("m", table.m), ("n", table.n), ("k", table.k)):
        if not extents:
            return f"needs at least one extent in {name}"
        i = _falls(extents)
        if i is not None:
            return f"is not monotone: {name} = {extents[i]} follows {extents[i - 1]}"
    shape = (len(table.m), len(table.n), len(table.k))
    if len(table.flops_per_s) != math.prod(shape):
        return (
            f"needs {shape[0]} x {shape[1]} x {shape[2]} flops_per_s (m, n, k), got {len(table.flops_per_s)}"
        )
    if min(table.flops_per_s) <= 0:
        return "must have flops_per_s above 0"
    work = np.multiply.outer(np.multiply.outer(table.m, table.n), table.k).astype(float)
    seconds = work / np.reshape(table.flops_per_s, shape)
    for axis, name in enumerate("mnk"):
        worst = np.diff(np.log(seconds), axis=axis)
        if worst.size and worst.min() < math.log1p(-_MATMUL_SLACK):
            at = np.unravel_index(int(worst.argmin()), worst.shape)
            m, n, k = table.m[at[0]], table.n[at[1]], table.k[at[2]]
            return (
                f"is not monotone: beyond m, n, k = {m}, {n}, {k} a larger {name} takes less time; "
                f"measure again"
            )
    return None


def curve_s(curve: Curve, nbytes: np.ndarray) -> np.ndarray:
    """The seconds for each size. They increase weakly. 0 bytes take 0 s.

    There is a startup and a rate between two points. Below the first point, its time is used; above the last point, its
    rate.

    >>> c = Curve(nbytes=(1e3, 1e5, 1e7), seconds=(1e-5, 1e-5, 1e-3))
    >>> [float(round(t, 8)) for t in curve_s(c, np.array([0, 1, 1e6, 1e8]))]
    [0.0, 1e-05, 0.0001, 0.01]
    """
    n = np.asarray(nbytes, dtype=float)
    out = np.interp(n, curve.nbytes, curve.seconds) * np.maximum(n / curve.nbytes[-1], 1.0)
    return np.where(n > 0, out, 0.0)


def matmul_flops_per_s(table: MatmulTable, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The rate for each (m, n, k). Outside the grid, the rate at its edge is used.

    Between the grid's points, *seconds* are linear in each extent, because a product's multiply-adds, operands and
    result
    are products of extents: the launch, the traffic and the arithmetic each are linear in m, in n and in k.
    """
    shape = (len(table.m), len(table.n), len(table.k))
    work = np.multiply.outer(np.multiply.outer(table.m, table.n), table.k).astype(float)
    grid = work / np.reshape(table.flops_per_s, shape)
    seconds = np.zeros(np.broadcast_shapes(m.shape, n.shape, k.shape))
    corners: list[list[tuple[np.ndarray, np.ndarray]]] = []
    inside = []
    for extents, want in ((table.m, m), (table.n, n), (table.k, k)):
        position = np.interp(np.asarray(want, dtype=float), extents, np.arange(len(extents)))
        low = np.floor(position).astype(int)
        high = np.minimum(low + 1, len(extents) - 1)
        part = position - low
        corners.append([(low, 1 - part), (high, part)])
        inside.append(np.clip(want, extents[0], extents[-1]))
    for im, wm in corners[0]:
        for in_, wn in corners[1]:
            for ik, wk in corners[2]:
                seconds = seconds + grid[im, in_, ik] * wm * wn * wk
    rate: np.ndarray = inside[0] * inside[1] * inside[2] / seconds
    return rate
