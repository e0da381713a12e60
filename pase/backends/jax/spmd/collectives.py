"""Edges in JAX, inside ``shard_map``, whose gradients return as planned, and what messages send."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays, summed
from pase.local.parts import view
from pase.local.types import Extents, LocalReshardStep
from pase.machine import Mesh

if TYPE_CHECKING:
    from jax import Array

__all__ = ["after", "from_wire", "on_wire", "sent", "there_and_back"]


def there_and_back(
    value: Array,
    gradient_carrier: Array | None,
    there: Callable[[Array], Array],
    back: Callable[[Array], Array] | None,
) -> Array:
    """``there(value)``, with the gradient ``back(incoming gradient)``.

    The gradient goes to ``gradient_carrier`` if there is one, otherwise to ``value``. gradient_carrier: an array in the
    layout in which the gradient arrives, if this is not the layout of the value. back: None if no gradient passes.
    """
    import jax

    if back is None:
        return there(jax.lax.stop_gradient(value))
    if gradient_carrier is None:
        f = jax.custom_vjp(there)
        f.defvjp(lambda x: (there(x), None), lambda _, g: (back(g),))
        return f(value)
    held = jax.lax.stop_gradient(value)
    onto_carrier = jax.custom_vjp(lambda x, _: there(x))
    onto_carrier.defvjp(
        lambda x, _: (there(x), None),
        lambda _, g: (jax.numpy.zeros(held.shape, held.dtype), back(g)),
    )
    return onto_carrier(held, gradient_carrier)


def on_wire(x: Array, step: LocalReshardStep, shape: Extents, mesh: Mesh) -> Array:
    """What an all-reduce, a reduce-scatter or an all-gather sends, [rows, elements].

    A reduce-scatter has a row for each device, the others have one row.
    """
    if step.kind == "reduce_scatter":
        front = JaxArrays(mesh).to_front(x, view(step, shape, mesh))
        return front.reshape(front.shape[0], -1)
    return x.reshape(1, -1)


def sent(rows: Array, step: LocalReshardStep) -> Array:
    """What arrives after sending the rows of ``on_wire``, [rows, elements]: from an all-gather, a row of each device.

    The columns of several reshard steps of one kind over the same axes may be concatenated.
    """
    import jax

    match step.kind:
        case "reduce_scatter":
            return jax.lax.psum_scatter(rows, step.axes, scatter_dimension=0, tiled=False)[None]
        case "all_gather":
            return jax.lax.all_gather(rows, step.axes, axis=0, tiled=True)
        case _:
            return summed(rows, step.axes)


def from_wire(rows: Array, step: LocalReshardStep, shape: Extents, mesh: Mesh) -> Array:
    """The local array after the reshard step, from the rows that ``sent`` returns."""
    if step.kind == "all_gather":
        v = view(step, shape, mesh)
        return JaxArrays(mesh).from_front(rows.reshape(rows.shape[0], *v.seen), v)
    return rows.reshape(step.after.local_shape(shape, mesh))


def after(x: Array, earlier: Array) -> Array:
    """x, but it cannot be computed before ``earlier`` is there.

    It adds the minimum of 0 and one bit of ``earlier``. The compiler does not know that this is always 0, so it cannot
    move x before ``earlier``.
    """
    import jax
    import jax.numpy as jnp

    if not earlier.size:
        return x
    one = jax.lax.stop_gradient(earlier).reshape(-1)[0]
    one = one.real if jnp.iscomplexobj(one) else one
    bits = (
        one if one.dtype == bool else jax.lax.bitcast_convert_type(one, f"uint{one.dtype.itemsize * 8}") & 1
    )
    return x + jnp.minimum(bits.astype("int32"), 0).astype(x.dtype)
