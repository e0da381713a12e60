"""Finds the order of collectives that turns one layout into another, each on as few bytes as possible.

Data is sent while the local buffer is smallest: slices (free) and reduce-scatters come first, then changes from one
tensor dim to another (all-to-all) and relabelled axes (permute), then all-reduce, and all-gather last.

A mesh axis that splits a tensor holds a digit of the index of one tensor dim (``pase.tables.axis_layout``). It can take
a digit only if no other axis holds a part of it or holds an incompatible digit (halves and thirds of the same dim, for
example, would give devices shards of different sizes). Axes that block each other exchange what they hold in one
permute if that is enough. Otherwise the blocking axis changes its dim or is gathered first.

This module is for one pair of layouts; ``pase.tables.reshard`` prices many pairs at once. ``reshard_walk`` finds the
steps of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from pase.machine import COLLECTIVES, CollectiveKind, Mesh
from pase.tables.axis_layout import PARTIAL, REPLICATED, AxisLayout, Digit, blocks_of, digit_state, tensor_dim
from pase.tables.reshard_walk import SLICE, begun, walk_cases

__all__ = ["ReshardStep", "canonical", "path", "reshard_steps"]


ReshardKind = CollectiveKind | Literal["slice"]


@dataclass(frozen=True, kw_only=True)
class ReshardStep:
    """One collective (or a free slice). axes: the axes that it runs over, a bit set. after: the layout after the step.

    split: the axes that split the larger of its two local buffers, a bit set. The buffer's size is the tensor's divided
    by the ways of these axes.
    """

    kind: ReshardKind
    axes: int
    split: int
    after: AxisLayout


def path(src: AxisLayout, dst: AxisLayout, mesh: Mesh) -> list[AxisLayout]:
    """The layouts that a partitioner is asked for one after another, from src to dst, one collective apart.

    All-to-alls and permutes are separate steps (axes that leave one tensor dim for another together are one step).
    Slices come first and gathers last. Layouts with partial axes cannot be written in JAX, so callers must skip them.
    """
    rows = [src, *(m.after for m in reshard_steps(src, dst, mesh.sizes))]
    return rows if rows[-1] == dst else [*rows, dst]


@lru_cache(maxsize=1 << 14)
def reshard_steps(src: AxisLayout, dst: AxisLayout, sizes: tuple[int, ...]) -> tuple[ReshardStep, ...]:
    """The collectives that turn layout src into layout dst, in order.

    A partial axis of dst lets the tensor stay, or become, partial over that axis.
    """
    rows = np.array([src.states]), np.array([dst.states])
    (case,), (order,) = (x.tolist() for x in canonical(*rows, np.array(sizes)))
    dims = list(dict.fromkeys(s.dim for a in order for s in (src[a], dst[a]) if isinstance(s, Digit)))

    def named(axes: int) -> int:
        return sum(1 << a for i, a in enumerate(order) if axes >> i & 1)

    def layout(after: AxisLayout) -> AxisLayout:
        out = list(src)
        for a, ways, s in zip(order, case[0], after.renumbered(dims.__getitem__), strict=True):
            if ways > 1:
                out[a] = s
        return AxisLayout(out)

    return tuple(
        replace(m, axes=named(m.axes), split=named(m.split), after=layout(m.after))
        for m in canonical_steps(tuple(map(tuple, case)))
    )


def canonical(src: np.ndarray, dst: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All that the steps depend on, for pairs of rows of states [U, axes]: the *canonical* cases [U, 3, axes] (ways,
    src, dst), and the axis at each of their positions, [U, axes].

    A case has its axes sorted, and its tensor dims numbered in order of appearance. Axes that need no step count as
    having one way, so that cases that differ only in them are equal.
    """
    goal = np.where((dst == PARTIAL) & (src >= 0), REPLICATED, dst)
    unchanged = (src < 0) & ((dst == src) | (dst == PARTIAL))
    ways = np.where(unchanged, 1, sizes[None, :])
    src, goal = np.where(unchanged, REPLICATED, src), np.where(unchanged, REPLICATED, goal)
    keys = [np.where(x < 0, x, blocks_of(x)) for x in (src, goal)]
    order = np.lexsort((goal, src, keys[1], keys[0], ways), axis=1)
    ways, src, goal = (np.take_along_axis(x, order, axis=1) for x in (ways, src, goal))
    dims = tensor_dim(int(max(src.max(initial=0), goal.max(initial=0)))) + 1
    new_dim, dims_seen = np.full((len(src), dims), -1), np.zeros(len(src), dtype=np.int64)
    for a in range(src.shape[1]):
        for states in (src, goal):
            on = np.flatnonzero(states[:, a] >= 0)
            t = tensor_dim(states[on, a])
            new = new_dim[on, t] < 0
            new_dim[on[new], t[new]] = dims_seen[on[new]]
            dims_seen[on[new]] += 1
            states[on, a] = digit_state(new_dim[on, t], blocks_of(states[on, a]))
    return np.stack([ways, src, goal], axis=1), order


@lru_cache(maxsize=1 << 14)
def canonical_steps(case: tuple[tuple[int, ...], ...]) -> tuple[ReshardStep, ...]:
    """``reshard_steps`` of a canonical case."""
    axes = len(case[0])
    room, count = 2 * axes, [2 * axes + 1]
    while count[0] > room:
        room, done = count[0], [[[-1] * (3 + axes) for _ in range(count[0])]]
        walk_cases([list(map(list, case))], 0, 1, *begun(axes, whole=True), done, count)
    return tuple(
        ReshardStep(
            kind="slice" if kind == SLICE else COLLECTIVES[kind],
            axes=axes,
            split=split,
            after=AxisLayout.of(after),
        )
        for kind, axes, split, *after in done[0][: count[0]]
    )
