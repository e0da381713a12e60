"""Makes one device's part of arrays whose elements depend on their position, such as random bits.

Random bits of threefry are a function of the key and of each element's index in the whole array (JAX's
``jax_threefry_partitionable``, its default). So each device computes the indices of its own elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.spmd.call import ManualCall
from pase.backends.jax.spmd.collectives import JaxArrays
from pase.frontends.jax.versions import threefry
from pase.local.reshard import along
from pase.local.types import LocalResult

if TYPE_CHECKING:
    from jax import Array

__all__ = ["counted", "positions", "random_part"]


def positions(call: ManualCall, result: LocalResult, dim: int) -> Array:
    """The indices of this device's elements along a dim of the whole array, uint32 [local size of the dim]."""
    import jax.numpy as jnp

    every = jnp.arange(result.shape[dim], dtype=jnp.uint32)
    return along(every, dim, result.shape, result.layout, JaxArrays(call.mesh))


def random_part(call: ManualCall, ins: Sequence[Array]) -> Array | None:
    """This device's part of ``random_bits``. None if the bits do not depend on position alone: another generator than
    threefry, or several keys."""
    import jax

    (key,), (result,), params = ins, call.results, call.eqn.params
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    by_place = partitionable and str(jax.random.key_impl(key)) in _THREEFRY
    if result is None or not result.shape or not by_place or key.ndim or params["shape"] != result.shape:
        return None
    places = [positions(call, result, d) for d in range(len(result.shape))]
    high, low = threefry(key, counted(places, result.shape))
    dtype, width = call.eqn.outvars[0].aval.dtype, params["bit_width"]
    if width == 64:
        return jax.lax.shift_left(high.astype(dtype), jax.numpy.asarray(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


_THREEFRY = ("fry", "threefry2x32")


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
