"""The time of fused attention on a GPU whose file has ``[device.attention]``.

A kernel divides the scores into squares of 64 x 64. A compute unit takes 128 queries of one head and goes through
all of their keys; units that have no queries left wait. Thus the time has

- waves of 128 queries over the units, and half a wave more, since the last one is rarely full and a causal mask leaves
  uneven parts;
- a square's products, at the kernel's own rate, and its exponentials, which take the same time whatever the width of a
  head: heads of 64 run at a lower rate than heads of 128;
- the begin and the end of a unit's queries, in which it multiplies nothing;
- the way of queries, keys, values and result through memory, as for products;
- the launch.

Attention of float32 that keeps all bits runs at the kernel's own rate, too (``Device.peak_of``).

A single token's queries (decode) fill 16 rows, and kernels for them divide the keys among units, so there are no waves:
the keys' and values' way through memory decides. ``python -m bench kernels`` compares with public tables.
"""

from __future__ import annotations

import numpy as np

from pase.machine import AttentionCurve, Device

__all__ = ["SQUARE", "attention_s", "rate_at_width"]

SQUARE = 64
"""Rows and columns of the scores that a kernel computes whole, also where a mask hides a part of them."""

_QUERIES = 128
_WIDTH = 128
_FEW_QUERIES = 16
"""Rows of the smallest product of a tensor core (mma.m16n8k16)."""


def attention_s(
    device: Device,
    kernel: AttentionCurve,
    dtype: str,
    flops: np.ndarray,
    nbytes: np.ndarray,
    extents: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
    """Seconds of attention, the launch included.

    flops: of all heads and sequences, without what a mask hides.
    extents: queries, keys, and the width of a head.
    """
    queries, keys, width = (np.maximum(x, 1.0) for x in extents)
    units = max(device.compute_units, 1)
    deep = np.ceil(keys / SQUARE) * SQUARE
    all_keys_s = (
        4.0 * _QUERIES * _WIDTH * deep * units / (device.peak_of("attention", dtype) * kernel.at(keys))
    )
    all_keys_s = all_keys_s * _of_width(width, kernel.softmax)
    heads = flops / (4.0 * queries * keys * width)
    waves = heads * np.ceil(queries / SQUARE) * SQUARE / _QUERIES / units
    if device.compute_units:
        waves = np.maximum(waves + 0.5, 1.0)
    few = heads * _FEW_QUERIES / _QUERIES / units
    working = waves * kernel.wave_s + np.where(queries <= _FEW_QUERIES, few, waves) * all_keys_s
    moving = nbytes / device.moved_bytes_per_s
    return np.asarray(device.launch_s + np.cbrt(working**3 + moving**3))


_WIDE_BACKWARD = 0.85
"""The rate of backward at heads wider than 128, relative to that at 128: cuDNN 9.22 with heads of 192 and 128 (latent
attention) on GB200 and GB300 reaches 0.82 to 0.89 of it, while forward reaches 0.94 to 1.07, with heads of 256, too
(NVIDIA/cudnn-frontend@3929da2, benchmark/sdpa_benchmark_training/results). Sums that are kept in registers and shared
memory leave less room for operands."""


def rate_at_width(device: Device, width: float, backward: bool) -> float:
    """The rate of a kernel at heads of this width, relative to its rate at 128: narrow heads have as many exponentials
    beside fewer products. Backward computes the exponentials once more, beside five products in place of two."""
    if width > _WIDTH:
        return _WIDE_BACKWARD if backward else 1.0
    softmax = 0.0 if device.attention is None else device.attention.softmax
    return width / _WIDTH / float(_of_width(width, softmax / 2.5 if backward else softmax))


def _of_width(width: np.ndarray | float, softmax: float) -> np.ndarray:
    """The time of a square at heads of this width, relative to heads of 128."""
    return np.asarray((width / _WIDTH + softmax) / (1 + softmax))
