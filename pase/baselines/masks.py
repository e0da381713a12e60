"""Masks of the configs that baselines allow, and checks of devices and batches; shared by all baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pase.baselines.flow import Roles
from pase.ir import Graph, Node
from pase.machine import Machine, Mesh, axis_levels, level_ways
from pase.tables.layouts import NOT_SPLIT, concrete_size, shards, state_index

__all__ = [
    "NO_BATCH",
    "PERSISTENT_ELEMENTS",
    "by_batch",
    "fits",
    "free",
    "most",
    "no_batch",
    "only",
    "state_apart",
    "stored_apart",
    "ways_over",
    "with_stored",
]

PERSISTENT_ELEMENTS = 100_000
"""ZeRO-3 need not split parameters with fewer elements: DeepSpeed's stage3_param_persistence_threshold."""

NO_BATCH = "is not divisible by"
"""What ``no_batch`` says of a batch that cannot be split evenly."""


def only(cfg: np.ndarray, axes: Sequence[int], dims: Sequence[int]) -> np.ndarray:
    """bool [K]: whether these axes split only these dims (or nothing, if NOT_SPLIT is listed)."""
    return np.asarray(np.isin(cfg[:, list(axes)], list(dims)).all(axis=1))


def most(cfg: np.ndarray, allowed: np.ndarray, dims: Sequence[int], mesh: Mesh) -> np.ndarray:
    """Of the allowed configs, those that split these dims into the most shards."""
    ways = np.where(allowed, shards(cfg, dims, mesh), 0)
    return allowed & (ways == ways.max(initial=0))


def free(node: Node) -> list[int]:
    """The dims for an axis that splits nothing: replicated, or a copy's 'pending' dim (its gradient is summed
    later)."""
    return [NOT_SPLIT, *(i for i, d in enumerate(node.space) if d.kind == "pending")]


def by_batch(r: Roles, node: Node, cfg: np.ndarray, mesh: Mesh, axes: Sequence[int]) -> np.ndarray:
    """The configs that split the batch over these axes as far as the node's batch dims can be split."""
    batch = r.dims(node, r.batch)
    split = [mesh.sizes[a] for a in axes]
    allowed = np.ones(len(cfg), dtype=bool)
    for a in axes:
        allowed &= only(cfg, [a], [*batch, *free(node)])
    if not split or not batch:
        return allowed
    ways = np.where(allowed, ways_over(cfg, batch, axes, mesh), 0)
    return allowed & (ways == ways.max(initial=0))


def with_stored(
    r: Roles, node: Node, cfg: np.ndarray, mesh: Mesh, data: Sequence[int], stored: Sequence[int]
) -> np.ndarray:
    """As ``by_batch`` over the axes ``data``. What is computed of parameters alone may also be computed in parts, as
    parameters are stored over the axes ``stored``: then its result is gathered and its gradient reduce-scattered."""
    if node.name not in r.of_weights:
        return by_batch(r, node, cfg, mesh, data)
    parts = [i for i, d in enumerate(node.space) if d.kind in ("parallel", "reduction")]
    whole = [a for a in data if a not in stored]
    return only(cfg, stored, [*parts, *free(node)]) & only(cfg, whole, free(node))


def ways_over(cfg: np.ndarray, dims: Sequence[int], axes: Sequence[int], mesh: Mesh) -> np.ndarray:
    """The number of shards into which these axes split these dims: int64 [K]."""
    out = np.ones(len(cfg), dtype=np.int64)
    for a in axes:
        out[np.isin(cfg[:, a], dims)] *= mesh.sizes[a]
    return out


def _elements(node: Node) -> int:
    """The number of elements of a parameter."""
    return math.prod(concrete_size(d.size, node.name) for d in node.space if d.kind == "parallel")


def stored_apart(
    r: Roles, node: Node, cfg: np.ndarray, axes: Sequence[int], taken: Sequence[int] = ()
) -> np.ndarray:
    """A parameter split over all of these axes, on the largest dim that they divide. A small parameter may stay whole.

    Where each call runs by itself, it is the first such dim, as in FSDP2: its parts arrive one after the other, and
    nothing has to copy them into place.

    taken: dims that other axes split for compute. They come last, because gathering shards that two axes
    interleave would need a permute first.
    """
    whole = only(cfg, axes, [NOT_SPLIT])
    sizes = [concrete_size(d.size, node.name) for d in node.space]
    stored = [i for i, d in enumerate(node.space) if d.kind != "state"]
    for i in sorted(stored, key=lambda i: (i in taken, i if r.eager else -sizes[i])):
        on = only(cfg, axes, [i])
        if on.any():
            return on | whole if _elements(node) < PERSISTENT_ELEMENTS else on
    return whole


def state_apart(node: Node, cfg: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """A parameter whole over these axes, with its gradient and optimizer state split over all of them if possible."""
    state = state_index(node)
    on = only(cfg, axes, state)
    if not state or not on.any():
        return only(cfg, axes, [NOT_SPLIT])
    return on | only(cfg, axes, [NOT_SPLIT]) if _elements(node) < PERSISTENT_ELEMENTS else on


def _batch_size(graph: Graph, r: Roles) -> int:
    """The greatest common divisor of the batch sizes; 1 without a batch."""
    sizes = r.sizes(graph, r.batch)
    return math.gcd(*sizes) if sizes else 1


def no_batch(graph: Graph, r: Roles, ways: int) -> str | None:
    """Why the batch cannot be split this many ways; None if it can."""
    if ways == 1:
        return None
    if not r.batch:
        return "the model has no input with a batch dim"
    size = _batch_size(graph, r)
    return None if size % ways == 0 else f"a batch of {size} {NO_BATCH} {ways}"


def fits(mesh: Mesh, machine: Machine) -> bool:
    """Whether every axis covers whole factors of the machine's link levels."""
    ways = level_ways(mesh.devices, machine)
    below = 1
    bounds = []
    for w in ways:
        below *= w
        bounds.append(below)
    levels = axis_levels(mesh, machine)
    if any(math.prod(row) != size for row, size in zip(levels, mesh.sizes, strict=True)):
        return False
    per_level = [math.prod(row[level] for row in levels) for level in range(len(ways))]
    return tuple(per_level) == tuple(ways)
