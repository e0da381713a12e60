"""Slices, concatenations and broadcasts of tensors that several frameworks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.values import Site, Value
from pase.ir import Tensor
from pase.ir.parameters import Slice
from pase.ops import indexed, nests

__all__ = ["check_places", "join", "one_dim", "part", "spread", "take", "take_along"]


def part(
    c: Site,
    x: Value,
    shape: Sequence[int],
    kept: Sequence[bool],
    name: str,
    note: tuple[object, ...],
    parameters: Slice | None = None,
) -> Value:
    """A slice of a tensor.

    The op for a slice of a weight is added to the graph only when something reads the slice. If it is only read by a
    concatenation of all slices of that weight (``join``), it is never added.

    shape: of the slice. kept: for each dim, whether it is kept whole. note: (axis, start, …) if the slice is a
    contiguous range of one dim, else empty. parameters: where the slice begins, and its steps.
    """
    shape = c.shape(shape)
    if math.prod(shape) == 0:
        return c.nothing(shape, x.dtype)
    if parameters is None and note:
        parameters = one_dim(x.shape, int(note[0]), int(note[1]))  # type: ignore[call-overload]

    def make() -> Tensor:
        if note:  # one of several equal parts (a fused projection's queries, a recurrent layer's gate)
            axis, start = int(note[0]), int(note[1])  # type: ignore[call-overload]
            if x.shape[axis] % shape[axis] == 0 and start % shape[axis] == 0 and shape[axis] > 1:
                parts, index = x.shape[axis] // shape[axis], start // shape[axis]
                return nests.part(c.b, name, c.tensor(x), axis, parts, index)
        return nests.restrict(c.b, name, [c.tensor(x)], shape, kept, parameters)

    if x.note[:1] == ("initializer",) and note:
        return c.later(shape, x.dtype, make, ("slice", x, *note))
    return c.value(make())


def one_dim(shape: Sequence[int], axis: int, start: int, step: int = 1) -> Slice:
    """The parameters of a slice of one dim of a tensor of this shape."""
    rank = range(len(shape))
    return Slice(
        start=tuple(start if i == axis else 0 for i in rank),
        step=tuple(step if i == axis else 1 for i in rank),
    )


def join(c: Site, values: Sequence[Value], axis: int) -> Value:
    """A concatenation along an axis. Values without elements are left out."""
    if not values:
        raise c.fail("it concatenates no tensors")
    rank = len(values[0].shape)
    axis = c.axis(axis, rank)
    shape = list(values[0].shape)
    for v in values[1:]:
        if len(v.shape) != rank or any(i != axis and v.shape[i] != shape[i] for i in range(rank)):
            raise c.fail(
                f"{list(values[0].shape)} and {list(v.shape)} cannot be concatenated along dim {axis}"
            )
    shape[axis] = sum(v.shape[axis] for v in values)
    shape = list(c.shape(shape))
    full = [v for v in values if v.elements]
    if len(full) < 2:
        return full[0] if full else c.nothing(shape, values[0].dtype)
    if (whole := _reordered(full, axis)) is not None:
        return whole
    if all(v.tensor is None and v.make is None for v in full):
        return c.nothing(shape, full[0].dtype)
    return c.value(nests.concat(c.b, c.tensors(*full), axis))


def _reordered(values: Sequence[Value], axis: int) -> Value | None:
    """The weight itself, if the values are all of its slices, in any order (the gates of a recurrent layer). None if
    not. The weight is then stored in that order."""
    if any(v.note[:1] != ("slice",) or v.note[1] is not values[0].note[1] for v in values):
        return None
    base: Value = values[0].note[1]
    at = 0
    for where, start, stop in sorted(v.note[2:] for v in values):
        if where != axis or start != at:
            return None
        at = stop
    return base if at == base.shape[axis] else None


def spread(c: Site, x: Value, shape: Sequence[int]) -> Value:
    """A broadcast of x to a shape."""
    shape = c.shape(shape)
    if tuple(shape) == x.shape:
        return x
    if math.prod(shape) == 0 or x.literal or (x.tensor is None and x.make is None):
        return c.nothing(shape, x.dtype)
    new_dims = len(shape) - len(x.shape)
    return c.value(nests.broadcast(c.b, c.tensor(x), shape, [i + new_dims for i in range(len(x.shape))]))


def check_places(c: Site, ids: Value, *sizes: int) -> None:
    """Raises PaseError if indices are known, and one of them lies outside of its dim.

    sizes: of the dim that all of them index; of several, if the last dim of ``ids`` has an index of each.
    """
    if ids.data is None or math.prod(ids.shape) == 0:
        return
    for i, size in enumerate(sizes):
        each = ids.data[..., i] if len(sizes) > 1 else ids.data
        least, most = int(each.min()), int(each.max())
        if least < -size or most >= size:
            raise c.fail(f"its index {least if least < -size else most} is not in a dim of {size} elements")


def take(c: Site, x: Value, ids: Value, axis: int) -> Value:
    """x at these indices of a dim. The indices' shape replaces the dim."""
    axis = c.axis(axis, len(x.shape))
    check_places(c, ids, x.shape[axis])
    shape = c.shape((*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]))
    if math.prod(shape) == 0 or x.elements == 0:
        return c.nothing(shape, x.dtype)
    if ids.elements == 1 and ids.data is not None:  # a single known index is a slice
        sliced_shape = [1 if i == axis else s for i, s in enumerate(x.shape)]
        kept = [i != axis for i in range(len(sliced_shape))]
        parameters = one_dim(x.shape, axis, int(ids.data.reshape(())) % x.shape[axis])
        element = (
            x
            if x.shape[axis] == 1
            else c.value(nests.restrict(c.b, "slice", [c.tensor(x)], sliced_shape, kept, parameters))
        )
        return c.reshape(element, shape)
    indices = c.reshape(ids, (*ids.shape, 1))
    n = len(ids.shape)
    return c.value(
        indexed.gather(
            c.b,
            "gather",
            c.tensor(x),
            c.tensor(indices),
            shape,
            indexed.IndexedDims(
                window=[i for i in range(len(shape)) if not axis <= i < axis + n],
                dropped=(axis,),
                indexed=(axis,),
            ),
        )
    )


def take_along(c: Site, x: Value, ids: Value, axis: int) -> Value:
    """For each index, one element of x: along ``axis`` the one that the index names, and in the other dims the one at
    the index's own position (``torch.gather``)."""
    rank = len(x.shape)
    axis = c.axis(axis, rank)
    if len(ids.shape) != rank:
        raise c.fail(
            f"its indices have shape {list(ids.shape)}, but they index a tensor of shape {list(x.shape)}"
        )
    check_places(c, ids, x.shape[axis])
    others = [i for i in range(rank) if i != axis]
    if any(ids.shape[i] != x.shape[i] for i in others):
        kept = [i != axis and ids.shape[i] == x.shape[i] for i in range(rank)]
        return c.value(nests.restrict(c.b, "gather", c.tensors(x, ids), c.shape(ids.shape), kept))
    indices = c.reshape(ids, (*ids.shape, 1))
    return c.value(
        indexed.gather(
            c.b,
            "gather",
            c.tensor(x),
            c.tensor(indices),
            ids.shape,
            indexed.IndexedDims(
                window=(),
                dropped=(axis,),
                indexed=(axis,),
                x_batch=others,
                ids_batch=others,
            ),
        )
    )
