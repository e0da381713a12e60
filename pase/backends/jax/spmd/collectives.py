"""The collectives of a local program in JAX, inside ``shard_map``, and edges whose gradients return as planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from pase.local.arrays import Arrays, check_combine
from pase.local.parts import WireView, view
from pase.local.types import Combine, Extents, LocalReshardStep
from pase.machine import Mesh
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

__all__ = ["JaxArrays", "after", "first", "from_wire", "on_wire", "sent", "summed", "there_and_back"]


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


def summed(x: Array, axes: tuple[str, ...], combine: Combine = "sum") -> Array:
    """All-reduce over these axes."""
    import jax

    check_combine(combine, axes)
    how = _of_booleans(x, combine)
    return {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[how](x, axes)


def _of_booleans(x: Array, combine: Combine) -> Combine:
    """How JAX reduces these partial results. It does not add booleans: their sum is true where one of them is, as where
    one device has the element that is looked up."""
    return "max" if combine == "sum" and x.dtype == bool else combine


def first(axes: Sequence[str]) -> Array:
    """Whether this is the first device along each of these axes."""
    import jax

    return reduce(lambda a, b: a & b, [jax.lax.axis_index(a) == 0 for a in axes])


@dataclass(frozen=True)
class JaxArrays(Arrays["Array"]):
    """The arrays of one device inside of ``shard_map``.

    XLA shows collectives along a dim in its texts and reports, so reshard steps of the outermost digits of a dim
    (``WireView.along``) are collectives along that dim.
    """

    mesh: Mesh

    @property
    def _jax(self) -> ModuleType:
        import jax

        return jax

    def shape(self, x: Array) -> Extents:
        return x.shape

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return x.reshape(tuple(shape))

    def transpose(self, x: Array, order: Sequence[int]) -> Array:
        return x.transpose(*order)

    def concat(self, xs: Sequence[Array], dim: int) -> Array:
        return self._jax.numpy.concatenate(xs, axis=dim)

    def narrow(self, x: Array, dim: int, start: int, count: int) -> Array:
        return self._jax.lax.slice_in_dim(x, start, start + count, axis=dim)

    def padded(self, x: Array, dim: int, before: int, behind: int) -> Array:
        return self._jax.numpy.pad(x, [(before, behind) if i == dim else (0, 0) for i in range(x.ndim)])

    def reduced(self, x: Array, combine: Combine) -> Array:
        return x.sum(0) if combine == "sum" else x.max(0) if combine == "max" else x.min(0)

    def index(self, axis: str, x: Array) -> Array:
        return self._jax.lax.axis_index(axis).astype(x.dtype)

    def chosen(self, x: Array, dim: int, axis: str) -> Array:
        return self._jax.lax.dynamic_slice_in_dim(x, self._jax.lax.axis_index(axis), 1, dim)

    def rows(self, x: Array, table: np.ndarray, axes: Sequence[str]) -> Array:
        return x[self._jax.numpy.asarray(table)[self._jax.lax.axis_index(tuple(axes))]]

    def on_first(self, x: Array, axes: Sequence[str]) -> Array:
        return self._jax.numpy.where(first(axes), x, self._jax.numpy.zeros((), x.dtype))

    def at_end(self, x: Array, axes: Sequence[str], last: bool, value: Tree) -> Array:
        here = self._jax.lax.axis_index(tuple(axes)) == (self.ways(axes) - 1 if last else 0)
        return self._jax.numpy.where(here, self._jax.numpy.asarray(value, x.dtype), x)

    def all_reduce(self, x: Array, axes: Sequence[str], combine: Combine = "sum") -> Array:
        return summed(x, tuple(axes), combine)

    def all_gather(self, x: Array, axes: Sequence[str]) -> Array:
        return self._jax.lax.all_gather(x, tuple(axes), axis=0, tiled=False)

    def reduce_scatter(self, x: Array, axes: Sequence[str]) -> Array:
        # Along a dim that exists only for it: XLA for TPU stores arrays in tiles, and compiles a reduce-scatter along a
        # tiled dim to an all-reduce unless the parts are whole tiles.
        return self._jax.lax.psum_scatter(x, tuple(axes), scatter_dimension=0, tiled=False)

    def all_to_all(self, x: Array, axes: Sequence[str]) -> Array:
        # Dims of one element are merged: XLA for CPU gives slices along them different layouts, and refuses them.
        rows = x.reshape(x.shape[0], -1)
        return self._jax.lax.all_to_all(rows, tuple(axes), 0, 0, tiled=True).reshape(x.shape)

    def permute(self, x: Array, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Array:
        return self._jax.lax.ppermute(x, tuple(axes), pairs)

    def scattered(self, x: Array, v: WireView, axes: Sequence[str], combine: Combine) -> Array:
        combine = _of_booleans(x, combine)
        if combine != "sum" or v.along is None or v.along[0] is None:
            return super().scattered(x, v, axes, combine)
        at, ways = v.along[0], math.prod(v.ways)
        apart = x.reshape(*x.shape[:at], ways, x.shape[at] // ways, *x.shape[at + 1 :])
        return self._jax.lax.psum_scatter(apart, tuple(axes), scatter_dimension=at, tiled=False)

    def gathered(self, x: Array, v: WireView, axes: Sequence[str]) -> Array:
        if v.along is None or v.along[1] is None:
            return super().gathered(x, v, axes)
        return self._jax.lax.all_gather(x, tuple(axes), axis=v.along[1], tiled=True)

    def exchanged(self, x: Array, v: WireView, axes: Sequence[str]) -> Array:
        leaving, arriving = v.along or (None, None)
        if leaving is None or arriving is None or 1 in (x.shape[arriving], v.shape[leaving]):
            return super().exchanged(x, v, axes)
        return self._jax.lax.all_to_all(x, tuple(axes), leaving, arriving, tiled=True)


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
