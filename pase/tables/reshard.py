"""From one layout to another: which collectives, over which axes, on how many bytes.

The one place where resharding is decided. Vectorised over pairs of layouts: states are those of
``pase.tables.layouts``. Order of the steps: slice what can be sliced for free, reduce-scatter, all-to-all,
permute, all-reduce, all-gather, so that each moves as little as possible; a slice whose digit another axis
still holds comes after that axis is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.machine import CollectiveKind, Mesh
from pase.tables.layouts import _DIM, PARTIAL, REPLICATED

__all__ = ["Step", "reshard"]


@dataclass(frozen=True)
class Step:
    """One collective per pair of layouts: axes as bit sets (0: none), and bytes as CostModel.collective has them,
    in units of the whole tensor."""

    kind: CollectiveKind
    axes: np.ndarray
    fraction: np.ndarray


def _overlap(code_a: np.ndarray, ways_a: int, code_b: np.ndarray, ways_b: int) -> np.ndarray:
    """Do two digits select from the same part of the same tensor dim?"""
    same = (code_a // _DIM == code_b // _DIM) & (code_a >= 0) & (code_b >= 0)
    a, b = code_a % _DIM, code_b % _DIM
    return same & (a < b * ways_b) & (b < a * ways_a)


def reshard(src: np.ndarray, dst: np.ndarray, mesh: Mesh) -> list[Step]:
    """Steps from each src layout to each dst layout: src int64 [S, axes], dst int64 [D, axes] -> arrays [S, D].

    A dst state of PARTIAL lets the tensor stay (or become) partial over that axis.
    """
    s, d = src[:, None, :], dst[None, :, :]
    shape = (len(src), len(dst))
    sizes = mesh.sizes
    axes = range(len(sizes))
    inverse = np.array([1.0 / n for n in sizes])
    local = np.where(src >= 0, inverse, 1.0).prod(axis=1)[:, None] * np.ones(shape)

    same = s == d
    reduce_scatter = (s == PARTIAL) & (d >= 0)
    all_reduce = (s == PARTIAL) & (d == REPLICATED)
    gather = (s >= 0) & (d < 0)
    move = (s >= 0) & (d >= 0) & ~same
    enter = (s < 0) & (s != PARTIAL) & (d >= 0)

    permute = _relabelled(src, dst, sizes) & ~same.all(axis=-1)
    for mask in (gather, move, enter):
        mask &= ~permute[:, :, None]

    blocked = np.zeros((*shape, len(sizes)), dtype=bool)
    for a in axes:
        for b in axes:
            if a != b:
                held = (gather[:, :, b] | move[:, :, b]) & _overlap(d[:, :, a], sizes[a], s[:, :, b], sizes[b])
                blocked[:, :, a] |= held & enter[:, :, a]
    free = enter & ~blocked
    local = local * np.where(free, inverse, 1.0).prod(axis=-1)

    def bits(mask: np.ndarray) -> np.ndarray:
        out = np.zeros(shape, dtype=np.int64)
        for a in axes:
            out |= mask[:, :, a].astype(np.int64) << a
        return out

    changed = ~same
    steps = [Step("reduce_scatter", bits(reduce_scatter), local)]
    local = local * np.where(reduce_scatter, inverse, 1.0).prod(axis=-1)
    steps += [
        Step("all_to_all", bits(move), local),
        Step("permute", np.where(permute, bits(changed), 0), local),
        Step("all_reduce", bits(all_reduce), local),
    ]
    local = local * np.where(gather, np.array(sizes, dtype=float), 1.0).prod(axis=-1)
    steps.append(Step("all_gather", bits(gather), local))
    return [step for step in steps if step.axes.any()]


def _relabelled(src: np.ndarray, dst: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Pairs with the same digits on other axes of the same size: one permutation of the shards serves."""
    def keyed(states: np.ndarray) -> np.ndarray:
        return np.sort(np.where(states >= 0, states * 64 + _ways_key(sizes), states), axis=1)

    ks, kd = keyed(src), keyed(dst)
    no_sums = ~(src == PARTIAL).any(axis=1)[:, None] & ~(dst == PARTIAL).any(axis=1)[None, :]
    return no_sums & (ks[:, None, :] == kd[None, :, :]).all(axis=-1)


def _ways_key(sizes: tuple[int, ...]) -> np.ndarray:
    """A small distinct number per axis size."""
    order = {n: i for i, n in enumerate(sorted(set(sizes)))}
    return np.array([order[n] for n in sizes], dtype=np.int64)
