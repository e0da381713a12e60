"""What a search answers, and the liveness profile that may limit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["MemoryProfile", "SearchProgress", "Solution"]

SearchProgress = Callable[[str, float, float, float], None]
"""Called with (phase, best cost, bound, seconds)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryProfile:
    """A limit on the bytes that live at one time, over half-open intervals.

    bytes: per interval a float64 [K_v] vector, the bytes that config k of its node v holds in it.
    start, stop: int64 [intervals]; interval i is the points t with ``start[i] <= t < stop[i]``;
        an empty one uses no memory.
    limit_bytes: at each point the bytes that live sum to at most this.
    node: int64 [intervals], whose each is; None: there is one for each node, in order.
    """

    bytes: tuple[np.ndarray, ...]
    start: np.ndarray
    stop: np.ndarray
    limit_bytes: float
    node: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.bytes)
        if self.node is not None and self.node.shape != (n,):
            raise ValueError(f"memory profile: {n} byte vectors need {n} nodes, got {self.node.shape}")
        if self.start.shape != (n,) or self.stop.shape != (n,):
            raise ValueError(
                f"memory profile: {n} byte vectors need {n} intervals, got start {self.start.shape} "
                f"and stop {self.stop.shape}"
            )
        if not self.limit_bytes >= 0:
            raise ValueError(f"memory profile: the limit is {self.limit_bytes}; give bytes, zero or more")

    @classmethod
    def all_live(cls, memory: tuple[np.ndarray, ...], limit_bytes: float) -> MemoryProfile:
        """Everything lives at once: one sum, one limit (parameters, optimizer state)."""
        n = len(memory)
        return cls(
            bytes=memory,
            start=np.zeros(n, np.int64),
            stop=np.ones(n, np.int64),
            limit_bytes=limit_bytes,
        )

    @property
    def owners(self) -> np.ndarray:
        """The node of each interval; int64 [intervals]."""
        return np.arange(len(self.bytes)) if self.node is None else self.node

    @property
    def nodes(self) -> int:
        """How many nodes have an interval; each has one at least."""
        return len(self.bytes) if self.node is None else int(self.node.max(initial=-1)) + 1

    @cached_property
    def live(self) -> dict[int, list[int]]:
        """node -> its intervals that are not empty."""
        out: dict[int, list[int]] = {}
        for i in np.flatnonzero(self.stop > self.start):
            out.setdefault(int(self.owners[i]), []).append(int(i))
        return out

    def usage(self, choice: np.ndarray) -> np.ndarray:
        """Bytes that live at each point ``0 … max(stop)-1`` under ``choice``; float64 [points]."""
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
    """An answer and its certificate.

    choice: int64 [nodes], one config index per node.
    cost: the cost of ``choice``, recomputed from the tables.
    bound: a proven lower bound on the cost of any allowed choice; -inf if none was proven.
    optimal: whether ``cost`` equals the optimum, up to float64 rounding of the sums.
    feasible: whether ``choice`` costs less than infinity and respects the memory limit.
    seconds: wall time of the search.
    order: the nodes in the order in which they were eliminated; empty if they were not.
    method: how the answer was found; certificate: what proves ``bound``.
    work: min-plus operations of eliminations; within a memory limit in units of 50 ns, of labels and turns of the
        bounded search too.
    peak_entries: entries of the largest table.
    byte_price: what a byte of the memory limit is worth, at the best bound; 0 where it was not priced.
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
        """(cost - bound) / |cost|; 0 where proven optimal."""
        if self.optimal or self.cost == self.bound:
            return 0.0
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)
