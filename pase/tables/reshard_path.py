"""The order in which one layout becomes another: possible collectives, each as small as it gets.

Everything moves while the local buffer is smallest: slices (free) and reduce-scatters first, then moves
from one tensor dim to another (all-to-all) and relabelled axes (permute), then all-reduce, all-gather last.
An axis can take a digit only where no other axis holds a part of it. Axes that stand in each other's way
exchange what they hold in one permute where that serves; else the holder moves away or is gathered first.

This is the definition, for one pair of layouts; ``pase.tables.reshard`` prices many pairs at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pase.machine import CollectiveKind, Mesh
from pase.tables.layouts import _DIM, PARTIAL, REPLICATED

__all__ = ["Move", "moves", "overlap", "path"]


Kind = CollectiveKind | Literal["slice"]


@dataclass(frozen=True, kw_only=True)
class Move:
    """One collective (or a free slice) over ``axes`` (a bit set); ``after``: the layout that it leaves.

    split: the axes (a bit set) that split the larger of its local buffers: the tensor over their ways.
    """

    kind: Kind
    axes: int
    split: int
    after: tuple[int, ...]


def path(src: Sequence[int], dst: Sequence[int], mesh: Mesh) -> list[tuple[int, ...]]:
    """The layouts to lead a partitioner through, src and dst included: one collective between neighbours.

    All-to-alls stand alone (axes that leave one tensor dim for another together are one), as do permutes;
    slices come first and gathers last. Rows that hold PARTIAL cannot be written down in JAX: skip them.
    """
    start, end = tuple(int(s) for s in src), tuple(int(s) for s in dst)
    rows = [start] + [m.after for m in moves(start, end, mesh.sizes)]
    return rows if rows[-1] == end else [*rows, end]


def overlap(a: int, ways_a: int, b: int, ways_b: int) -> bool:
    """Do two digits select from the same part of the same tensor dim?"""
    if a < 0 or b < 0 or a // _DIM != b // _DIM:
        return False
    return a % _DIM < b % _DIM * ways_b and b % _DIM < a % _DIM * ways_a


def moves(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]) -> list[Move]:
    """The collectives from layout src to layout dst, in order.

    A dst state of PARTIAL lets the tensor stay, or become, partial over that axis.
    """
    w = _Walk(list(src), list(dst), sizes)
    while (
        w.enter("slice", REPLICATED)
        or w.enter("reduce_scatter", PARTIAL)
        or w.exchange(movers=False)
        or w.all_to_all(solid=True)
        or w.exchange(movers=True)
        or w.all_to_all(solid=False)
        or w.unblock()
    ):
        pass
    w.all_reduce([a for a in w.axes if w.now[a] == PARTIAL and w.goal[a] == REPLICATED])
    w.gather([a for a in w.axes if w.now[a] >= 0 > w.goal[a]])
    return w.done


Span = tuple[int, int, int]
"""What digits select from: (tensor dim, low, high); a digit of stride s and n ways is (dim, s, s * n)."""


class _Walk:
    """``now`` on its way to ``goal``; a method makes its kind of moves, if there are any, and tells."""

    def __init__(self, now: list[int], goal: list[int], sizes: Sequence[int]) -> None:
        self.now, self.goal, self.sizes = now, goal, sizes
        self.axes = range(len(sizes))
        self.done: list[Move] = []
        spans = [s for layout in (now, goal) for a in self.axes for s in self._span(layout, a)]
        self.top = {t: max(high for u, _, high in spans if u == t) for t, _, _ in spans}

    def enter(self, kind: Kind, state: int) -> bool:
        """All free axes in this state (REPLICATED: slice, PARTIAL: reduce-scatter) take their digits."""
        free = [a for a in self.axes if self.now[a] == state and self.goal[a] >= 0 and self._free(a)]
        return self._move(kind, {a: self.goal[a] for a in free})

    def all_to_all(self, *, solid: bool) -> bool:
        """All free axes that leave one tensor dim for another together. solid: only where a partitioner can say
        so: the dims differ, and shards stay contiguous."""
        free = [a for a in self.axes if 0 <= self.now[a] != self.goal[a] >= 0 and self._free(a)]
        ends = {a: (self.now[a] // _DIM, self.goal[a] // _DIM) for a in free}
        for pair in dict.fromkeys(ends.values()):
            change = {a: self.goal[a] for a in free if ends[a] == pair}
            if not solid or (pair[0] != pair[1] and self._solid(change)):
                return self._move("all_to_all", change)
        return False

    def exchange(self, *, movers: bool) -> bool:
        """A permute among axes that stand in each other's way, where all that they want to hold is held.

        What is not held yet is first taken by axes that hold nothing (a slice, a reduce-scatter) and, if
        ``movers``, by those that hold what nobody wants (an all-to-all). What nobody wants goes to the axes
        that will be gathered.
        """
        return any([self._exchange(g, movers) for g in self._tangles()])

    def _tangles(self) -> list[list[int]]:
        """Sets of axes, linked where one holds what another wants; in each, one cannot move freely."""
        off = [a for a in self.axes if self.now[a] != self.goal[a]]
        group = {a: {a} for a in off}
        for a in off:
            for b in off:
                if a != b and self._overlap(self.goal, a, self.now, b) and group[a] is not group[b]:
                    group[a] |= group[b]
                    for c in group[b]:
                        group[c] = group[a]
        found = {min(g): sorted(g) for g in group.values()}
        return [g for g in found.values() if any(self.goal[a] >= 0 and not self._free(a) for a in g)]

    def _exchange(self, group: list[int], movers: bool) -> bool:
        held = [s for a in group for s in self._span(self.now, a)]
        wanted = [s for a in group for s in self._span(self.goal, a)]
        spare, gaps = _minus(held, wanted), _minus(wanted, held)
        if not _nested(held + wanted):
            return False
        takers = [a for a in group if self.now[a] < 0 <= self.goal[a]]
        if movers:
            takers += [
                a for a in group if 0 <= self.now[a] != self.goal[a] >= 0 and self._unwanted(a, wanted)
            ]
        taken = _tile(gaps, takers, self.sizes)
        if taken is None:
            return False
        spare = _minus(spare, [s for a in taken for s in self._span(self.now, a)])
        kept = _tile(spare, [a for a in group if self.goal[a] < 0 <= self.now[a]], self.sizes)
        if kept is None:
            return False
        kinds: dict[int, Kind] = {REPLICATED: "slice", PARTIAL: "reduce_scatter"}
        for state, kind in kinds.items():
            self._move(kind, {a: digit for a, digit in taken.items() if self.now[a] == state})
        for a, digit in taken.items():
            if self.now[a] != digit:
                self._move("all_to_all", {a: digit})
        self.all_reduce([a for a in group if self.now[a] == PARTIAL])
        after = {a: self.goal[a] if self.goal[a] >= 0 else kept.get(a, REPLICATED) for a in group}
        self._move("permute", {a: state for a, state in after.items() if state != self.now[a]})
        return True

    def _solid(self, change: dict[int, int]) -> bool:
        """Are the shards contiguous after the change? Each digit must lie right below another, or topmost."""
        after = [change.get(a, self.now[a]) for a in self.axes]
        spans = [s for a in self.axes for s in self._span(after, a)]
        lows = {(t, low) for t, low, _ in spans} | set(self.top.items())
        return all((t, high) in lows for t, _, high in spans)

    def _unwanted(self, a: int, wanted: list[Span]) -> bool:
        span = self._span(self.now, a)
        return _minus(span, wanted) == span

    def unblock(self) -> bool:
        """Gather one axis that stands in the way: one that ends unsplit, else the smallest."""
        blocked = [a for a in self.axes if self.now[a] != self.goal[a] >= 0]
        holders = {
            b for a in blocked for b in self.axes if b != a and self._overlap(self.goal, a, self.now, b)
        }
        if not holders:
            return False
        self.all_reduce([a for a in self.axes if self.now[a] == PARTIAL and self.goal[a] == REPLICATED])
        self.gather([min(holders, key=lambda b: (self.goal[b] >= 0, self.sizes[b], b))])
        return True

    def all_reduce(self, axes: list[int]) -> None:
        self._move("all_reduce", dict.fromkeys(axes, REPLICATED))

    def gather(self, axes: list[int]) -> None:
        self._move("all_gather", dict.fromkeys(axes, REPLICATED))

    def _move(self, kind: Kind, change: dict[int, int]) -> bool:
        if not change:
            return False
        before = self._split()
        for a, state in change.items():
            self.now[a] = state
        split = self._split() if kind == "all_gather" else before
        self.done.append(Move(kind=kind, axes=_bits(change), split=split, after=tuple(self.now)))
        return True

    def _split(self) -> int:
        return _bits(a for a in self.axes if self.now[a] >= 0)

    def _overlap(self, layout: list[int], a: int, other: list[int], b: int) -> bool:
        return overlap(layout[a], self.sizes[a], other[b], self.sizes[b])

    def _free(self, a: int) -> bool:
        return not any(b != a and self._overlap(self.goal, a, self.now, b) for b in self.axes)

    def _span(self, layout: list[int], a: int) -> list[Span]:
        state = layout[a]
        return [] if state < 0 else [(state // _DIM, state % _DIM, state % _DIM * self.sizes[a])]


def _bits(axes: Iterable[int]) -> int:
    return sum(1 << a for a in axes)


def _minus(spans: list[Span], other: list[Span]) -> list[Span]:
    """What of the spans lies outside of the others; neighbours are joined."""
    for t, low, high in other:
        cut: list[Span] = []
        for s in spans:
            if s[0] != t or s[2] <= low or high <= s[1]:
                cut.append(s)
            else:
                cut += [(t, lo, hi) for lo, hi in ((s[1], low), (high, s[2])) if lo < hi]
        spans = cut
    out: list[Span] = []
    for s in sorted(spans):
        if out and out[-1][0] == s[0] and out[-1][2] == s[1]:
            out[-1] = (s[0], out[-1][1], s[2])
        else:
            out.append(s)
    return out


def _nested(spans: list[Span]) -> bool:
    """Do all bounds within a dim divide one another? Else digits of 2 and 3 ways cut across each other."""
    bounds = sorted({(t, edge) for t, low, high in spans for edge in (low, high)})
    return all(t != u or high % low == 0 for (t, low), (u, high) in pairwise(bounds))


def _tile(spans: list[Span], axes: list[int], sizes: Sequence[int]) -> dict[int, int] | None:
    """Digits for some of the axes that are together exactly these spans, first axes major; else None."""
    out: dict[int, int] = {}
    for t, low, high in spans:
        left = [a for a in axes if a not in out]
        while low < high:
            a = next((a for a in left if high % (low * sizes[a]) == 0), None)
            if a is None:
                return None
            left.remove(a)
            high //= sizes[a]
            out[a] = t * _DIM + high
    return out
