"""All devices of a mesh in one process, in numpy: what a layout means and what a move does. The backends' oracle."""

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
"""Place of a device on the mesh -> what it holds."""


def places(mesh: Mesh) -> list[tuple[int, ...]]:
    """The devices, by their index along each axis."""
    return list(itertools.product(*map(range, mesh.sizes)))


def part_of(x: np.ndarray, layout: Layout, place: tuple[int, ...], mesh: Mesh) -> np.ndarray:
    """The elements that a device holds."""
    return np.asarray(x[np.ix_(*held(x.shape, layout, place, mesh))])


def whole_of(parts: DeviceParts, shape: Extents, layout: Layout, mesh: Mesh) -> np.ndarray:
    """The tensor from its shards, partial sums added up. Replicas of a shard must hold the same numbers."""
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
            raise ValueError(f"device {place} holds other numbers than one that should hold the same")
        out.flat[at], filled.flat[at] = total, True
    return out


def resharded(
    parts: DeviceParts,
    steps: Sequence[LocalReshardStep],
    shape: Extents,
    mesh: Mesh,
    combine: Combine = "sum",
) -> DeviceParts:
    """What all devices hold after the moves of a tensor of this whole shape. combine: reduces partial values."""
    for step in steps:
        parts = _after_step(parts, step, shape, mesh, combine)
    return parts


def _join(combine: Combine) -> Callable[[list[np.ndarray]], np.ndarray]:
    """The reduction of partial values; PaseError where no collective does it."""
    by = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    if combine not in by:
        raise PaseError("no collective joins partial results but sums, maxima and minima")
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
    """What one device holds after a move among the devices of its group, which are in row-major order."""
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
    """Each element that the device is to hold, from one of its group that holds it."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    whole = np.empty(numbers.size, next(iter(parts.values())).dtype)
    there = np.zeros(numbers.size, dtype=bool)
    for p in group:
        had = part_of(numbers, step.before, p, mesh)
        whole[had], there[had] = parts[p], True
    wanted = part_of(numbers, step.after, place, mesh)
    if not there[wanted].all():
        raise PaseError(f"a {step.kind} over {', '.join(step.axes)} brings what none of its devices has")
    return whole[wanted]
