"""What a search answers, and the liveness profile that may limit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["MemoryProfile", "SearchProgress", "Solution"]

SearchProgress = Callable[[str, float, float, float], None]
"""Called with (phase, best cost, bound, seconds)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryProfile:
    """A limit on the bytes that live at one time, over a half-open interval per node.

    bytes: per node a float64 [K_v] vector, the bytes config k of node v holds while it lives.
    start, stop: int64 [nodes]; node v lives at the points t with ``start[v] <= t < stop[v]``;
        an empty interval uses no memory.
    limit_bytes: at each point the bytes of the live nodes sum to at most this.
    """

    bytes: tuple[np.ndarray, ...]
    start: np.ndarray
    stop: np.ndarray
    limit_bytes: float

    def __post_init__(self) -> None:
        n = len(self.bytes)
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

    def usage(self, choice: np.ndarray) -> np.ndarray:
        """Bytes that live at each point ``0 … max(stop)-1`` under ``choice``; float64 [points]."""
        points = int(self.stop.max(initial=0))
        delta = np.zeros(points + 1)
        live = np.flatnonzero(self.stop > self.start)
        held = np.array([self.bytes[v][choice[v]] for v in live], dtype=np.float64)
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
    work: min-plus operations spent by eliminations; peak_entries: entries of the largest table.
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
