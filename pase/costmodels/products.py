"""The time of matrix products on a GPU whose file has ``[device.products]``.

A library has hundreds of product kernels and chooses among them. What they have in common suffices: the result is
divided into tiles, a compute unit takes one after the other, and the contraction proceeds by 128 bytes of each
operand's row. Thus the time has

- whole waves of tiles over the units: 133 tiles take two waves of 132 units;
- a tile's arithmetic, or, if that takes longer, the way of its operands to the unit: a small tile reads as many bytes
  for fewer multiplications, a large one wastes more at the edges and in the last wave. The fastest tile is taken;
- the write of a tile's result, during which its unit multiplies nothing;
- for products of few tiles, a contraction that is divided among units, whose float32 partial sums are written, read
  and added up;
- the operands' and the result's way through memory, which overlaps with the arithmetic, but not perfectly: the time of
  both together is the cube root of the sum of their cubes (1.26 times either if both take equally long);
- a start;
- throttling: at its power limit, a card multiplies more slowly.

Products of float32 that keep all bits of their factors run on the vector units of NVIDIA's cards. There a thread holds
a part of 8 x 8, so a unit has 128 x 128 of the result, four squares, under way at once: it takes the time of three
squares until it multiplies at its rate. These products do not bring a card to its power limit.

Five constants of a card and a rate of each dtype are fitted to a public table of some 20,000 products (the file names
it), and the part that is left at the power limit to the table's longest products or to products that were timed within
a model. A third of the rows is kept back from the fit. ``python -m bench kernels`` compares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase.ir.precision import operand_bytes
from pase.machine import Device, ProductKernels

__all__ = ["product_s"]


class _Division(NamedTuple):
    """How a result may be divided.

    tiles: rows and columns of a unit's part; the fastest is taken.
    splits: in how many parts a contraction may be.
    """

    tiles: tuple[tuple[int, int], ...]
    splits: tuple[int, ...]


_SPLITS = (1, 2, 4, 8, 16, 32)
_TILES = _Division(((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128)), _SPLITS)
"""Further sizes fit the tables no better."""
_SQUARES = _Division(((64, 64),), _SPLITS)
"""For cards whose units never wait for operands: a larger tile would only waste more."""
_TILE_OF_TF32 = _Division(((64, 256),), (1, 2, 4))
"""Kernels of TF32 have larger tiles and hardly divide a contraction. On an H100, this prices 42 products with a median
error of 13%, where ``_SQUARES`` does with 28%, and with 40 to 70% those of few tiles and a long contraction, as
weights' gradients are. Convolutions do divide theirs. Other cards are assumed to do as an H100 does."""

ROW_BYTES = 128
"""The bytes of an operand's row that a unit multiplies at a time: the widest swizzle of shared memory."""

LEAST_OUTPUT_BYTES = 2
"""Products of eight and four bits write their results in 16."""


THROTTLED_AFTER_S = 2e-3
"""A benchmark repeats a product some tens of times, and a card's limiter reacts within about a tenth of a second. A
product that takes this long is half throttled in a benchmark."""

FILL_SQUARES = 3
"""The squares in whose time a unit without matrix units begins. The tables of two A100 fit best with two, an H100's
with four."""

_OVERLAP = 3.0


def product_s(
    device: Device,
    rate: float,
    dtype: str,
    flops: np.ndarray,
    nbytes: np.ndarray,
    mnk: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    *,
    window: bool,
    steady: bool,
) -> np.ndarray:
    """Seconds of products on a device with ``products``, the start included.

    rate: FLOP/s of the whole device before it throttles.
    dtype: the name of the rate.
    mnk: extents of one product of a batch of equal ones; without them, the units are evenly loaded.
    window: whether it is a convolution, whose window is contracted, too.
    steady: whether the device is at its power limit, as it is during a training step. Otherwise only products that take
        long by themselves throttle, as in a benchmark of one product.
    """
    kernels = device.products
    assert kernels is not None  # the caller chose this for a device that has them
    work = flops / rate
    if mnk is not None:
        work = _units_s(device, kernels, _division(device, dtype, window), rate, dtype, flops, mnk)
    throttled = 1.0 if steady else work / (work + THROTTLED_AFTER_S)
    work = work * (1 + (1 / device.left_at_limit(dtype) - 1) * throttled)
    moving = nbytes / (device.memory_bandwidth_bytes_per_s * kernels.memory)
    return np.asarray(kernels.start_s + np.cbrt(work**_OVERLAP + moving**_OVERLAP))


def _division(device: Device, dtype: str, window: bool) -> _Division:
    if dtype == "float32" and not window:
        return _TILE_OF_TF32
    waits = device.products is not None and device.products.operand_bytes_per_s is not None
    return _TILES if waits and not device.multiplies_on_vector_units(dtype) else _SQUARES


def _units_s(
    device: Device,
    kernels: ProductKernels,
    division: _Division,
    rate: float,
    dtype: str,
    flops: np.ndarray,
    mnk: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
    """Seconds of the units, for the fastest tile and the best division of the contraction: float [shape of mnk].

    Arrays inside are [tiles, splits, *shape].
    """
    m, n, k, flops = np.broadcast_arrays(*(np.maximum(x, 1.0) for x in mnk), flops)
    units = max(device.compute_units, 1)
    batch = flops / (2 * m * n * k)
    itemsize = operand_bytes(dtype)
    filling = FILL_SQUARES if device.multiplies_on_vector_units(dtype) else 0
    deep = ROW_BYTES / itemsize
    one = (1,) * m.ndim
    rows, columns = (np.array(x, dtype=float).reshape(-1, 1, *one) for x in zip(*division.tiles, strict=True))
    split = np.array(division.splits, dtype=float).reshape(1, -1, *one)

    step_s = 2.0 * rows * columns * deep * units / rate
    if kernels.operand_bytes_per_s is not None:
        step_s = np.maximum(step_s, (rows + columns) * ROW_BYTES / kernels.operand_bytes_per_s)
    written = np.minimum(m, rows) * np.minimum(n, columns) * max(itemsize, LEAST_OUTPUT_BYTES)
    tile_s = np.ceil(k / (split * deep)) * step_s + written / kernels.output_bytes_per_s
    waves = filling + np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) * split / units)
    # Four bytes of each partial sum are written, and read again.
    partial_s = 2 * 4 * batch * m * n / (2 * device.memory_bandwidth_bytes_per_s * kernels.memory)
    divided_s = np.where(split > 1, kernels.split_s + split * partial_s, 0.0)
    return np.asarray((waves * tile_s + divided_s).min(axis=(0, 1)))
