"""Exact reductions of large sparse problems, which remain valid under a memory limit.

- Arc consistency: configs without a finite partner at some neighbour are dropped.
- A node with a single config is folded into its neighbours.
- Edges that are a sum of a row part and a column part are folded into their end nodes.
- Functional edges: if every config of u leaves v exactly one finite config, v is substituted by u
  (v's memory is assigned to u: ``members``).
- Dominated configs are dropped (Goldstein's dead-end elimination, with bytes compared at every point).
- A node with at most two neighbours whose memory does not depend on its config is eliminated.

In the graphs of the contest, forbidden pairs couple long chains of operations. Substitution reduces tens of thousands
of such nodes to hundreds.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables

__all__ = ["Contracted", "contract", "fixed_bytes", "restrict"]

_MAX_ELIMINATED_ENTRIES = 1 << 16
_MAX_DOMINANCE_WORK = 1 << 22
_MAX_ENTRIES = 300_000_000  # pairs of configs over all edges, 8 bytes each


@dataclass(frozen=True, kw_only=True, eq=False)
class Contracted:
    """A smaller problem over ``nodes`` (original indices), and the mapping back to the original problem.

    costs: float64 [K] per kept node. pairs: (a, b), positions in ``nodes``. matrices: float64 [K_a, K_b].
    constant: a cost that every choice pays. members: per kept node, (original node, int array [K]: its
    original config under each config of the kept node). fixed: (original node, config) pairs that are decided.
    """

    nodes: list[int]
    costs: list[np.ndarray]
    pairs: list[tuple[int, int]]
    matrices: list[np.ndarray]
    constant: float
    members: list[list[tuple[int, np.ndarray]]]
    fixed: list[tuple[int, int]]
    _work: _Contraction

    def expand(self, choice: np.ndarray) -> np.ndarray:
        """The original choice, int64 [original nodes], for a choice over ``nodes``."""
        return self._work.expand(self.nodes, choice)

    def nearest(self, full: np.ndarray) -> np.ndarray:
        """The choice over ``nodes`` that is nearest to an original choice; int64 [kept nodes].

        A node whose original config was dropped takes the config that suits its neighbours best.
        """
        out, gone = np.zeros(len(self.nodes), np.int64), dict[int, np.ndarray]()
        for i, v in enumerate(self.nodes):
            at = np.flatnonzero(self._work.original[v] == full[v])
            if at.size:
                out[i] = at[0]
            else:
                gone[i] = self.costs[i].copy()
        near: dict[int, list[tuple[int, np.ndarray]]] = {i: [] for i in gone}
        for (a, b), m in zip(self.pairs, self.matrices, strict=True):
            for i, j, table in ((a, b, m), (b, a, m.T)):
                if j in gone and i in gone:
                    near[j].append((i, table))
                elif j in gone:
                    gone[j] = gone[j] + table[out[i]]
        assigned = set[int]()
        for i, cost in gone.items():
            for j, table in near[i]:
                if j in assigned:
                    cost = cost + table[out[j]]
            out[i] = cost.argmin()
            assigned.add(i)
        return out


class _Contraction:
    """The problem while it is reduced. ``queue`` holds the nodes that may be reducible."""

    def __init__(self, tables: CostTables, memory: MemoryProfile | None) -> None:
        n = len(tables.node_costs)
        self.tables = tables
        self.costs = [np.asarray(c, dtype=np.float64) for c in tables.node_costs]
        self.original = [np.arange(c.size) for c in self.costs]  # current config -> original config
        self.near: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
        self.children: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(n)]
        self.gone = [False] * n
        self.constant = 0.0
        self.eliminated: list[tuple[int, np.ndarray, list[tuple[int, np.ndarray, np.ndarray]]]] = []
        self.fixed: list[int] = []
        # less[v][i, j]: config i holds no more memory than j at any point. None: v's memory does not depend on its
        # config.
        self.less: list[np.ndarray | None] = [None] * n
        if memory is not None:
            for v, intervals in memory.live.items():
                for held in (memory.bytes[i] for i in intervals):
                    if held.max() > held.min():
                        less, so_far = held[:, None] <= held[None, :], self.less[v]
                        self.less[v] = less if so_far is None else less & so_far
        entries = sum(self.costs[e.src].size * self.costs[e.dst].size for e in tables.edges)
        if entries > _MAX_ENTRIES:
            raise PaseError(
                f"the edges have {entries:,} pairs of configs, and no elimination order fits: a search with more than "
                f"{_MAX_ENTRIES:,} pairs would take too much memory",
                fix="offer fewer configs, for example with a coarser mesh",
            )
        dense: dict[tuple[int, int, int], np.ndarray] = {}
        for e in tables.edges:
            key = (id(e.cost), id(e.src_class), id(e.dst_class))
            if key not in dense:
                dense[key] = e.dense()
            self.join(e.src, e.dst, dense[key])
        self.queue: deque[int] = deque(range(n))
        self.queued = [True] * n

    def push(self, v: int) -> None:
        """Queue a node for another visit."""
        if not self.queued[v] and not self.gone[v]:
            self.queued[v] = True
            self.queue.append(v)

    def join(self, a: int, b: int, matrix: np.ndarray) -> None:
        """Add a matrix to the edge between two nodes; the edge is created if necessary."""
        have = self.near[a].get(b)
        total = matrix if have is None else have + matrix
        self.near[a][b] = total
        self.near[b][a] = total.T

    def cut(self, a: int, b: int) -> None:
        """Remove the edge between two nodes."""
        del self.near[a][b], self.near[b][a]

    def restrict(self, v: int, keep: np.ndarray) -> None:
        """Keep only the configs of v for which ``keep`` (bool [K]) is True."""
        if not keep.any():
            raise Infeasible(
                "every config is forbidden or has no allowed partner at a neighbour, so no choice of configs has a "
                "finite cost",
                where=f"node {self.tables.name(v)}",
            )
        self.costs[v] = self.costs[v][keep]
        self.original[v] = self.original[v][keep]
        less = self.less[v]
        if less is not None:
            less = less[np.ix_(keep, keep)]
            self.less[v] = None if less.all() else less
        self.children[v] = [(w, f[keep]) for w, f in self.children[v]]
        for u, m in self.near[v].items():
            kept = m[keep]
            self.near[v][u] = kept
            self.near[u][v] = kept.T
            self.push(u)
        self.push(v)

    def prune(self, v: int) -> None:
        """Drop configs that have an infinite cost or no finite partner."""
        keep = np.isfinite(self.costs[v])
        for m in self.near[v].values():
            best = m.min(axis=1)
            if not (best < np.inf).all():
                keep &= best < np.inf
        if not keep.all():
            self.restrict(v, keep)

    def fold(self, v: int) -> None:
        """Fold v, which has one config, into its neighbours: its edges become node costs."""
        for u in list(self.near[v]):
            self.costs[u] = self.costs[u] + self.near[v][u][0]
            self.cut(u, v)
            self.push(u)
        self.constant += float(self.costs[v][0])
        self.gone[v] = True
        self.fixed.append(v)

    def substitute(self, v: int, u: int, f: np.ndarray) -> None:
        """Substitute v's config by f[u's config]. u takes over v's costs, edges and memory."""
        self.costs[u] = self.costs[u] + self.costs[v][f] + self.near[u][v][np.arange(f.size), f]
        self.cut(u, v)
        self.children[u].append((v, f))
        theirs, mine = self.less[v], self.less[u]
        if theirs is not None:
            theirs = theirs[np.ix_(f, f)]
            theirs = theirs if mine is None else theirs & mine
            self.less[u] = None if theirs.all() else theirs
        for w in list(self.near[v]):
            m = self.near[v][w]
            self.cut(v, w)
            self.join(u, w, m[f])
            self.push(w)
        self.gone[v] = True
        self.push(u)

    def eliminate(self, v: int) -> None:
        """Eliminate v, which has at most two neighbours and holds the same memory in all configs."""
        near = list(self.near[v].items())
        # Neighbours may lose configs later, so columns are remembered by original config.
        self.eliminated.append((v, self.costs[v], [(u, self.original[u], m) for u, m in near]))
        if not near:
            self.constant += float(self.costs[v].min())
        elif len(near) == 1:
            u, m = near[0]
            self.costs[u] = self.costs[u] + (self.costs[v][:, None] + m).min(axis=0)
        else:
            (a, ma), (b, mb) = near
            left = self.costs[v][:, None] + ma
            self.join(a, b, np.stack([(left[:, i, None] + mb).min(axis=0) for i in range(ma.shape[1])]))
        for u, _ in near:
            self.cut(u, v)
            self.push(u)
        self.gone[v] = True

    def visit(self, v: int, quick: bool = False) -> None:
        """Apply the reductions that are possible at v. quick: only those that must come before all others."""
        self.prune(v)
        if self.costs[v].size == 1:
            self.fold(v)
            return
        if quick:
            return
        for u, m in list(self.near[v].items()):
            finite = m < np.inf
            if finite.all():
                row, col = m[:, 0], m[0] - m[0, 0]
                if np.array_equal(row[:, None] + col, m):
                    self.costs[v] = self.costs[v] + row
                    self.costs[u] = self.costs[u] + col
                    self.cut(u, v)
                    self.push(u)
                continue
            per_u = finite.sum(axis=0)
            per_v = finite.sum(axis=1)
            v_by_u, u_by_v = bool((per_u == 1).all()), bool((per_v == 1).all())
            if v_by_u and u_by_v and len(self.near[u]) < len(self.near[v]):
                v_by_u = False  # either could be substituted: substitute the one with fewer edges
            if v_by_u:
                self.substitute(v, u, finite.argmax(axis=0))
                return
            if u_by_v:
                self.substitute(u, v, finite.argmax(axis=1))
                self.push(v)
                return
        degree = len(self.near[v])
        if degree <= 2 and self.less[v] is None:
            entries = 1
            for u in self.near[v]:
                entries *= self.costs[u].size
            if entries <= _MAX_ELIMINATED_ENTRIES:
                self.eliminate(v)
                return
        self.dominate(v)

    def dominate(self, v: int) -> None:
        """Goldstein's rule: drop config i if some j never costs more, whatever the neighbours choose, and holds no
        more memory."""
        k = self.costs[v].size
        if k * k * sum(m.shape[1] for m in self.near[v].values()) > _MAX_DOMINANCE_WORK:
            return
        # [j, i]: how much more j can cost than i, at most
        worse = self.costs[v][:, None] - self.costs[v][None, :]
        with np.errstate(invalid="ignore"):
            for m in self.near[v].values():
                # inf - inf is NaN: both configs forbid this pair, and fmax ignores it.
                worse = worse + np.fmax.reduce(m[:, None, :] - m[None, :, :], axis=2)
        better = worse <= 0
        less = self.less[v]
        if less is not None:
            better &= less
        np.fill_diagonal(better, False)
        if not better.any():
            return
        keep = np.ones(k, bool)
        for i in np.flatnonzero(better.any(axis=0)):
            # Keep one of several configs that dominate one another.
            keep[i] = not (better[:, i] & keep).any()
        self.restrict(v, keep)

    def run(self, until: float) -> None:
        """Reduce until nothing changes or ``perf_counter`` reaches ``until``. After that, only forbidden configs are
        dropped, and the rest of the queue stays as it is."""
        left: list[int] = []
        quick = False
        while self.queue:
            v = self.queue.popleft()
            self.queued[v] = False
            if not self.gone[v]:
                quick = quick or time.perf_counter() > until
                self.visit(v, quick)
                if quick:
                    left.append(v)
        for v in left:
            self.push(v)

    def members(self, v: int) -> list[tuple[int, np.ndarray]]:
        """The original nodes that v represents, with their original config under each config of v."""
        out = []
        todo = [(v, np.arange(self.costs[v].size))]
        while todo:
            w, f = todo.pop()
            out.append((w, self.original[w][f]))
            todo.extend((c, g[f]) for c, g in self.children[w])
        return out

    def expand(self, nodes: list[int], choice: np.ndarray) -> np.ndarray:
        """The original choice for a choice over the kept nodes."""
        out = np.full(len(self.costs), -1, np.int64)

        def assign(v: int, k: int) -> None:
            todo = [(v, k)]
            while todo:
                w, i = todo.pop()
                out[w] = self.original[w][i]
                todo.extend((c, int(g[i])) for c, g in self.children[w])

        for v, k in zip(nodes, choice, strict=True):
            assign(v, int(k))
        for v in self.fixed:
            assign(v, 0)
        for v, costs, near in reversed(self.eliminated):
            total = costs
            for u, configs, m in near:
                total = total + m[:, np.searchsorted(configs, out[u])]
            assign(v, int(total.argmin()))
        return out


def contract(
    tables: CostTables, memory: MemoryProfile | None = None, until: float = float("inf")
) -> Contracted:
    """Apply the reductions until none applies, or until ``perf_counter`` reaches ``until``. An early stop gives a
    larger, but equally valid problem. Raises Infeasible if a node has no config left."""
    work = _Contraction(tables, memory)
    work.run(until)
    return _snapshot(work)


def restrict(contracted: Contracted, keep: list[np.ndarray], until: float = float("inf")) -> Contracted:
    """Keep only the given configs (bool [K] per kept node) and reduce again. ``contracted`` must not be used
    afterwards."""
    work = contracted._work
    for v, mask in zip(contracted.nodes, keep, strict=True):
        if not mask.all():
            work.restrict(v, mask)
    work.run(until)
    return _snapshot(work)


def _snapshot(work: _Contraction) -> Contracted:
    """The current state of a contraction."""
    nodes = [v for v in range(len(work.costs)) if not work.gone[v]]
    at = {v: i for i, v in enumerate(nodes)}
    pairs, matrices = [], []
    for v in nodes:
        for u, m in work.near[v].items():
            if v < u:
                pairs.append((at[v], at[u]))
                matrices.append(m)
    fixed = [m for v in work.fixed for m in work.members(v)]
    return Contracted(
        nodes=nodes,
        costs=[work.costs[v] for v in nodes],
        pairs=pairs,
        matrices=matrices,
        constant=work.constant,
        members=[work.members(v) for v in nodes],
        fixed=[(w, int(f[0])) for w, f in fixed],
        _work=work,
    )


def fixed_bytes(contracted: Contracted, memory: MemoryProfile) -> list[tuple[int, float]]:
    """(interval, bytes) for every node whose bytes are the same in every choice over the kept nodes."""
    work = contracted._work
    chosen = [*contracted.fixed]
    for v, _, _ in work.eliminated:
        chosen += [(w, int(f[0])) for w, f in work.members(v)]
    return [(i, float(memory.bytes[i][k])) for v, k in chosen for i in memory.live.get(v, ())]
