"""Runs convolutions and pools on one device: a halo exchange along split dims, then the window over the local rows.

Differentiation sends the gradients of the halo's rows back the same way, which is the plan's halo exchange of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.spmd.call import MANUAL_RULES, ManualCall, split_dims
from pase.frontends.jax.versions import evaluate as plain
from pase.local.halo import borders_of, widened

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

    edge: the value past the ends of the whole array; None for zeros.
    """
    operand, borders = call.operands[0], borders_of(call.op.op, sorted(split_dims(call, [x])), x.ndim)
    assert operand is not None  # a literal has no dims
    left = [(0, 0) if dim in borders else pad for dim, pad in zip(dims, padding, strict=True)]
    return widened(x, borders, operand.layout, edge, JaxArrays(call.mesh)), left
