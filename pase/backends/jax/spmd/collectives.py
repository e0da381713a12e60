"""Edges in JAX, inside ``shard_map``: their gradients return as planned, and one may wait for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array

__all__ = ["after", "there_and_back"]


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
