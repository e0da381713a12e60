"""Makes one device's part of arrays whose elements depend on their position, such as random bits.

Each device computes the indices of its own elements in the whole array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.ops.draws import bits_at, by_position, drawn, places_in_batch
from pase.backends.jax.spmd.call import ManualCall, split_dims
from pase.frontends.jax.versions import evaluate as plain
from pase.local.reshard import along, part
from pase.local.types import LocalResult

if TYPE_CHECKING:
    from jax import Array

__all__ = ["generated", "positions"]


def positions(call: ManualCall, result: LocalResult, dim: int) -> Array:
    """The indices of this device's elements along a dim of the whole array, uint32 [local size of the dim]."""
    import jax.numpy as jnp

    every = jnp.arange(result.shape[dim], dtype=jnp.uint32)
    return along(every, dim, result.shape, result.layout, JaxArrays(call.mesh))


def generated(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """Arrays made by position. The device makes only its part, or makes the whole array and takes its part.

    In a micro-batch that has a part of the whole batch's random numbers, these are that part.
    """
    result = call.results[0]
    here = result is not None and result.shape and by_position(call.eqn, ins)
    if result is not None and here and call.eqn.params["shape"] == result.shape:
        shape: Sequence[int] = result.shape
        places = [positions(call, result, d) for d in range(len(shape))]
        if call.draw is not None:
            draw, mine = call.draw
            places, shape = places_in_batch(places, draw, mine), draw.shape
        return [bits_at(call.eqn, ins[0], places, shape)]
    made = plain(call.eqn, ins, call.info) if call.draw is None else drawn(call.eqn, ins, *call.draw)
    # Where a device has a part of the keys, only the dims that each key draws are whole.
    rows = split_dims(call, ins) if ins else set()
    return [
        x if r is None else part(x, r.shape, r.layout.within(lambda d: d not in rows), JaxArrays(call.mesh))
        for x, r in zip(made, call.results, strict=True)
    ]
