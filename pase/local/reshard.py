"""Runs the reshard steps of a local program on a device's arrays, in any framework (``pase.local.arrays``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TypeVar

from pase.errors import PaseError
from pase.local.arrays import Arrays
from pase.local.exchange import exchange, nests
from pase.local.parts import digits, pairs, view
from pase.local.types import Combine, Extents, LocalReshardStep
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

__all__ = ["along", "part", "places_of", "resharded"]

A = TypeVar("A")


def resharded(
    x: A, steps: Sequence[LocalReshardStep], shape: Extents, combine: Combine, arrays: Arrays[A]
) -> A:
    """The value after these reshard steps. Each is one collective, except for the few whose parts do not nest
    (``pase.local.exchange``).

    shape: of the whole tensor. combine: reduces partial values.
    """
    return reduce(lambda now, step: _after_step(now, step, shape, combine, arrays), steps, x)


def _after_step(x: A, step: LocalReshardStep, shape: Extents, combine: Combine, arrays: Arrays[A]) -> A:
    mesh, axes = arrays.mesh, step.axes
    match step.kind:
        case "all_reduce":
            return arrays.all_reduce(x, axes, combine)
        case "own":
            return arrays.on_first(x, axes)
        case "permute" | "all_to_all" if not nests(step, shape, mesh):
            return arrays.units_exchanged(x, exchange(step, shape, mesh), axes)
        case "permute":
            return arrays.permute(x, axes, pairs(step, shape, mesh))
    v = view(step, shape, mesh)
    match step.kind:
        case "reduce_scatter":
            return arrays.scattered(x, v, axes, combine)
        case "all_gather":
            return arrays.gathered(x, v, axes)
        case "all_to_all":
            return arrays.exchanged(x, v, axes)
    assert step.kind == "slice"
    return arrays.sliced(x, v, axes)


def part(x: A, shape: Extents, layout: AxisLayout, arrays: Arrays[A]) -> A:
    """A device's part of a replicated tensor.

    shape: of the whole tensor. A dim of one element that has more in ``shape`` is not split.
    """
    full, mesh = arrays.shape(x), arrays.mesh
    split = layout.within(lambda dim: full[dim] != 1)
    local = split.local_shape(full, mesh)
    if local == full:
        return x
    if 0 in full:  # no element belongs to any part
        return reduce(lambda now, dim: arrays.narrow(now, dim, 0, local[dim]), range(len(full)), x)
    if any(full[digit.dim] != shape[digit.dim] for _, digit in split.digits):
        raise PaseError(
            f"a tensor of shape {list(full)} does not have the whole shape {list(shape)}", where="operand"
        )
    axes = tuple(mesh.names[axis] for axis, _ in split.digits)
    step = LocalReshardStep(kind="slice", axes=axes, before=AxisLayout.whole(mesh), after=split)
    return resharded(x, [step], full, "sum", arrays)


def along(x: A, dim: int, shape: Extents, layout: AxisLayout, arrays: Arrays[A]) -> A:
    """A device's part of numbers that belong to the elements of a whole tensor's dim: [elements on the device].

    x: [elements of the dim]. shape, layout: of the tensor.
    """
    own = layout.summed.renumbered(lambda d: 0 if d == dim else None)
    return part(x, (shape[dim],), own, arrays)


def places_of(ids: A, dim: int, shape: Extents, layout: AxisLayout, arrays: Arrays[A]) -> tuple[A, A]:
    """Translate indices into a whole tensor dim: (indices into the device's part, whether they are in this part)."""
    given: Tree = ids
    every = [d for d in digits(shape, layout, layout, arrays.mesh) if d.dim == dim]
    places = {d: arrays.index(arrays.mesh.names[d.before], ids) for d in every if d.before is not None}
    known = [(d.stride, i) for d, i in places.items() if isinstance(i, int)]
    if list(places) == every[: len(known)]:
        # The part is one range, and its place is a number: a framework that launches each op has three to launch.
        begin, parts = sum(stride * i for stride, i in known), math.prod(d.size for d in places)
        at = given - begin if begin else given
        inside = at.clip(0, shape[dim] // parts - 1)
        return inside, inside == at
    mine, here, stride = (given >= 0) & (given < shape[dim]), None, 1
    for d in reversed(every):
        index = given // d.stride % d.size
        if d in places:
            mine = mine & (index == places[d])
            continue
        index = index if stride == 1 else index * stride
        here, stride = index if here is None else here + index, stride * d.size
    return given * 0 if here is None else here, mine
