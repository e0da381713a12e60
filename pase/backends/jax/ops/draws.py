"""Random numbers by position: those of a whole batch that belong to the examples of one micro-batch.

Random bits of threefry are a function of the key and of each element's index in the whole array (JAX's
``jax_threefry_partitionable``, its default). So any part of them can be drawn alone. Of another generator, the whole
batch's numbers are drawn and the micro-batch takes its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.frontends.jax.draws import BatchDraw
from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import threefry

if TYPE_CHECKING:
    from jax import Array

__all__ = ["Examples", "bits_at", "by_position", "counted", "drawn", "places_in_batch"]

_THREEFRY = ("fry", "threefry2x32")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples of a micro-batch: its ``e``-th one is number ``first + step * e`` of the batch."""

    first: Array
    step: int


def by_position(eqn: Eqn, ins: Sequence[Array]) -> bool:
    """Whether an equation draws bits that depend only on one key and on each element's position."""
    import jax

    if eqn.primitive.name != "random_bits":
        return False
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return bool(partitionable) and str(jax.random.key_impl(ins[0])) in _THREEFRY and not ins[0].ndim


def bits_at(eqn: Eqn, key: Array, places: Sequence[Array], shape: Sequence[int]) -> Array:
    """The bits that ``eqn`` draws at these places of an array of the given shape.

    places: for each dim, the indices along it, uint32. The result has a dim for each, of that size.
    """
    import jax

    high, low = threefry(key, counted(places, shape))
    dtype, width = eqn.outvars[0].aval.dtype, eqn.params["bit_width"]
    if width == 64:
        return jax.lax.shift_left(high.astype(dtype), jax.numpy.asarray(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def places_in_batch(places: Sequence[Array], draw: BatchDraw, mine: Examples) -> list[Array]:
    """Indices in a micro-batch's random numbers, dim by dim, as indices in those of the whole batch."""
    out = []
    for x, dim in zip(places, draw.dims, strict=True):
        if dim is not None:
            row, inner = x // dim.inner, x % dim.inner
            example = mine.first.astype(x.dtype) + mine.step * (row % dim.examples)
            x = (row // dim.examples * dim.whole + example) * dim.inner + inner
        out.append(x)
    return out


def drawn(eqn: Eqn, ins: Sequence[Array], draw: BatchDraw, mine: Examples) -> list[Array]:
    """What ``eqn`` draws in a micro-batch: the part of the whole batch's numbers that belongs to its examples."""
    import jax.numpy as jnp

    (out,) = eqn.outvars
    each = [jnp.arange(n, dtype=jnp.uint32) for n in out.aval.shape]
    places = places_in_batch(each, draw, mine)
    if by_position(eqn, ins):
        return [bits_at(eqn, ins[0], places, draw.shape)]
    keys = len(draw.shape) - len(eqn.params["shape"])  # the dims of an array of keys
    x: Array = eqn.primitive.bind(*ins, **{**eqn.params, "shape": draw.shape[keys:]})
    for d, (at, dim) in enumerate(zip(places, draw.dims, strict=True)):
        x = x if dim is None else jnp.take(x, at, axis=d)
    return [x]


def counted(places: Sequence[Array], shape: Sequence[int]) -> tuple[Array, Array]:
    """The row-major index of elements in an array of this shape, as (high, low) 32 bits.

    places: for each dim, the indices of the elements along it, uint32.
    """
    import jax.numpy as jnp

    low = jnp.zeros((1,) * len(shape), jnp.uint32)
    high = low
    for d, (at, n) in enumerate(zip(places, shape, strict=True)):
        at = at.reshape([-1 if k == d else 1 for k in range(len(shape))])
        if math.prod(shape) < 1 << 32:
            low = low * jnp.uint32(n) + at
            continue
        carry, low = _product(low, n)
        low = low + at
        high = high * jnp.uint32(n) + carry + (low < at).astype(jnp.uint32)
    return jnp.broadcast_to(high, low.shape), low


def _product(x: Array, n: int) -> tuple[Array, Array]:
    """x * n for uint32 x and n < 2**32, as (high, low) 32 bits."""
    import jax.numpy as jnp

    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    n_high, n_low = jnp.uint32(n >> 16), jnp.uint32(n & 0xFFFF)
    x_high, x_low = x >> half, x & mask
    lowest = x_low * n_low
    middle = x_high * n_low + (lowest >> half)
    other = x_low * n_high + (middle & mask)
    return x_high * n_high + (middle >> half) + (other >> half), (other << half) | (lowest & mask)
