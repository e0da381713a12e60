"""Prunes configs that no choice below a known cost can use, from a part of the edges; missing edges count as zero.

Edges are added as they are priced, cheapest first. Sequential tree-reweighted message passing (Kolmogorov, IEEE TPAMI
2006) shifts costs from edges to nodes. The sum of the nodes' minima is then a lower bound on every choice. A choice
that uses a config costs at least the bound plus the config's excess over its node's minimum. A config for which this
reaches the known cost is pruned, so that edges that are priced later have fewer layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pase.tables.types import CostTables, EdgeTable

__all__ = ["Pruner"]


@dataclass(kw_only=True, eq=False)
class _EdgeEnd:
    """One end of an edge.

    cls: the class of each config, int [K]. held: by class, the part of the edge's cost that was shifted to the node.
    """

    node: int
    cls: np.ndarray
    held: np.ndarray

    def least(self, values: np.ndarray) -> np.ndarray:
        """The minimum of the configs' values in each class."""
        out = np.full(self.held.size, np.inf)
        np.minimum.at(out, self.cls, values)
        return out

    def keep(self, alive: np.ndarray) -> np.ndarray:
        """Keep some of the configs. Returns the classes that remain, as indices into the previous classes."""
        left, cls = np.unique(self.cls[alive], return_inverse=True)
        self.cls, self.held = cls.reshape(-1), self.held[left]
        return left


@dataclass(kw_only=True, eq=False)
class _PrunedEdge:
    """An edge. cost: float64 [classes of src, classes of dst], which equal edges share while they have the same
    classes."""

    cost: np.ndarray
    src: _EdgeEnd
    dst: _EdgeEnd

    def send(self, giver: _EdgeEnd, share: float, theta: list[np.ndarray], least: np.ndarray) -> None:
        """Shift a share of the giver node's minima to the edge, and as much as possible from there to the other
        node."""
        forward = giver is self.src
        taker, cost = (self.dst, self.cost) if forward else (self.src, self.cost.T)
        given = share * np.where(np.isfinite(least), least, 0.0)
        giver.held = giver.held - given
        theta[giver.node] = theta[giver.node] - given[giver.cls]
        held = (cost - giver.held[:, None]).min(axis=0)
        allowed = np.isfinite(held)
        more = np.where(allowed, held - taker.held, np.inf)
        theta[taker.node] = theta[taker.node] + more[taker.cls]
        taker.held = np.where(allowed, held, taker.held)


class Pruner:
    """Finds the configs that may be part of a choice that costs less than ``below``.

    node_costs: per node, float64 [K]. kept: per node, the remaining configs, as indices into ``node_costs``. bound: a
    lower bound on the cost of every choice, at most ``below``.
    """

    def __init__(self, node_costs: Sequence[np.ndarray], below: float) -> None:
        self.below = below
        self.node_costs = [np.asarray(c, dtype=np.float64) for c in node_costs]
        self.kept = [np.arange(c.size) for c in self.node_costs]
        self.theta = list(self.node_costs)
        self.edges: list[_PrunedEdge] = []
        self.bound = -np.inf
        self._drop()

    @property
    def empty(self) -> bool:
        """Whether it is proven that no choice costs less than ``below``."""
        return any(not k.size for k in self.kept)

    def add(self, edges: Iterable[EdgeTable]) -> None:
        """Add edges whose classes cover the remaining configs."""
        for e in edges:
            ends = (
                _EdgeEnd(node=v, cls=c.astype(np.intp), held=np.zeros(n))
                for v, c, n in zip((e.src, e.dst), (e.src_class, e.dst_class), e.cost.shape, strict=True)
            )
            src, dst = ends
            self.edges.append(_PrunedEdge(cost=e.cost, src=src, dst=dst))
        self._squeeze([np.ones(k.size, bool) for k in self.kept])

    def run(self, passes: int) -> None:
        """Pass messages along the nodes' order and back. After each pass, prune configs that reach the known cost."""
        for _ in range(passes):
            for forward in (True, False):
                if self.empty:
                    return
                self._pass(forward)
            self._drop()

    def tables(self) -> CostTables:
        """The remaining problem as tables. The remaining choices cost the same as before."""
        edges = tuple(
            EdgeTable(
                src=e.src.node,
                dst=e.dst.node,
                cost=e.cost,
                src_class=e.src.cls.astype(np.int32),
                dst_class=e.dst.cls.astype(np.int32),
            )
            for e in self.edges
        )
        costs = tuple(c[k] for c, k in zip(self.node_costs, self.kept, strict=True))
        return CostTables(node_costs=costs, edges=edges)

    def _pass(self, forward: bool) -> None:
        """One sweep of message passing over the nodes, forward or backward."""
        ahead: list[list[tuple[_PrunedEdge, _EdgeEnd]]] = [[] for _ in self.kept]
        behind = [0] * len(self.kept)
        for e in self.edges:
            first, second = (e.src, e.dst) if (e.src.node < e.dst.node) == forward else (e.dst, e.src)
            ahead[first.node].append((e, first))
            behind[second.node] += 1
        order = range(len(self.kept)) if forward else range(len(self.kept) - 1, -1, -1)
        for v in order:
            share = 1 / max(len(ahead[v]), behind[v], 1)
            least = [end.least(self.theta[v]) for _, end in ahead[v]]
            for (e, end), mine in zip(ahead[v], least, strict=True):
                e.send(end, share, self.theta, mine)

    def _drop(self) -> None:
        """Update the bound, and prune the configs that reach the known cost."""
        if self.empty:
            return
        least = [t.min() for t in self.theta]
        bound = float(np.sum(least))
        self.bound = min(max(self.bound, bound), self.below)
        room = self.below - bound
        alive = [t - m < room for t, m in zip(self.theta, least, strict=True)]
        if not all(a.all() for a in alive):
            self._squeeze(alive)

    def _squeeze(self, alive: list[np.ndarray]) -> None:
        """Keep the configs in ``alive``, and the classes of edges that still have a config."""
        self.kept = [k[a] for k, a in zip(self.kept, alive, strict=True)]
        self.theta = [t[a] for t, a in zip(self.theta, alive, strict=True)]
        if self.empty:
            self.bound = self.below
            return
        made: dict[tuple[int, bytes, bytes], np.ndarray] = {}
        for e in self.edges:
            rows, columns = e.src.keep(alive[e.src.node]), e.dst.keep(alive[e.dst.node])
            if (rows.size, columns.size) == e.cost.shape:
                continue
            key = (id(e.cost), rows.tobytes(), columns.tobytes())
            if key not in made:
                made[key] = e.cost[np.ix_(rows, columns)]
            e.cost = made[key]
