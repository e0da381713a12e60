"""Simulates all devices of a mesh in one process, in numpy: what a layout means and what a reshard step does.

This is an oracle for the backends.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from pase.errors import PaseError
from pase.local.exchange import nests
from pase.local.parts import held, pairs, view
from pase.local.types import Combine, Extents, Layout, LocalReshardStep
from pase.machine import Mesh

__all__ = ["DeviceParts", "part_of", "places", "resharded", "whole_of"]

DeviceParts = dict[tuple[int, ...], np.ndarray]
"""Place of a device on the mesh (its index along each axis) -> what the device holds."""


def places(mesh: Mesh) -> list[tuple[int, ...]]:
    """The places of all devices, row-major: the index along each axis."""
    return list(itertools.product(*map(range, mesh.sizes)))


def part_of(x: np.ndarray, layout: Layout, place: tuple[int, ...], mesh: Mesh) -> np.ndarray:
    """The elements that a device holds."""
    return np.asarray(x[np.ix_(*held(x.shape, layout, place, mesh))])


def whole_of(parts: DeviceParts, shape: Extents, layout: Layout, mesh: Mesh) -> np.ndarray:
    """The whole tensor, from its shards; partial sums are added up. Raises ValueError if replicas of a shard differ."""
    out = np.zeros(shape)
    filled = np.zeros(shape, bool)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    partial = [i for i, s in enumerate(layout) if s == "partial"]
    for place in places(mesh):
        if any(place[i] for i in partial):
            continue
        along = itertools.product(
            *(range(mesh.sizes[i]) if i in partial else (place[i],) for i in range(len(place)))
        )
        total = sum(parts[p] for p in along)
        at = part_of(numbers, layout, place, mesh)
        if filled.flat[at].any() and not np.array_equal(out.flat[at], total):
            raise ValueError(f"device {place} and a replica of it hold different numbers")
        out.flat[at], filled.flat[at] = total, True
    return out


def resharded(
    parts: DeviceParts,
    steps: Sequence[LocalReshardStep],
    shape: Extents,
    mesh: Mesh,
    combine: Combine = "sum",
) -> DeviceParts:
    """What all devices hold after these reshard steps. shape: of the whole tensor. combine: reduces partial values."""
    for step in steps:
        parts = _after_step(parts, step, shape, mesh, combine)
    return parts


def _join(combine: Combine) -> Callable[[list[np.ndarray]], np.ndarray]:
    """The reduction of partial values. PaseError if no collective does it."""
    by = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    if combine not in by:
        raise PaseError(
            "no collective reduces these partial results: only sums, maxima and minima can be reduced"
        )
    return lambda values: functools.reduce(by[combine], values)


def _after_step(
    parts: DeviceParts, step: LocalReshardStep, shape: Extents, mesh: Mesh, combine: Combine
) -> DeviceParts:
    axes, joined = [mesh.names.index(a) for a in step.axes], _join(combine)
    out: DeviceParts = {}
    for place in places(mesh):
        group = [
            tuple(dict(zip(axes, along, strict=True)).get(i, p) for i, p in enumerate(place))
            for along in itertools.product(*(range(mesh.sizes[a]) for a in axes))
        ]
        out[place] = _on_one(parts, step, shape, mesh, place, group, joined)
    return out


def _on_one(
    parts: DeviceParts,
    step: LocalReshardStep,
    shape: Extents,
    mesh: Mesh,
    place: tuple[int, ...],
    group: list[tuple[int, ...]],
    joined: Callable[[list[np.ndarray]], np.ndarray],
) -> np.ndarray:
    """What one device holds after a reshard step. group: the places of the devices that take part, row-major."""
    mine = group.index(place)
    if step.kind not in ("all_reduce", "own") and not nests(step, shape, mesh):
        return _by_definition(parts, step, shape, mesh, place, group)
    match step.kind:
        case "all_reduce":
            return joined([parts[p] for p in group])
        case "own":
            return parts[place] if mine == 0 else np.zeros_like(parts[place])
        case "permute":
            return parts[group[next(a for a, b in pairs(step, shape, mesh) if b == mine)]]
    v = view(step, shape, mesh)
    rest = [i for i in range(len(v.seen)) if i not in v.leaving]

    def on_wire(p: tuple[int, ...]) -> np.ndarray:
        seen = parts[p].reshape(v.seen).transpose(*v.leaving, *rest)
        return seen.reshape(len(group) if v.leaving else 1, *(v.seen[i] for i in rest))

    if v.arriving is None:  # a slice, or a slice of the sum
        sources = [place] if step.kind == "slice" else group
        return joined([on_wire(p)[mine] for p in sources]).reshape(v.shape)
    received = np.stack([on_wire(p)[mine if v.leaving else 0] for p in group])
    return received.reshape(*v.ways, *received.shape[1:]).transpose(v.arriving).reshape(v.shape)


def _by_definition(
    parts: DeviceParts,
    step: LocalReshardStep,
    shape: Extents,
    mesh: Mesh,
    place: tuple[int, ...],
    group: list[tuple[int, ...]],
) -> np.ndarray:
    """What one device holds afterwards, by the definition of a layout: each element is copied from a device of the
    group that holds it."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    whole = np.empty(numbers.size, next(iter(parts.values())).dtype)
    there = np.zeros(numbers.size, dtype=bool)
    for p in group:
        had = part_of(numbers, step.before, p, mesh)
        whole[had], there[had] = parts[p], True
    wanted = part_of(numbers, step.after, place, mesh)
    if not there[wanted].all():
        raise PaseError(
            "a device needs elements that no device of its group holds",
            where=f"{step.kind} over {', '.join(step.axes)}",
        )
    return whole[wanted]
