"""A pairwise problem in flat arrays, the form that the compiled kernels of the bounded search use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

__all__ = ["Flat", "FlatGraph", "flatten"]


class FlatGraph(NamedTuple):
    """The parts of ``Flat`` that do not depend on node costs, as a named tuple that compiled functions accept."""

    slot: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    matrix: np.ndarray
    entries: np.ndarray
    to_tail: np.ndarray
    to_head: np.ndarray
    ptr: np.ndarray
    edge: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Flat:
    """A problem of n nodes and m edges. Node v's configs are slots ``slot[v] … slot[v+1]`` of every per-config array.

    cost: float64 [slots]. Edge e joins head[e] < tail[e] (int64 [m]). Its row-major
    [K_head, K_tail] matrix starts at matrix[e] (int64 [m]) of ``entries`` (float64); equal matrices may
    share their entries. to_tail[e], to_head[e]: where the messages of e start in an array of
    ``messages`` floats. ptr (int64 [n+1]): indices into ``edge`` (int64 [2m]), which lists the edges of each node.
    """

    cost: np.ndarray
    slot: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    matrix: np.ndarray
    entries: np.ndarray
    to_tail: np.ndarray
    to_head: np.ndarray
    messages: int
    ptr: np.ndarray
    edge: np.ndarray

    @property
    def n(self) -> int:
        """The number of nodes."""
        return self.slot.size - 1

    @property
    def graph(self) -> FlatGraph:
        return FlatGraph(*(getattr(self, name) for name in FlatGraph._fields))

    @cached_property
    def softened(self) -> FlatGraph:
        """The graph with a finite price for forbidden pairs, above the cost of any choice without such a pair."""
        finite = np.isfinite(self.entries)
        dearest = np.where(finite, np.abs(self.entries), 0.0)
        sizes = np.diff(self.slot)
        most = [
            dearest[at : at + area].max()
            for at, area in zip(self.matrix, sizes[self.head] * sizes[self.tail], strict=True)
        ]
        price = 2.0 * (sum(most) + float(np.abs(self.cost).sum())) + 1.0
        return self.graph._replace(entries=np.where(finite, self.entries, price))

    def cost_of(self, choice: np.ndarray, cost: np.ndarray | None = None) -> float:
        """Node costs plus edge costs of ``choice`` (int64 [n])."""
        node = self.cost if cost is None else cost
        total = float(node[self.slot[:-1] + choice].sum())
        width = (self.slot[1:] - self.slot[:-1])[self.tail]
        at = self.matrix + choice[self.head] * width + choice[self.tail]
        return total + float(self.entries[at].sum())


def flatten(costs: list[np.ndarray], pairs: list[tuple[int, int]], matrices: list[np.ndarray]) -> Flat:
    """Flat arrays of a problem with at most one edge per pair. Edges with the same matrix object share its entries."""
    n, m = len(costs), len(pairs)
    sizes = np.array([c.size for c in costs], np.int64)
    slot = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    head, tail = np.zeros(m, np.int64), np.zeros(m, np.int64)
    matrix = np.zeros(m, np.int64)
    chunks: list[np.ndarray] = []
    held: dict[tuple[int, bool], int] = {}
    used = 0
    for e, ((a, b), table) in enumerate(zip(pairs, matrices, strict=True)):
        flip = a > b
        head[e], tail[e] = min(a, b), max(a, b)
        key = (id(table), flip)
        if key not in held:
            held[key] = used
            chunks.append(np.ascontiguousarray(table.T if flip else table, dtype=np.float64).reshape(-1))
            used += table.size
        matrix[e] = held[key]
    ends = np.cumsum(np.stack([sizes[tail], sizes[head]], axis=1).reshape(-1)) if m else np.zeros(0, np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) if m else ends
    at_node = np.concatenate([head, tail])
    order = np.argsort(at_node, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(at_node, minlength=n))]).astype(np.int64)
    return Flat(
        cost=np.concatenate(costs).astype(np.float64) if n else np.zeros(0),
        slot=slot,
        head=head,
        tail=tail,
        matrix=matrix,
        entries=np.concatenate(chunks) if chunks else np.zeros(0),
        to_tail=np.ascontiguousarray(starts[0::2]),
        to_head=np.ascontiguousarray(starts[1::2]),
        messages=int(ends[-1]) if m else 0,
        ptr=ptr,
        edge=(order % m if m else order).astype(np.int64),
    )
