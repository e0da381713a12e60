"""Finds the order of collectives that turns one layout into another, each on as few bytes as possible.

Data is sent while the local buffer is smallest: slices (free) and reduce-scatters come first, then changes from one
tensor dim to another (all-to-all) and relabelled axes (permute), then all-reduce, and all-gather last.

A mesh axis that splits a tensor holds a digit of the index of one tensor dim (``pase.tables.layouts``). It can take a
digit only if no other axis holds a part of it or holds an incompatible digit (halves and thirds of the same dim, for
example, would give devices shards of different sizes). Axes that block each other exchange what they hold in one
permute if that is enough. Otherwise the blocking axis changes its dim or is gathered first.

This module is the reference for one pair of layouts; ``pase.tables.reshard`` prices many pairs at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import lcm
from typing import Literal

from pase.machine import CollectiveKind, Mesh
from pase.tables.layouts import _DIM, PARTIAL, REPLICATED

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

    a, b: tensor dim * _DIM + stride (see ``_LayoutWalk``), or a negative state. ways_a, ways_b: the axes' sizes.
    """
    if a < 0 or b < 0 or a // _DIM != b // _DIM:
        return False
    return a % _DIM < b % _DIM * ways_b and b % _DIM < a % _DIM * ways_a


def _compatible(a: int, ways_a: int, b: int, ways_b: int) -> bool:
    """Whether two axes can hold these digits together so that all devices have shards of equal size. Within a dim, the
    stride of the upper digit must be a multiple of the whole lower digit."""
    if a < 0 or b < 0 or a // _DIM != b // _DIM:
        return True
    low, high = (a % _DIM, b % _DIM * ways_b) if a > b else (b % _DIM, a % _DIM * ways_a)
    return low % high == 0


def _disjoint(a: int, ways_a: int, b: int, ways_b: int) -> bool:
    """Whether two digits select from different parts, or from different tensor dims."""
    return not overlap(a, ways_a, b, ways_b)


def _even(states: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether all devices hold shards of equal size."""
    held = zip(states, sizes, strict=True)
    return all(_compatible(s, n, t, m) for (s, n), (t, m) in combinations(held, 2))


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
    w, extent = _walked(case)
    return tuple(
        ReshardStep(kind=kind, axes=axes, split=split, after=tuple(_converted(after, extent)))
        for kind, axes, split, after in w.done
    )


def canonical_collectives(case: AxisChanges) -> tuple[tuple[CollectiveKind, int, int], ...]:
    """(kind, axes, split) of its steps, without the free ones."""
    w, _ = _walked(case)
    return tuple((kind, axes, split) for kind, axes, split, _ in w.done if kind != "slice")


def _converted(states: Sequence[int], extent: Mapping[int, int]) -> list[int]:
    """Convert blocks to strides, or strides to blocks."""
    return [s if s < 0 else s - s % _DIM + extent[s // _DIM] // (s % _DIM) for s in states]


def _walked(case: AxisChanges) -> tuple[_LayoutWalk, dict[int, int]]:
    """The finished walk of a case, and per tensor dim an extent that can stand for the real one: it is divisible by the
    number of blocks of every digit, so that each digit has a whole stride."""
    sizes, src, dst = zip(*case, strict=True)
    extent: dict[int, int] = {}
    for s in (*src, *dst):
        if s >= 0:
            extent[s // _DIM] = lcm(extent.get(s // _DIM, 1), s % _DIM)
    w = _LayoutWalk(_converted(src, extent), _converted(dst, extent), sizes, extent)
    while w.unfinished() and (
        w.enter("slice", REPLICATED)
        or w.enter("reduce_scatter", PARTIAL)
        or w.exchange(movers=False)
        or w.all_to_all(solid=True)
        or w.exchange(movers=True)
        or w.sink()
        or w.relabel()
        or w.enter("slice", REPLICATED, solid=False)
        or w.enter("reduce_scatter", PARTIAL, solid=False)
        or w.all_to_all(solid=False)
        or w.unblock()
    ):
        pass
    w.all_reduce([a for a in w.axes if w.now[a] == PARTIAL and w.goal[a] == REPLICATED])
    w.gather([a for a in w.axes if w.now[a] >= 0 > w.goal[a]])
    return w, extent


_MERGED = ("slice", "reduce_scatter", "permute")
"""Two consecutive steps of the same kind are merged into one if it is one of these kinds."""

Span = tuple[int, int, int]
"""The range that digits select from: (tensor dim, low, high). A digit of stride s and n ways is (dim, s, s * n)."""


class _LayoutWalk:
    """Moves the layout ``now`` step by step to ``goal``. Each method adds the steps of its kind and returns whether
    there were any.

    Digits are (tensor dim, stride) here. The digit right below one of stride s, with n ways, has stride s / n. A digit
    *hangs* if it is neither the topmost of its dim nor right below another; then shards are not contiguous. A change is
    *solid* if no digit hangs that did not hang before. Partitioners express only such changes as one collective.
    """

    def __init__(
        self, now: list[int], goal: list[int], sizes: Sequence[int], extent: Mapping[int, int]
    ) -> None:
        self.now, self.goal, self.sizes = now, goal, sizes
        self.axes = range(len(sizes))
        self.done: list[tuple[ReshardKind, int, int, tuple[int, ...]]] = []  # the fields of each ReshardStep
        self.extent = extent
        # If now or goal itself has incompatible digits (such as halves and thirds of the same dim), digits may be held
        # together unless they overlap.
        self._apart = _compatible if _even(now, sizes) and _even(goal, sizes) else _disjoint
        self._last: ReshardKind | None = None
        self._before = now  # the layout before the last step
        # Derived from ``now``; cleared by each step.
        self._holders: list[list[int]] | None = None
        self._tangled: list[list[int]] | None = None
        self._hung: set[int] | None = None

    def unfinished(self) -> bool:
        """Whether some axis does not hold its goal digit yet."""
        return any(g >= 0 and s != g for s, g in zip(self.now, self.goal, strict=True))

    def enter(self, kind: ReshardKind, state: int, *, solid: bool = True) -> bool:
        """All free axes in this state (REPLICATED: slice, PARTIAL: reduce-scatter) take their digits.

        solid: an axis whose digit would hang takes the topmost free place in its tensor dim instead.
        """
        free = [a for a in self.axes if self.now[a] == state and self.goal[a] >= 0 and self._free(a)]
        if not free:
            return False
        change = {a: self.goal[a] for a in free}
        while solid and (hanging := self._hanging(change) & change.keys()):
            change = {a: digit for a, digit in change.items() if a not in hanging}
        for a in [a for a in free if a not in change]:
            t = self.goal[a] // _DIM
            held = self._spans([change.get(b, self.now[b]) for b in self.axes], self.axes)
            room = _minus([s for s in self._spans(self.goal, self.axes) if s[0] == t], held)
            place = _tile(room[-1:], [a], self.sizes, whole=False)
            if place and self._solid(change | place) and self._fits(change | place):
                change |= place
        return self._reshard_step(kind, change)

    def _fits(self, change: dict[int, int]) -> bool:
        """Whether all axes can hold their digits together after the change."""
        after = [(change.get(a, self.now[a]), self.sizes[a]) for a in self.axes]
        return all(self._apart(s, n, t, m) for (s, n), (t, m) in combinations(after, 2))

    def all_to_all(self, *, solid: bool) -> bool:
        """All free axes that leave one tensor dim for another one together.

        solid: only if a partitioner can express it: the dims differ, and shards stay contiguous.
        """
        for (t, u), change in self._departures().items():
            if not solid or (t != u and self._solid(change)):
                return self._reshard_step("all_to_all", change)
        return False

    def _departures(self) -> dict[tuple[int, int], dict[int, int]]:
        """The free axes that change their digit, with their new digits, by the tensor dims that they leave and
        enter."""
        return self._together(
            {a: self.goal[a] for a in self.axes if 0 <= self.now[a] != self.goal[a] >= 0 and self._free(a)}
        )

    def _together(self, digits: dict[int, int]) -> dict[tuple[int, int], dict[int, int]]:
        """Groups the new digits of axes by the tensor dims that the axes leave and enter."""
        out: dict[tuple[int, int], dict[int, int]] = {}
        for a, s in digits.items():
            out.setdefault((self.now[a] // _DIM, s // _DIM), {})[a] = s
        return out

    def exchange(self, *, movers: bool) -> bool:
        """A permute among axes that block each other, after which each axis has its goal.

        Digits that no axis holds yet are first taken by axes that hold nothing (a slice or a reduce-scatter).

        Digits that no axis wants go to axes that are gathered later.

        movers: digits may also be taken by axes whose own digit no axis wants (an all-to-all).
        """
        return any([self._exchange(g, movers) for g in list(self._tangles())])

    def sink(self) -> bool:
        """A permute within a tensor dim that gives the lowest digits to the axes that are free to leave the dim.

        When they then leave, no digit hangs below theirs.
        """
        for (t, u), change in self._departures().items():
            inside = [a for a in self.axes if self.now[a] // _DIM == t and self.now[a] >= 0]
            held = _joined(self._spans(self.now, inside))
            place = _tile(held, sorted(inside, key=lambda a: a in change), self.sizes)
            if t != u and place and _nested(held) and self._solid(place | change):
                return self._reshard_step("permute", {a: s for a, s in place.items() if s != self.now[a]})
        return False

    def relabel(self) -> bool:
        """A permute that gives blocked axes their goals. The axes that held these digits take those given up for it."""
        return any([self._relabel(g) for g in list(self._tangles())])

    def _tangles(self) -> list[list[int]]:
        """Groups of axes, linked if one holds what another wants. In each group, at least one axis is blocked."""
        if self._tangled is None:
            holders = self._held_by()
            group = {a: {a} for a in self.axes if self.now[a] != self.goal[a]} if any(holders) else {}
            for a in group:
                for b in holders[a]:
                    if b in group and group[a] is not group[b]:
                        group[a] |= group[b]
                        for c in group[b]:
                            group[c] = group[a]
            found = {min(g): sorted(g) for g in group.values()}
            self._tangled = [g for g in found.values() if any(holders[a] for a in g)]
        return self._tangled

    def _held_by(self) -> list[list[int]]:
        """Per axis, the other axes that hold a part of its goal or a digit that is not compatible with it."""
        if self._holders is None:
            self._holders = [
                [b for b in self.axes if b != a and not self._apart(g, n, self.now[b], self.sizes[b])]
                if g >= 0
                else []
                for a, (g, n) in enumerate(zip(self.goal, self.sizes, strict=True))
            ]
        return self._holders

    def _exchange(self, group: list[int], movers: bool) -> bool:
        """``exchange`` for one group of axes."""
        held, wanted = _joined(self._spans(self.now, group)), _joined(self._spans(self.goal, group))
        if not _nested(held + wanted):
            return False
        takers = [a for a in group if self.now[a] < 0 <= self.goal[a]]
        if movers:
            occupied = [a for a in group if self.goal[a] >= 0 and self._unwanted(a, wanted)]
            if not occupied:  # the same as without movers, which was already tried
                return False
            takers += occupied
        taken = _tile(_minus(wanted, held), takers, self.sizes)
        rounds = None if taken is None else self._rounds(taken)
        if taken is None or rounds is None:
            return False
        spare = _minus(held, wanted + self._spans(self.now, taken))
        swapped = _tile(spare, [a for a in group if self.goal[a] < 0 <= self.now[a]], self.sizes)
        if swapped is None:
            return False
        self._reshard_step("slice", {a: digit for a, digit in taken.items() if self.now[a] == REPLICATED})
        self._reshard_step(
            "reduce_scatter", {a: digit for a, digit in taken.items() if self.now[a] == PARTIAL}
        )
        for change in rounds:
            self._reshard_step("all_to_all", change)
        self._permute(group, {a: self.goal[a] for a in group if self.goal[a] >= 0} | swapped)
        return True

    def _rounds(self, taken: dict[int, int]) -> list[dict[int, int]] | None:
        """The all-to-alls by which axes take their digits, after those of axes that hold nothing. None if shards would
        become less contiguous on the way."""
        pending = self._together({a: digit for a, digit in taken.items() if self.now[a] >= 0})
        changed = {a: digit for a, digit in taken.items() if self.now[a] < 0}
        if pending and not self._solid(changed):
            return None
        rounds = []
        while pending:
            hung = self._hanging(changed)
            possible = (
                k for k, change in pending.items() if self._hanging(changed | change) <= hung - change.keys()
            )
            if (k := next(possible, None)) is None:
                return None
            rounds.append(pending.pop(k))
            changed |= rounds[-1]
        return rounds

    def _unwanted(self, a: int, wanted: list[Span]) -> bool:
        """Whether an axis holds only what no axis of the group wants."""
        span = self._spans(self.now, [a])
        return bool(span) and _minus(span, wanted) == span

    def _relabel(self, group: list[int]) -> bool:
        """``relabel`` for one group of axes."""
        held = _joined(self._spans(self.now, group))
        blocked = [a for a in group if self.goal[a] >= 0 and not self._free(a)]
        wanted = _joined(self._spans(self.goal, blocked))
        if not _nested(held + wanted) or _minus(wanted, held):
            return False
        others = [a for a in group if a not in blocked and self.now[a] >= 0]
        # Axes that change again later get the lower digits, so that no digit hangs after they leave.
        others.sort(key=lambda a: self.goal[a] >= 0)
        swapped = _tile(_minus(held, wanted), others, self.sizes)
        if swapped is None:
            return False
        self._permute(group, {a: self.goal[a] for a in blocked} | swapped)
        return True

    def _permute(self, group: list[int], digits: dict[int, int]) -> None:
        """Axes of the group take these digits, and the others give theirs up. Partial axes are reduced first."""
        self.all_reduce([a for a in group if self.now[a] == PARTIAL])
        after = {a: digits.get(a, REPLICATED) for a in group}
        self._reshard_step("permute", {a: state for a, state in after.items() if state != self.now[a]})

    def _solid(self, change: dict[int, int]) -> bool:
        """Whether shards stay as contiguous as they are."""
        if self._hung is None:
            self._hung = self._hanging({})
        return self._hanging(change) <= self._hung - change.keys()

    def _hanging(self, change: dict[int, int]) -> set[int]:
        """Axes whose digit hangs after the change: it is neither topmost in its dim nor right below another."""
        lows = {t * _DIM + extent for t, extent in self.extent.items()}
        highs = {}
        for a, s in enumerate(self.now):
            s = change.get(a, s)
            if s >= 0:
                lows.add(s)
                highs[a] = s + s % _DIM * (self.sizes[a] - 1)
        return {a for a, high in highs.items() if high not in lows}

    def unblock(self) -> bool:
        """Gather one axis that blocks another: one that is unsplit in the goal if possible, otherwise the smallest."""
        blocked = [a for a in self.axes if self.now[a] != self.goal[a] >= 0]
        holders = {b for a in blocked for b in self._held_by()[a]}
        if not holders:
            return False
        self.all_reduce([a for a in self.axes if self.now[a] == PARTIAL and self.goal[a] == REPLICATED])
        self.gather([min(holders, key=lambda b: (self.goal[b] >= 0, self.sizes[b], b))])
        return True

    def all_reduce(self, axes: list[int]) -> None:
        """Reduce these partial axes."""
        self._reshard_step("all_reduce", dict.fromkeys(axes, REPLICATED))

    def gather(self, axes: list[int]) -> None:
        """Gather one tensor dim after the other, as XLA does."""
        for t in sorted({self.now[a] // _DIM for a in axes}, reverse=True):
            self._reshard_step("all_gather", {a: REPLICATED for a in axes if self.now[a] // _DIM == t})

    def _reshard_step(self, kind: ReshardKind, change: dict[int, int]) -> bool:
        """Apply a change as a step of this kind, merged with the last step if possible. Returns whether it changed any
        axis."""
        if not change:
            return False
        if kind in _MERGED and kind == self._last:
            split = self.done.pop()[2]
        else:
            split, self._before = self._split(), self.now.copy()
        for a, state in change.items():
            self.now[a] = state
        if kind == "all_gather":
            split = self._split()
        self._holders = self._tangled = self._hung = None
        self._last = None
        if axes := _bits(a for a in self.axes if self.now[a] != self._before[a]):
            self._last = kind
            self.done.append((kind, axes, split, tuple(self.now)))
        return True

    def _split(self) -> int:
        """The axes that split the tensor now, as a bit set."""
        return _bits(a for a in self.axes if self.now[a] >= 0)

    def _free(self, a: int) -> bool:
        """Whether no axis blocks the goal of this axis."""
        return not self._held_by()[a]

    def _spans(self, layout: list[int], axes: Iterable[int]) -> list[Span]:
        """The spans of these axes in a layout."""
        return [(s // _DIM, s % _DIM, s % _DIM * self.sizes[a]) for a in axes if (s := layout[a]) >= 0]


def _bits(axes: Iterable[int]) -> int:
    """The axes as a bit set."""
    out = 0
    for a in axes:
        out |= 1 << a
    return out


def _minus(spans: list[Span], other: list[Span]) -> list[Span]:
    """The parts of the spans that lie outside of the other spans."""
    for t, low, high in other:
        cut: list[Span] = []
        for s in spans:
            if s[0] != t or s[2] <= low or high <= s[1]:
                cut.append(s)
            else:
                cut += [(t, lo, hi) for lo, hi in ((s[1], low), (high, s[2])) if lo < hi]
        spans = cut
    return _joined(spans)


def _joined(spans: list[Span]) -> list[Span]:
    """The same spans, with adjacent ones merged."""
    if len(spans) < 2:
        return list(spans)
    out: list[Span] = []
    for t, low, high in sorted(spans):
        if out and out[-1][0] == t and out[-1][2] == low:
            low = out.pop()[1]
        out.append((t, low, high))
    return out


def _nested(spans: list[Span]) -> bool:
    """Whether all bounds within a dim divide one another. If not, digits of 2 and 3 ways cut across each other."""
    bounds = sorted({(t, edge) for t, low, high in spans for edge in (low, high)})
    return all(t != u or high % low == 0 for (t, low), (u, high) in pairwise(bounds))


def _tile(
    spans: list[Span], axes: list[int], sizes: Sequence[int], whole: bool = True
) -> dict[int, int] | None:
    """Digits for some of the axes that together cover exactly these spans, with the first axes major. None if there are
    no such digits.

    whole: if False, the digits need to cover only the tops of the spans.
    """
    out: dict[int, int] = {}
    for t, low, high in spans:
        unused = [a for a in axes if a not in out]
        while low < high:
            a = next((a for a in unused if high % (low * sizes[a]) == 0), None)
            if a is None:
                if whole:
                    return None
                break
            unused.remove(a)
            high //= sizes[a]
            out[a] = t * _DIM + high
    return out
