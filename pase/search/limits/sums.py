"""The memory limit as a few sums over nodes: points of the profile, or averages of similar points.

The live bytes are limited at every point of a ``MemoryProfile``, so their average over a group of points is limited as
well. Points at which equal parts of the model are live (for example, each layer's rematerialised region) form one
group. Equal layers then remain equal under a price per byte, and can be folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.search.types import MemoryProfile

__all__ = ["Sums", "alike", "sums_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Limited sums.

    held: per node, float64 [K, sums], bytes above the node's minimum. room: float64 [sums], the bytes left for them.
    """

    held: tuple[np.ndarray, ...]
    room: np.ndarray

    def used(self, choice: np.ndarray) -> np.ndarray:
        """Bytes above the minimum in each sum; float64 [sums]."""
        taken = [h[k] for h, k in zip(self.held, choice, strict=True)]
        return np.sum(taken, axis=0) if taken else np.zeros(self.room.size)


def alike(memory: MemoryProfile) -> np.ndarray:
    """int64 [points]: points with the same number have equal live bytes if equal nodes choose alike."""
    points = int(memory.stop.max(initial=0))
    number: dict[bytes, int] = {}
    of = {id(b): number.setdefault(b.tobytes(), len(number)) for b in memory.bytes}
    marks = np.array([of[id(b)] for b in memory.bytes], np.uint64)
    rng = np.random.default_rng(0)
    mark = rng.integers(1, 1 << 63, max(len(number), 1), dtype=np.uint64)[marks]
    live = memory.stop > memory.start
    change = np.zeros(points + 1, np.uint64)  # sums wrap around
    np.add.at(change, memory.start[live], mark[live])
    np.subtract.at(change, memory.stop[live], mark[live])
    return np.unique(np.cumsum(change)[:points], return_inverse=True)[1].reshape(-1)


def sums_of(memory: MemoryProfile, groups: Sequence[np.ndarray]) -> Sums:
    """The average over each group of points. groups: per sum, bool [points], each with at least one point."""
    room = np.full(len(groups), memory.limit_bytes)
    # Count before dividing, so that equal layers have bitwise equal fractions.
    before = np.stack([np.concatenate([[0], np.cumsum(g)]) for g in groups], axis=1)
    start, stop = memory.start, np.maximum(memory.start, memory.stop)
    # [intervals, sums]: the fraction of a group's points that an interval covers.
    share = (before[stop] - before[start]) / before[-1]
    mine: list[list[int]] = [[] for _ in range(memory.nodes)]
    for i, v in enumerate(memory.owners):
        mine[v].append(i)
    held: list[np.ndarray] = []
    made: dict[tuple[tuple[int, bytes], ...], tuple[np.ndarray, np.ndarray]] = {}
    for intervals in mine:
        key = tuple((id(memory.bytes[i]), share[i].tobytes()) for i in intervals)
        if key not in made:
            total = np.sum([memory.bytes[i][:, None] * share[i] for i in intervals], axis=0)
            least = total.min(axis=0)
            made[key] = total - least, least
        excess, base = made[key]
        held.append(excess)
        room = room - base
    return Sums(held=tuple(held), room=room)
