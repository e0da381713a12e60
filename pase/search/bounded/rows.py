"""The memory limit of a contracted problem: a capacity per point, and events per config.

Bytes that are held under every choice are subtracted from the limit. Points that another point implies are
dropped. What remains is a list of (point, change) events per kept node and config. The bytes in use are
the cumulative sum of the events of the chosen configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pase.search.types import MemoryProfile

__all__ = ["Limit", "Rows", "memory_rows"]


class Limit(NamedTuple):
    """The constraints of ``Rows``, as a named tuple that can be passed to compiled functions."""

    ptr: np.ndarray
    point: np.ndarray
    change: np.ndarray
    capacity: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Constraints ``cumsum(events of the chosen configs)[t] <= capacity[t]``.

    capacity: float64 [points], bytes. when: int64 [points], the point's index in the profile.
    slot: int64 [kept nodes + 1]. The configs of node r are rows slot[r] … slot[r+1].
    ptr: int64 [rows + 1], indices into point (int64) and change (float64 bytes).
    """

    capacity: np.ndarray
    when: np.ndarray
    slot: np.ndarray
    ptr: np.ndarray
    point: np.ndarray
    change: np.ndarray

    @property
    def limit(self) -> Limit:
        return Limit(ptr=self.ptr, point=self.point, change=self.change, capacity=self.capacity)

    @property
    def points(self) -> int:
        """The number of points."""
        return self.capacity.size

    def usage(self, choice: np.ndarray) -> np.ndarray:
        """Bytes at each point above those that are held under every choice, float64 [points]."""
        delta = np.zeros(self.points + 1)
        for row in self.slot[:-1] + choice:
            at = slice(self.ptr[row], self.ptr[row + 1])
            np.add.at(delta, self.point[at], self.change[at])
        return np.cumsum(delta)[: self.points]

    def priced(self, price: np.ndarray) -> np.ndarray:
        """float64 [rows]: the bytes of each config times ``price`` (per byte, at each point), summed over points."""
        suffix = np.append(np.cumsum(price[::-1])[::-1], 0.0)
        terms = np.append(self.change * suffix[self.point], 0.0)
        return np.where(self.ptr[1:] > self.ptr[:-1], np.add.reduceat(terms, self.ptr[:-1]), 0.0)

    def dense(self, points: np.ndarray) -> np.ndarray:
        """float64 [rows, len(points)]: the bytes of each config at the given points."""
        out = np.zeros((self.ptr.size - 1, points.size))
        row_of = np.repeat(np.arange(self.ptr.size - 1), np.diff(self.ptr))
        at = np.searchsorted(points, self.point)  # an event at t counts at every point >= t
        ok = at < points.size
        np.add.at(out, (row_of[ok], at[ok]), self.change[ok])
        return np.cumsum(out, axis=1)


Spans = dict[tuple[int, int], np.ndarray]
"""Interval of the profile -> the bytes of each config in the interval above the node's minimum, float64 [K]."""


def memory_rows(
    memory: MemoryProfile,
    sizes: list[int],
    members: list[list[tuple[int, np.ndarray]]],
    fixed_bytes: list[tuple[int, float]],
) -> Rows:
    """The memory constraints over kept nodes. sizes: the number of configs of each.

    members: per kept node, (original node, original config under each config [K]).
    fixed_bytes: (interval of the profile, bytes held in it under every choice).
    """
    points = int(memory.stop.max(initial=0))
    spans, fixed = _variable(memory, members, fixed_bytes, points)
    capacity = memory.limit_bytes - fixed
    times = np.array(sorted({t for mine in spans for span in mine for t in span}), np.int64)
    slot = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    if not times.size:
        room = capacity.min(initial=np.inf)
        return _without_events(slot, room if np.isfinite(room) else 0.0)
    outside = np.concatenate([capacity[: times[0]], capacity[times[-1] :]]).min(initial=np.inf)
    # Points between two events of the variable bytes have the same live set, so only the tightest one is needed.
    cuts = times[:-1]
    tight = np.minimum.reduceat(capacity[: times[-1]], cuts) if cuts.size else np.zeros(0)
    keep = _binding(spans, times, tight)
    rank = np.concatenate([[0], np.cumsum(keep)]).astype(np.int64)  # interval index -> kept point
    kept, when = tight[keep], cuts[keep]
    if outside < 0 or bool((tight[~keep] < 0).any()):
        # No choice can satisfy this point. Keep it as a point of its own, so that its shortage stays visible.
        kept = np.append(kept, min(outside, float(tight[~keep].min(initial=0.0))))
        when = np.append(when, points)
    ptr, point, change = _events(spans, times, rank, sizes)
    return Rows(capacity=kept, when=when, slot=slot, ptr=ptr, point=point, change=change)


def _variable(
    memory: MemoryProfile,
    members: list[list[tuple[int, np.ndarray]]],
    fixed_bytes: list[tuple[int, float]],
    points: int,
) -> tuple[list[Spans], np.ndarray]:
    """(Per kept node, its configs' bytes above their minimum; the bytes held under every choice, float64 [points])."""
    base = np.zeros(points + 1)

    def hold(i: int, nbytes: float) -> None:
        base[memory.start[i]] += nbytes
        base[memory.stop[i]] -= nbytes

    for i, nbytes in fixed_bytes:
        hold(i, nbytes)
    spans: list[Spans] = []
    for group in members:
        mine: Spans = {}
        for i, configs in ((i, configs) for v, configs in group for i in memory.live.get(v, ())):
            held = memory.bytes[i][configs]
            least = float(held.min())
            hold(i, least)
            if held.max() > least:
                span = (int(memory.start[i]), int(memory.stop[i]))
                excess = held - least
                mine[span] = mine[span] + excess if span in mine else excess
        spans.append(mine)
    return spans, np.cumsum(base)[:points]


def _without_events(slot: np.ndarray, room: float) -> Rows:
    """The one constraint that is left if all configs of each node hold the same bytes."""
    return Rows(
        capacity=np.array([room]),
        when=np.zeros(1, np.int64),
        slot=slot,
        ptr=np.zeros(int(slot[-1]) + 1, np.int64),
        point=np.zeros(0, np.int64),
        change=np.zeros(0),
    )


def _binding(spans: list[Spans], times: np.ndarray, tight: np.ndarray) -> np.ndarray:
    """bool [intervals between times]: False if the limit cannot bind, or if an adjacent interval holds at least the
    same bytes and has no more capacity."""
    number = {int(t): i for i, t in enumerate(times)}
    peak = np.zeros(times.size)
    starts, ends = np.zeros(times.size, bool), np.zeros(times.size, bool)
    for mine in spans:
        for (a, b), excess in mine.items():
            peak[number[a]] += excess.max()
            peak[number[b]] -= excess.max()
            starts[number[a]] = ends[number[b]] = True
    over = np.cumsum(peak)[: tight.size] > tight
    for i in np.flatnonzero(over):
        behind = i + 1 < tight.size and not ends[i + 1] and tight[i + 1] <= tight[i]
        before = i > 0 and not starts[i] and tight[i - 1] <= tight[i]
        over[i] = not (behind or before)
    return over


def _events(
    spans: list[Spans], times: np.ndarray, rank: np.ndarray, sizes: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ptr, point, change) of ``Rows``. rank: maps the index of a time to a kept point."""
    number = {int(t): i for i, t in enumerate(times)}
    ptr = [0]
    point: list[np.ndarray] = []
    change: list[np.ndarray] = []
    for r, mine in enumerate(spans):
        at = np.array([(rank[number[a]], rank[number[b]]) for a, b in mine], np.int64).reshape(-1, 2)
        table = np.array(list(mine.values())).reshape(-1, sizes[r])
        live = at[:, 1] > at[:, 0]
        at, table = at[live], table[live]
        for k in range(sizes[r]):
            has = table[:, k] > 0
            where = at[has].reshape(-1)
            what = np.stack([table[has, k], -table[has, k]], axis=1).reshape(-1)
            times_k, inverse = np.unique(where, return_inverse=True)
            total = np.zeros(times_k.size)
            np.add.at(total, inverse.reshape(-1), what)
            nonzero = total != 0
            point.append(times_k[nonzero])
            change.append(total[nonzero])
            ptr.append(ptr[-1] + int(nonzero.sum()))
    none = np.zeros(0, np.int64)
    return (
        np.array(ptr, np.int64),
        np.concatenate(point) if point else none,
        np.concatenate(change) if change else none.astype(float),
    )
