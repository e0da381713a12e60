"""The result of a search, and the liveness profile that may limit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["FULL_EFFORT", "Effort", "MemoryProfile", "SearchProgress", "Solution"]

SearchProgress = Callable[[str, float, float, float], None]
"""Called with (phase, best cost, bound, seconds)."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a search goes on.

    time_limit: seconds after which it ends, however far it is. None: the result does not depend on a clock.
    rounds: the most rounds of the bounded search, each a fixed amount of work; none run if elimination finds a choice
        that fits. None: 60, or no limit if there is a time limit.
    gap: a search within a limit may stop once (cost - bound) / |cost| is at most this; 0 asks for a proof.
    labels: the most labels (``pase.search.limits.labels``) in each part of the gap that is searched.
    """

    time_limit: float | None = None
    rounds: int | None = None
    gap: float = 0.0
    labels: int = 1_000_000


FULL_EFFORT = Effort()


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryProfile:
    """A limit on the bytes that are live at the same time, over half-open intervals.

    bytes: per interval, a float64 [K_v] vector: the bytes that each config of its node v holds in the interval.
    start, stop: int64 [intervals]. Interval i covers the points t with ``start[i] <= t < stop[i]``;
        an empty interval uses no memory.
    limit_bytes: the most bytes that may be live at any point.
    node: int64 [intervals], the node of each interval. None: there is one interval per node, in order.
    """

    bytes: tuple[np.ndarray, ...]
    start: np.ndarray
    stop: np.ndarray
    limit_bytes: float
    node: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.bytes)
        if self.node is not None and self.node.shape != (n,):
            raise ValueError(
                f"memory profile: {n} byte vectors need {n} nodes, but node has shape {self.node.shape}"
            )
        if self.start.shape != (n,) or self.stop.shape != (n,):
            raise ValueError(
                f"memory profile: {n} byte vectors need {n} intervals, but start has shape {self.start.shape} "
                f"and stop has shape {self.stop.shape}"
            )
        if not self.limit_bytes >= 0:
            raise ValueError(
                f"memory profile: limit_bytes is {self.limit_bytes}, but it must be zero or more bytes"
            )

    @classmethod
    def all_live(cls, memory: tuple[np.ndarray, ...], limit_bytes: float) -> MemoryProfile:
        """A profile in which everything is live at once: one sum, one limit (parameters, optimizer state)."""
        n = len(memory)
        return cls(
            bytes=memory,
            start=np.zeros(n, np.int64),
            stop=np.ones(n, np.int64),
            limit_bytes=limit_bytes,
        )

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int, int, np.ndarray]], limit_bytes: float) -> MemoryProfile:
        """A profile of intervals: (node, start, stop, the bytes that each config of the node holds, float64 [K])."""
        node, start, stop, nbytes = zip(*intervals, strict=True)
        return cls(
            bytes=nbytes,
            start=np.array(start, np.int64),
            stop=np.array(stop, np.int64),
            limit_bytes=limit_bytes,
            node=np.array(node, np.int64),
        )

    @property
    def owners(self) -> np.ndarray:
        """The node of each interval; int64 [intervals]."""
        return np.arange(len(self.bytes)) if self.node is None else self.node

    @property
    def nodes(self) -> int:
        """The number of nodes. Each node has at least one interval."""
        return len(self.bytes) if self.node is None else int(self.node.max(initial=-1)) + 1

    @cached_property
    def live(self) -> dict[int, list[int]]:
        """Node -> its intervals that are not empty."""
        out: dict[int, list[int]] = {}
        for i in np.flatnonzero(self.stop > self.start):
            out.setdefault(int(self.owners[i]), []).append(int(i))
        return out

    def usage(self, choice: np.ndarray) -> np.ndarray:
        """The bytes that are live at each point ``0 … max(stop)-1`` under ``choice``; float64 [points]."""
        points = int(self.stop.max(initial=0))
        delta = np.zeros(points + 1)
        live = np.flatnonzero(self.stop > self.start)
        owners = self.owners[live]
        held = np.array(
            [self.bytes[i][choice[v]] for i, v in zip(live, owners, strict=True)], dtype=np.float64
        )
        np.add.at(delta, self.start[live], held)
        np.add.at(delta, self.stop[live], -held)
        return np.cumsum(delta)[:points]


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """A choice and its certificate.

    choice: int64 [nodes], one config index per node.
    cost: the cost of ``choice``, recomputed from the tables.
    bound: a proven lower bound on the cost of any allowed choice; -inf if none was proven.
    optimal: whether ``cost`` equals the optimum, up to float64 rounding of the sums.
    feasible: whether ``choice`` has a finite cost and respects the memory limit.
    seconds: wall time of the search.
    order: the nodes in the order of their elimination; empty if they were not eliminated.
    method: how the choice was found. certificate: what proves ``bound``.
    work: min-plus operations of eliminations. Within a memory limit, the unit is 50 ns, and work on labels and rounds
        of the bounded search count as well.
    peak_entries: entries of the largest table.
    byte_price: the price per byte of the memory limit at the best bound; 0 if bytes were not priced.
    """

    choice: np.ndarray
    cost: float
    bound: float
    optimal: bool
    feasible: bool = True
    seconds: float = 0.0
    order: tuple[int, ...] = ()
    method: str = "elimination"
    certificate: str = "elimination"
    work: int = 0
    peak_entries: int = 0
    byte_price: float = 0.0

    @property
    def gap(self) -> float:
        """(cost - bound) / |cost|; 0 if the choice is proven optimal."""
        if self.optimal or self.cost == self.bound:
            return 0.0
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)
