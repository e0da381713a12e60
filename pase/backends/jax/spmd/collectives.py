"""Runs the reshard steps of a local program in JAX, inside ``shard_map``.

Each reshard step is exactly one collective, forward and backward, except for the few whose parts do not nest
(``pase.local.exchange``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.local.exchange import UnitExchange, exchange, nests
from pase.local.parts import WireView, digits, pairs, view
from pase.local.types import Combine, Extents, Layout, LocalReshardStep, local_shape
from pase.machine import Mesh

if TYPE_CHECKING:
    from jax import Array

__all__ = [
    "after",
    "first",
    "from_wire",
    "on_wire",
    "part",
    "places_of",
    "resharded",
    "sent",
    "summed",
    "there_and_back",
]


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


def resharded(
    value: Array, steps: Sequence[LocalReshardStep], shape: Extents, combine: Combine, mesh: Mesh
) -> Array:
    """The value after these reshard steps. shape: of the whole tensor. combine: reduces partial values."""
    return reduce(lambda x, step: _step(x, step, shape, combine, mesh), steps, value)


def _step(x: Array, step: LocalReshardStep, shape: Extents, combine: Combine, mesh: Mesh) -> Array:
    import jax

    match step.kind:
        case "all_reduce":
            return summed(x, step.axes, combine)
        case "permute" | "all_to_all" if not nests(step, shape, mesh):
            return _exchanged_in_rounds(x, exchange(step, shape, mesh), step.axes)
        case "permute":
            return jax.lax.ppermute(x, step.axes, pairs(step, shape, mesh))
        case "own":
            return jax.numpy.where(first(step.axes), x, jax.numpy.zeros((), x.dtype))
        case "slice":
            return _sliced(x, view(step, shape, mesh), step.axes, mesh)
        case "reduce_scatter":
            return _scattered(x, view(step, shape, mesh), step.axes, combine)
        case "all_gather":
            return _gathered(x, view(step, shape, mesh), step.axes)
        case _:
            assert step.kind == "all_to_all"
            return _exchanged(x, view(step, shape, mesh), step.axes)


def summed(x: Array, axes: tuple[str, ...], combine: Combine = "sum") -> Array:
    """All-reduce over these axes."""
    import jax

    by = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
    if combine not in by:
        raise PaseError(
            f"no collective reduces these partial results over {', '.join(axes)}: only sums, maxima and minima can be "
            f"reduced"
        )
    return by[combine](x, axes)


def first(axes: Sequence[str]) -> Array:
    """Whether this is the first device along each of these axes."""
    import jax

    return reduce(lambda a, b: a & b, [jax.lax.axis_index(a) == 0 for a in axes])


def _wide(axes: Sequence[str], mesh: Mesh) -> list[str]:
    return [a for a in axes if mesh.sizes[mesh.names.index(a)] > 1]


def _sliced(x: Array, v: WireView, axes: Sequence[str], mesh: Mesh) -> Array:
    import jax

    x = x.reshape(v.seen)
    for axis, at in zip(_wide(axes, mesh), v.leaving, strict=True):
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis), 1, at)
    return x.reshape(v.shape)


def _to_front(x: Array, v: WireView) -> Array:
    """Brings the leaving digits to the front, as one dim; the order of the others is unchanged."""
    x = x.reshape(v.seen).transpose(*v.to_front)
    return x.reshape(math.prod(v.ways), *x.shape[len(v.leaving) :])


def _from_front(x: Array, v: WireView) -> Array:
    """Splits the first dim into the arriving digits and puts each in its place."""
    assert v.arriving is not None
    return x.reshape(*v.ways, *x.shape[1:]).transpose(v.arriving).reshape(v.shape)


def _scattered(x: Array, v: WireView, axes: Sequence[str], combine: Combine) -> Array:
    """A reduce-scatter, along a dim that exists only for it.

    XLA for TPU stores arrays in tiles. It compiles a reduce-scatter along a tiled dim to an all-reduce unless the parts
    are whole tiles. For maxima and minima, each device receives all candidates for its part by an all-to-all, which
    sends the same number of bytes.
    """
    import jax

    if combine == "sum" and v.along is not None and v.along[0] is not None:
        at, ways = v.along[0], math.prod(v.ways)
        apart = x.reshape(*x.shape[:at], ways, x.shape[at] // ways, *x.shape[at + 1 :])
        return jax.lax.psum_scatter(apart, tuple(axes), scatter_dimension=at, tiled=False)
    front = _to_front(x, v)
    if combine == "sum":
        return jax.lax.psum_scatter(front, tuple(axes), scatter_dimension=0, tiled=False).reshape(v.shape)
    candidates = jax.lax.all_to_all(front, tuple(axes), 0, 0, tiled=True)
    return (candidates.max(0) if combine == "max" else candidates.min(0)).reshape(v.shape)


def _gathered(x: Array, v: WireView, axes: Sequence[str]) -> Array:
    import jax

    if v.along is not None and v.along[1] is not None:
        return jax.lax.all_gather(x, tuple(axes), axis=v.along[1], tiled=True)
    return _from_front(jax.lax.all_gather(x.reshape(v.seen), tuple(axes), axis=0, tiled=False), v)


def _exchanged(x: Array, v: WireView, axes: Sequence[str]) -> Array:
    import jax

    if v.along is not None and None not in v.along and 1 not in (x.shape[v.along[1]], v.shape[v.along[0]]):  # type: ignore[index]
        return jax.lax.all_to_all(x, tuple(axes), v.along[0], v.along[1], tiled=True)  # type: ignore[arg-type]
    # Dims of one element also go this way: XLA for CPU gives slices along them different layouts, and refuses them.
    front = _to_front(x, v)
    rows = jax.lax.all_to_all(front.reshape(front.shape[0], -1), tuple(axes), 0, 0, tiled=True)
    return _from_front(rows.reshape(front.shape), v)


def _exchanged_in_rounds(x: Array, how: UnitExchange, axes: Sequence[str]) -> Array:
    """An exchange of units: brings them to the front, sends them permute by permute, and puts each in its place."""
    import jax
    import jax.numpy as jnp

    me, rank = jax.lax.axis_index(tuple(axes)), x.ndim
    apart = [k for n, cut in zip(x.shape, how.before, strict=True) for k in (cut, n // cut)]
    front = x.reshape(apart).transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    blocks = front.shape[rank:]
    front = front.reshape(math.prod(how.before), *blocks)
    received = []
    for r in how.rounds:
        some = front[jnp.asarray(r.units)[me]]
        received.append(some if r.stays else jax.lax.ppermute(some, tuple(axes), r.pairs))
    placed = jnp.concatenate(received)[jnp.asarray(how.order)[me]].reshape(*how.after, *blocks)
    together = placed.transpose(*(i for d in range(rank) for i in (d, rank + d)))
    return together.reshape([cut * n for cut, n in zip(how.after, blocks, strict=True)])


def on_wire(x: Array, step: LocalReshardStep, shape: Extents, mesh: Mesh) -> Array:
    """What an all-reduce, a reduce-scatter or an all-gather sends, [rows, elements].

    A reduce-scatter has a row for each device, the others have one row.
    """
    if step.kind == "reduce_scatter":
        front = _to_front(x, view(step, shape, mesh))
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
        return _from_front(rows.reshape(rows.shape[0], *v.seen), v)
    return rows.reshape(local_shape(shape, step.after, mesh))


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


def part(x: Array, shape: Extents, layout: Layout, mesh: Mesh) -> Array:
    """This device's part of an array that is replicated."""
    axes = tuple(name for name, state in zip(mesh.names, layout, strict=True) if isinstance(state, tuple))
    if not axes or local_shape(shape, layout, mesh) == shape:
        return x
    return resharded(
        x,
        [LocalReshardStep(kind="slice", axes=axes, before=(None,) * len(layout), after=layout)],
        shape,
        "sum",
        mesh,
    )


def places_of(ids: Array, dim: int, shape: Extents, layout: Layout, mesh: Mesh) -> tuple[Array, Array]:
    """Translates indices into a whole tensor dim: (indices into this device's part of it, whether they lie in it)."""
    import jax
    import jax.numpy as jnp

    here, mine, stride = jnp.zeros_like(ids), jnp.ones(ids.shape, bool), 1
    for d in reversed([d for d in digits(shape, layout, layout, mesh) if d.dim == dim]):
        index = ids // d.stride % d.size
        if d.before is None:
            here, stride = here + index * stride, stride * d.size
        else:
            mine &= index == jax.lax.axis_index(mesh.names[d.before]).astype(ids.dtype)
    return here, mine & (ids >= 0) & (ids < shape[dim])
