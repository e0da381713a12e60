"""Finds the order of collectives that turns one layout into another, each on as few bytes as possible.

Data is sent while the local buffer is smallest: slices (free) and reduce-scatters come first, then changes from one
tensor dim to another (all-to-all) and relabelled axes (permute), then all-reduce, and all-gather last.

A mesh axis that splits a tensor holds a digit of the index of one tensor dim (``pase.tables.layouts``). It can take a
digit only if no other axis holds a part of it or holds an incompatible digit (halves and thirds of the same dim, for
example, would give devices shards of different sizes). Axes that block each other exchange what they hold in one
permute if that is enough. Otherwise the blocking axis changes its dim or is gathered first.

This module is for one pair of layouts; ``pase.tables.reshard`` prices many pairs at once. ``reshard_walk`` finds the
steps of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pase.machine import COLLECTIVES, CollectiveKind, Mesh
from pase.tables.layouts import _DIM, PARTIAL, REPLICATED
from pase.tables.reshard_walk import SLICE, begun, walk_cases

__all__ = ["ReshardStep", "overlap", "path", "reshard_steps"]


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
    after: tuple[int, ...]


def path(src: Sequence[int], dst: Sequence[int], mesh: Mesh) -> list[tuple[int, ...]]:
    """The layouts that a partitioner is asked for one after another, from src to dst, one collective apart.

    All-to-alls and permutes are separate steps (axes that leave one tensor dim for another together are one step).
    Slices come first and gathers last. Layouts with PARTIAL cannot be written in JAX, so callers must skip them.
    """
    start, end = tuple(int(s) for s in src), tuple(int(s) for s in dst)
    rows = [start] + [m.after for m in reshard_steps(start, end, mesh.sizes)]
    return rows if rows[-1] == end else [*rows, end]


def overlap(a: int, ways_a: int, b: int, ways_b: int) -> bool:
    """Whether two digits overlap: they select from the same part of the same tensor dim.

    a, b: tensor dim * _DIM + stride (see ``reshard_walk``), or a negative state. ways_a, ways_b: the axes' sizes.
    """
    if a < 0 or b < 0 or a // _DIM != b // _DIM:
        return False
    return a % _DIM < b % _DIM * ways_b and b % _DIM < a % _DIM * ways_a


def reshard_steps(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]) -> list[ReshardStep]:
    """The collectives that turn layout src into layout dst, in order.

    A dst state of PARTIAL lets the tensor stay, or become, partial over that axis.
    """
    case, order, dims = _canonical(src, dst, sizes)

    def named(axes: int) -> int:
        return sum(1 << a for i, a in enumerate(order) if axes >> i & 1)

    def row(after: tuple[int, ...]) -> tuple[int, ...]:
        out = list(src)
        for a, (ways, _, _), s in zip(order, case, after, strict=True):
            if ways > 1:
                out[a] = s if s < 0 else dims[s // _DIM] * _DIM + s % _DIM
        return tuple(out)

    return [
        ReshardStep(kind=m.kind, axes=named(m.axes), split=named(m.split), after=row(m.after))
        for m in canonical_steps(case)
    ]


AxisChanges = tuple[tuple[int, int, int], ...]
"""All that the steps depend on: (ways, src, dst) per axis, sorted, with tensor dims numbered in order of appearance."""


def _canonical(
    src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]
) -> tuple[AxisChanges, list[int], list[int]]:
    """The canonical case, the axis at each of its positions, and the tensor dim for each of its dim numbers.

    Axes that need no step count as having one way, so that cases that differ only in them are equal.
    """
    rows = []
    for a, (s, d, ways) in enumerate(zip(src, dst, sizes, strict=True)):
        goal = REPLICATED if d == PARTIAL and s >= 0 else d
        unchanged = s < 0 and d in (s, PARTIAL)
        rows.append((1, REPLICATED, REPLICATED, a) if unchanged else (ways, s, goal, a))
    rows.sort(key=lambda r: (r[0], _blocks(r[1]), _blocks(r[2]), r[1], r[2]))
    dims = list(dict.fromkeys(s // _DIM for r in rows for s in r[1:3] if s >= 0))
    place = {t: i for i, t in enumerate(dims)}

    def numbered(s: int) -> int:
        return s if s < 0 else place[s // _DIM] * _DIM + s % _DIM

    case = tuple((ways, numbered(s), numbered(d)) for ways, s, d, _ in rows)
    return case, [r[3] for r in rows], dims


def _blocks(state: int) -> int:
    """The blocks of a digit; other states are unchanged."""
    return state if state < 0 else state % _DIM


@lru_cache(maxsize=1 << 14)
def canonical_steps(case: AxisChanges) -> tuple[ReshardStep, ...]:
    """``reshard_steps`` of a canonical case."""
    columns = [list(column) for column in zip(*case, strict=True)]
    room, count = 2 * len(case), [2 * len(case) + 1]
    while count[0] > room:
        room, done = count[0], [[[-1] * (3 + len(case)) for _ in range(count[0])]]
        walk_cases([columns], 0, 1, *begun(len(case), whole=True), done, count)
    return tuple(
        ReshardStep(
            kind="slice" if kind == SLICE else COLLECTIVES[kind], axes=axes, split=split, after=tuple(after)
        )
        for kind, axes, split, *after in done[0][: count[0]]
    )
