"""Runs convolutions and pools on one device: a halo exchange along split dims, then the window over the local rows.

A window that moves along a split dim reads past the border of this device's part. The rows past the border come from
the neighbouring device by ``ppermute``. Past the ends of the whole array, the equation's padding applies.
Differentiation sends the gradients of these rows back the same way, which is the plan's halo exchange of backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.spmd.call import MANUAL_RULES, ManualCall, split_dims
from pase.frontends.jax.versions import evaluate as plain
from pase.local.parts import axes_of

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike

__all__ = ["WINDOWED"]

WINDOWED = (
    "conv_general_dilated",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window_sum",
    "reduce_window",
)
"""Primitives whose operand may be split along a window."""

WindowPadding = list[tuple[int, int]]
"""For each dim that a window moves along, the rows of padding (before, after). Negative numbers leave out rows."""


@MANUAL_RULES.register("conv_general_dilated")
def _conv(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """Batch, channels, groups and spatial dims may be split."""
    p = call.eqn.params
    d = p["dimension_numbers"]
    groups = ins[0].shape[d.lhs_spec[1]] // ins[1].shape[d.rhs_spec[1]]
    x, padding = _with_neighbours(call, ins[0], d.lhs_spec[2:], p["padding"], None)
    changed = p | {"feature_group_count": groups, "padding": tuple(padding)}
    return plain(call.eqn.replace(params=changed), [x, ins[1]], call.info)


@MANUAL_RULES.register(*WINDOWED[1:])
def _pool(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    import jax.numpy as jnp

    p, name = call.eqn.params, call.eqn.primitive.name
    floating = jnp.issubdtype(ins[0].dtype, jnp.inexact)
    ends = jnp.finfo(ins[0].dtype) if floating else jnp.iinfo(ins[0].dtype)
    edge = {
        "reduce_window_max": -jnp.inf if floating else ends.min,
        "reduce_window_min": jnp.inf if floating else ends.max,
        "reduce_window_sum": None,
    }.get(name, ins[-1])
    x, padding = _with_neighbours(call, ins[0], range(ins[0].ndim), p["padding"], edge)
    return plain(call.eqn.replace(params=p | {"padding": tuple(padding)}), [x, *ins[1:]], call.info)


def _with_neighbours(
    call: ManualCall,
    x: Array,
    dims: Sequence[int],
    padding: Sequence[tuple[int, int]],
    edge: ArrayLike | None,
) -> tuple[Array, WindowPadding]:
    """(x with the halo rows that its windows read, the padding that must still be applied).

    edge: the value past the ends of the whole array; None for zeros. Dims are extended one after the other, so that
    corners are included.
    """
    split, left = split_dims(call, [x]), [tuple(pad) for pad in padding]
    for k, dim in enumerate(dims):
        window = call.op.op.reads[0].map.walks[dim].window if dim in split else None
        if window is not None:
            before, behind = window.border
            x = _extended(call, x, dim, max(before, 0), max(behind, 0), edge)
            left[k] = (min(before, 0), min(behind, 0))
    return x, left  # type: ignore[return-value]


def _extended(
    call: ManualCall, x: Array, dim: int, before: int, behind: int, edge: ArrayLike | None
) -> Array:
    """x with the last rows of the previous device along a dim, and the first rows of the next device.

    before, behind: how many rows of each. edge: as in ``_with_neighbours``.
    """
    import jax
    import jax.numpy as jnp

    operand = call.operands[0]
    assert operand is not None  # a literal has no dims
    axes = axes_of(operand.layout, dim, call.mesh)
    ways = math.prod(call.mesh.sizes[call.mesh.names.index(a)] for a in axes)
    at, rows = jax.lax.axis_index(axes), x.shape[dim]

    def from_neighbour(start: int, count: int, by: int) -> Array:
        sent = jax.lax.slice_in_dim(x, start, start + count, axis=dim)
        hops = [(i, i + by) for i in range(ways) if 0 <= i + by < ways]
        received = jax.lax.ppermute(sent, axes, hops)  # zeros where nothing comes
        if edge is None:
            return received
        return jnp.where(at == (0 if by > 0 else ways - 1), jnp.asarray(edge, x.dtype), received)

    parts = [x]
    if before:
        parts.insert(0, from_neighbour(rows - before, before, 1))
    if behind:
        parts.append(from_neighbour(0, behind, -1))
    return jnp.concatenate(parts, axis=dim) if len(parts) > 1 else x
