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
from pase.local.types import Combine, Extents, Layout, LocalReshardStep, local_shape
from pase.pytree import Tree

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


def part(x: A, shape: Extents, layout: Layout, arrays: Arrays[A]) -> A:
    """A device's part of a replicated tensor.

    shape: of the whole tensor. A dim of one element that has more in ``shape`` is not split.
    """
    full, mesh = arrays.shape(x), arrays.mesh
    states = tuple(s if isinstance(s, tuple) and full[s[0]] != 1 else None for s in layout)
    if local_shape(full, states, mesh) == full:
        return x
    if any(full[s[0]] != shape[s[0]] for s in states if s is not None):
        raise PaseError(
            f"a tensor of shape {list(full)} does not have the whole shape {list(shape)}", where="operand"
        )
    axes = tuple(name for name, s in zip(mesh.names, states, strict=True) if s is not None)
    step = LocalReshardStep(kind="slice", axes=axes, before=(None,) * len(states), after=states)
    return resharded(x, [step], full, "sum", arrays)


def along(x: A, dim: int, shape: Extents, layout: Layout, arrays: Arrays[A]) -> A:
    """A device's part of numbers that belong to the elements of a whole tensor's dim: [elements on the device].

    x: [elements of the dim]. shape, layout: of the tensor.
    """
    states = tuple((0, s[1]) if isinstance(s, tuple) and s[0] == dim else None for s in layout)
    return part(x, (shape[dim],), states, arrays)


def places_of(ids: A, dim: int, shape: Extents, layout: Layout, arrays: Arrays[A]) -> tuple[A, A]:
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
