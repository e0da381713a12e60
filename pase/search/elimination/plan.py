"""Plans elimination orders from sizes alone, before any table is computed.

Eliminating node v joins the tables that contain it and minimises over its configs. The result is a table over v's
neighbours (the paper's dependent set). PaSE's GenerateSeq picks the node with the fewest neighbours. Here, nodes are
scored by the sizes of the tables, with several rules.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pase.clock import never
from pase.search.elimination.factors import ConfigPartition, Factor, Pool
from pase.tables.types import CostTables

__all__ = ["Elimination", "EliminationPlan", "dependent_sets", "generate_seq", "plan_elimination"]


class Elimination:
    """The step that eliminates ``v`` from ``factors`` (in canonical order). ``out`` is the resulting factor.

    view: the classes of v's configs that its neighbours distinguish. groups: v's factors with other nodes, in two
    groups that min-plus multiplies (or one, or none); set if ``fresh``. fresh: whether no earlier step is equal.
    """

    __slots__ = ("factors", "fresh", "groups", "out", "v", "view")

    def __init__(
        self,
        v: int,
        view: ConfigPartition,
        factors: list[Factor],
        out: Factor,
        groups: list[list[Factor]],
        fresh: bool,
    ) -> None:
        self.v, self.view, self.factors, self.out, self.groups = v, view, factors, out, groups
        self.fresh = fresh


@dataclass(frozen=True, kw_only=True, eq=False)
class EliminationPlan:
    """An elimination order and its cost.

    steps: in order. work: min-plus operations of the distinct steps. peak: entries of the largest table. entries:
    entries of all distinct tables. complete: False if planning was given up. left: the factors over the kept nodes.
    """

    steps: list[Elimination]
    work: int
    peak: int
    entries: int
    complete: bool = True
    left: tuple[Factor, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The nodes in the order of elimination."""
        return tuple(s.v for s in self.steps)


def generate_seq(tables: CostTables) -> tuple[int, ...]:
    """PaSE's GenerateSeq (Fig. 3): repeatedly takes the node with the smallest dependent set; ties go by index.

    >>> import numpy as np
    >>> zero, one = np.zeros(2), np.zeros(1, np.int32)
    >>> generate_seq(CostTables(node_costs=(zero, zero), edges=()))
    (0, 1)
    """
    return tuple(v for v, _ in _sequence(tables, None))


def dependent_sets(tables: CostTables, order: tuple[int, ...]) -> list[frozenset[int]]:
    """The dependent set of each node of ``order``: the later nodes to which it is joined when it is eliminated."""
    return [d for _, d in _sequence(tables, order)]


def _sequence(tables: CostTables, order: tuple[int, ...] | None) -> list[tuple[int, frozenset[int]]]:
    """Eliminate the nodes in order (None: GenerateSeq's). Returns each node with its dependent set."""
    near: list[set[int]] = [set() for _ in tables.node_costs]
    for e in tables.edges:
        near[e.src].add(e.dst)
        near[e.dst].add(e.src)
    heap = [(len(d), v) for v, d in enumerate(near)]
    heapq.heapify(heap)
    done = [False] * len(near)
    turn = iter(order) if order is not None else None
    out: list[tuple[int, frozenset[int]]] = []
    while len(out) < len(near):
        if turn is not None:
            v = next(turn)
        else:
            degree, v = heapq.heappop(heap)
            if done[v] or degree != len(near[v]):
                continue
        done[v] = True
        depend = near[v]
        for u in depend:
            near[u] |= depend
            near[u] -= {u, v}
            heapq.heappush(heap, (len(near[u]), u))
        out.append((v, frozenset(depend)))
    return out


class _Planner:
    """The factors of a problem while an elimination is simulated on sizes."""

    def __init__(self, n: int, factors: list[Factor], pool: Pool) -> None:
        self.pool = pool
        self.level = [0] * n
        self.at: list[dict[int, Factor]] = [{} for _ in range(n)]
        self.seen: set[int] = set()
        self._serial = 0
        self.touched = 0  # table axes read so far
        for f in factors:
            self._add(f)

    def _add(self, f: Factor) -> None:
        for u in f.scope:
            self.at[u][self._serial] = f
        self._serial += 1

    def dims(self, v: int) -> tuple[ConfigPartition | None, dict[int, ConfigPartition]]:
        """The view of v's configs that its neighbours have, and the view of each neighbour that v has."""
        joint = self.pool.joint
        own: ConfigPartition | None = None
        near: dict[int, ConfigPartition] = {}
        for f in self.at[v].values():
            if len(f.scope) == 1:
                continue
            self.touched += len(f.scope)
            for u, view in zip(f.scope, f.views, strict=True):
                if u == v:
                    own = view if own is None else joint(own, view)
                elif u in near:
                    near[u] = joint(near[u], view)
                else:
                    near[u] = view
        return own, near

    def score(self, v: int, rule: str) -> tuple[float, float, int]:
        if rule == "degree":
            return (float(len({u for f in self.at[v].values() for u in f.scope})), 0.0, v)
        own, near = self.dims(v)
        if own is None:
            return (0.0, 0.0, v)
        size = 1.0
        for view in near.values():
            size *= view.n
        if rule == "work":
            s = size * own.n
        elif rule == "size":
            s = size
        else:  # growth: entries made minus entries removed
            gone = 0.0
            for f in self.at[v].values():
                if len(f.scope) > 1:
                    g = 1.0
                    for view in f.views:
                        g *= view.n
                    gone += g
            s = size - gone
        # Ties go to the node whose neighbourhood changed least often. Identical blocks are then eliminated in parallel,
        # and a chain of n of them takes log n distinct products.
        return (s, float(self.level[v]), v)

    def eliminate(self, v: int) -> tuple[Elimination, int, int, list[int]]:
        """Eliminate v. Returns the step, its work and entries (0 if an equal step exists), and v's neighbours."""
        items = sorted(self.at[v].items(), key=lambda kv: (len(kv[1].scope), kv[1].sig, kv[0]))
        factors = [f for _, f in items]
        own, near = self.dims(v)
        if own is None:
            own = self.pool.view(np.zeros(factors[0].views[0].cls.size, np.int32))
        local = {v: 0}
        pattern: list[int] = [own.key]
        for f in factors:
            pattern.append(f.sig)
            for u, view in zip(f.scope, f.views, strict=True):
                pattern.append(local.setdefault(u, len(local)))
                pattern.append(view.key)
            pattern.append(-1)
        scope = tuple(u for u in local if u != v)
        out = Factor(scope, tuple(near[u] for u in scope), self.pool.sig(tuple(pattern)))
        fresh = out.sig not in self.seen
        self.seen.add(out.sig)
        for serial, f in items:
            for u in f.scope:
                del self.at[u][serial]
        level = self.level[v] + 1
        for u in scope:
            self.level[u] = max(self.level[u], level)
        if scope:
            self._add(out)
        if not fresh:
            return Elimination(v, own, factors, out, [], fresh), 0, 0, list(scope)
        size = 1
        for view in out.views:
            size *= view.n
        groups = _two_groups([f for f in factors if len(f.scope) > 1], v, near)
        step = Elimination(v, own, factors, out, groups, fresh)
        return step, _work(step, near, self.pool), size, list(scope)


def joint_view(group: list[Factor], v: int, pool: Pool) -> ConfigPartition:
    """The classes of v's configs that the factors of a group distinguish."""
    own = group[0].views[group[0].scope.index(v)]
    for f in group[1:]:
        own = pool.joint(own, f.views[f.scope.index(v)])
    return own


def _work(step: Elimination, near: dict[int, ConfigPartition], pool: Pool) -> int:
    """Min-plus operations: the group with more classes is minimised over configs, then the two are multiplied."""
    sizes = []
    for group in step.groups:
        size = 1
        for u in {u for f in group for u in f.scope if u != step.v}:
            size *= near[u].n
        sizes.append((joint_view(group, step.v, pool).n, size))
    if len(sizes) < 2:
        return step.view.n * (sizes[0][1] if sizes else 1)
    (few, _), (_, right) = sorted(sizes, key=lambda s: s[0])
    made = 1
    for view in near.values():
        made *= view.n
    return step.view.n * right + few * made


def _two_groups(joint: list[Factor], v: int, views: dict[int, ConfigPartition]) -> list[list[Factor]]:
    """Split v's factors into at most two groups: nested scopes stay together, and the larger group is kept small."""
    bins: list[tuple[set[int], list[Factor]]] = []
    for f in sorted(joint, key=lambda f: -len(f.scope)):
        scope = set(f.scope) - {v}
        home = next((b for b in bins if scope <= b[0]), None)
        if home is None:
            bins.append((scope, [f]))
        else:
            home[1].append(f)
    while len(bins) > 2:
        best = None
        for i in range(len(bins)):
            for j in range(i):
                size = 1.0
                for u in bins[i][0] | bins[j][0]:
                    size *= views[u].n
                if best is None or size < best[0]:
                    best = (size, i, j)
        assert best is not None
        _, i, j = best
        scope, fs = bins.pop(i)
        bins[j] = (bins[j][0] | scope, bins[j][1] + fs)
    return [fs for _, fs in bins]


_TOUCHES_A_LOOK = 100_000
"""Table axes that planning reads between two checks of the clock, about 0.1 s."""


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """An order that is found node by node: the next one has the least score.

    rule: "growth" (entries made minus entries removed), "work", "size", or "degree" (the paper's).
    noise: scores are multiplied by a random factor of up to 1 + noise, drawn with ``seed``.
    """

    rule: str = "growth"
    noise: float = 0.0
    seed: int = 0


GREEDY = Greedy()


def plan_elimination(
    n: int,
    factors: list[Factor],
    pool: Pool,
    *,
    order: tuple[int, ...] | Greedy = GREEDY,
    stop_above: float = np.inf,
    keep: tuple[int, ...] = (),
    stop: Callable[[], bool] = never,
) -> EliminationPlan:
    """Plan the elimination of all n nodes except ``keep``, in this order.

    stop_above: give up (``complete=False``) once the work exceeds this. stop: called from time to time; planning gives
    up if it returns True.
    """
    planner = _Planner(n, factors, pool)
    steps: list[Elimination] = []
    work = peak = entries = 0
    if not isinstance(order, Greedy):
        for v in order:
            step, w, size, _ = planner.eliminate(v)
            steps.append(step)
            work, peak, entries = work + w, max(peak, size), entries + size
            if work > stop_above:
                return EliminationPlan(steps=steps, work=work, peak=peak, entries=entries, complete=False)
        return EliminationPlan(steps=steps, work=work, peak=peak, entries=entries)

    rng = np.random.default_rng(order.seed)
    factor = (1.0 + order.noise * rng.random(n)).tolist() if order.noise else None
    rule = order.rule

    def score(v: int) -> tuple[float, float, int]:
        s, level, _ = planner.score(v, rule)
        return (s * factor[v] if factor and s > 0 else s, level, v)

    current: list[tuple[float, float, int] | None] = [None if v in keep else score(v) for v in range(n)]
    heap = [s for s in current if s is not None]
    heapq.heapify(heap)
    look = _TOUCHES_A_LOOK
    while heap:
        entry = heapq.heappop(heap)
        v = entry[2]
        if current[v] is None or current[v] != entry:
            continue
        current[v] = None
        step, w, size, near = planner.eliminate(v)
        steps.append(step)
        work, peak, entries = work + w, max(peak, size), entries + size
        stopped = False
        if planner.touched >= look:
            look, stopped = planner.touched + _TOUCHES_A_LOOK, stop()
        if work > stop_above or stopped:
            return EliminationPlan(steps=steps, work=work, peak=peak, entries=entries, complete=False)
        for u in near:
            if u in keep:
                continue
            s = score(u)
            if s != current[u]:
                current[u] = s
                heapq.heappush(heap, s)
    left = tuple({serial: f for v in keep for serial, f in planner.at[v].items()}.values())
    return EliminationPlan(steps=steps, work=work, peak=peak, entries=entries, left=left)
