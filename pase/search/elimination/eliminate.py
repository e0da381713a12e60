"""Executes the steps of an elimination plan as min-plus products, and back-substitutes (FindBestStrategy)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from pase.clock import Stopped, never
from pase.errors import Infeasible
from pase.search.elimination import kernels_numpy
from pase.search.elimination.factors import ConfigPartition, Factor, Pool
from pase.search.elimination.plan import Elimination, EliminationPlan, joint_view

__all__ = ["back_substitute", "run_plan"]


_WORK_A_LOOK = 1e8
"""The work (entries times configs) between two checks of the clock."""
_SIDE = 1 << 21
"""The most entries times configs that are added up at once, so that they fit in the cache and need little memory."""
_PRODUCTS = 100_000_000
"""The most min-plus products in one call of a kernel."""


class _Looks:
    """Calls ``stop`` once enough work was done since the last call."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop, self.work = stop, 0.0

    def look(self) -> None:
        """Raises Stopped if ``stop`` returns True."""
        if self.work > _WORK_A_LOOK:
            self.work = 0.0
            if self.stop():
                raise Stopped


def run_plan(
    plan: EliminationPlan,
    pool: Pool,
    kernels: ModuleType,
    threads: int = 1,
    stop: Callable[[], bool] = never,
) -> float:
    """Compute the table of every distinct step. Returns the minimum. Raises Infeasible if that is inf.

    stop: called between parts of tables, after some work. If it returns True, Stopped is raised.
    """
    total, looks = 0.0, _Looks(stop)
    for step in plan.steps:
        if step.out.sig not in pool.arrays:
            looks.look()
            pool.arrays[step.out.sig] = _eliminate(step, pool, kernels, threads, looks)
        if not step.out.scope:
            total += float(pool.arrays[step.out.sig])
    if not np.isfinite(total):
        raise Infeasible(
            "no choice of configs has a finite cost: every choice uses a forbidden config or pair"
        )
    return total


def _base(step: Elimination, pool: Pool) -> np.ndarray:
    """The sum of v's own factors over its configs, float64 [K]."""
    total: np.ndarray | None = None
    for f in step.factors:
        if len(f.scope) == 1:
            part = pool.arrays[f.sig][f.views[0].cls]
            total = part if total is None else total + part
    return np.zeros(step.view.cls.size) if total is None else total


def _eliminate(step: Elimination, pool: Pool, kernels: ModuleType, threads: int, looks: _Looks) -> np.ndarray:
    """The table of a step: the minimum over v's configs of the sum of its factors."""
    base = _base(step, pool)
    if not step.groups:
        return np.asarray(base.min())
    if step.view.n < base.size:  # the cheapest represents all configs that no neighbour distinguishes
        least = np.full(step.view.n, np.inf)
        np.minimum.at(least, step.view.cls, base)
        base = least
    made = _Product(step, base, pool, kernels, threads)
    out: np.ndarray | None = None
    for box in made.sides():
        looks.look()
        side = made.side(box)
        for i, more in enumerate(made.walks(side)):
            if i:
                looks.look()
            part = made.part(side, box | more)
            looks.work += base.size * part.size
            if part.shape == made.shape:
                return part
            out = made.empty() if out is None else out
            out[tuple((box | more).get(u, slice(None)) for u in step.out.scope)] = part
    assert out is not None
    return out


class _Product:
    """The table of a step, computed in boxes.

    The factors form two groups. Min-plus runs over the classes of the group with fewer classes. The other group, the
    side, is first minimised over the configs in each of these classes.

    base: the cost of v's configs alone, float64 [configs that neighbours distinguish].
    """

    def __init__(
        self, step: Elimination, base: np.ndarray, pool: Pool, kernels: ModuleType, threads: int
    ) -> None:
        self.step, self.base, self.pool, self.kernels = step, base, pool, kernels
        self.threaded = (threads,) if threads > 1 and kernels is not kernels_numpy else ()
        *self.left, self.right = sorted(step.groups, key=lambda g: joint_view(g, step.v, pool).n)
        near_l, near_r = ({u for g in side for f in g for u in f.scope} for side in (self.left, [self.right]))
        ordered = _memory_order(self.right, step.out.scope, pool)
        self.shared = [u for u in ordered if u in near_l]
        self.only_r = [u for u in ordered if u not in near_l]
        ordered = _memory_order(self.left[0], step.out.scope, pool) if self.left else []
        self.only_l = [u for u in ordered if u not in near_r]
        self.views = dict(zip(step.out.scope, step.out.views, strict=True))
        self.shape = tuple(view.n for view in step.out.views)

    def _tiles(self, nodes: list[int], cells: int) -> Iterator[dict[int, slice]]:
        return _boxes([(u, self.views[u].n) for u in nodes], cells)

    def sides(self) -> Iterator[dict[int, slice]]:
        """Boxes of the side group."""
        return self._tiles([*self.shared, *self.only_r], _SIDE // self.base.size)

    def walks(self, side: np.ndarray) -> Iterator[dict[int, slice]]:
        """Boxes of the other group, for a side of this size."""
        return self._tiles(self.only_l, min(_SIDE // side.shape[1], _PRODUCTS // side.size))

    def side(self, box: dict[int, slice]) -> np.ndarray:
        """The side group's table in a box, minimised: float64 [classes of the other group, cells of the box]."""
        step, pool = self.step, self.pool
        side = _parts(self.right, step.v, [*self.shared, *self.only_r], self.views, pool, 2, box)
        parts = [(pool.sub(view, step.view), t) for view, t in side]
        segment, classes = np.zeros(self.base.size, np.int32), 1
        if self.left:
            own = joint_view(self.left[0], step.v, pool)
            segment, classes = pool.sub(own, step.view), own.n
        made = self.kernels.segment_min(self.base, segment, classes, parts, *self.threaded)
        return np.asarray(made).reshape(classes, -1)

    def part(self, side: np.ndarray, box: dict[int, slice]) -> np.ndarray:
        """The table in a box, with its axes in the order of the scope. Its memory is not reordered."""
        count = {u: len(range(view.n)[box.get(u, slice(None))]) for u, view in self.views.items()}
        x, p, q = (math.prod(count[u] for u in s) for s in (self.shared, self.only_l, self.only_r))
        have, made = [*self.shared, *self.only_l, *self.only_r], side
        if self.left:
            nodes = [*self.shared, *self.only_l]
            ((own, table),) = _parts(self.left[0], self.step.v, nodes, self.views, self.pool, 1, box)
            lhs, rhs = table.reshape(own.n, x, p), side.reshape(own.n, x, q)
            if p > q:  # the long axis should be contiguous in memory
                have = [*self.shared, *self.only_r, *self.only_l]
                lhs, rhs = rhs, lhs
            made = self.kernels.min_plus(lhs, rhs, *self.threaded)
        return made.reshape([count[u] for u in have]).transpose([have.index(u) for u in self.step.out.scope])

    def empty(self) -> np.ndarray:
        """An empty table whose axes in memory are in the order of the boxes."""
        have = [*self.shared, *self.only_r, *self.only_l]
        room = np.empty([self.views[u].n for u in have])
        return room.transpose([have.index(u) for u in self.step.out.scope])


def _boxes(nodes: list[tuple[int, int]], cells: int) -> Iterator[dict[int, slice]]:
    """Boxes of at most ``cells`` cells that tile (node, classes) …. A box has one class of each of the first nodes, a
    few of the next, and all of the others.

    >>> list(_boxes([(7, 2), (5, 3)], 2))[1]
    {7: slice(0, 1, None), 5: slice(2, 3, None)}
    """
    inner, ranges = math.prod(n for _, n in nodes), []
    for _, n in nodes:
        inner //= n
        width = min(n, max(1, cells // inner))
        ranges.append([slice(i, min(i + width, n)) for i in range(0, n, width)])
    for box in itertools.product(*ranges):
        yield dict(zip((u for u, _ in nodes), box, strict=True))


def _memory_order(group: list[Factor], scope: tuple[int, ...], pool: Pool) -> list[int]:
    """The nodes of ``scope`` in the order in which the group's largest tables store them."""
    out: list[int] = []
    for f in sorted(group, key=lambda f: -pool.arrays[f.sig].size):
        strides = pool.arrays[f.sig].strides
        out += [u for _, u in sorted(zip(strides, f.scope, strict=True), reverse=True) if u not in out]
    return [u for u in out if u in scope]


def _parts(
    group: list[Factor],
    v: int,
    scope: list[int],
    views: dict[int, ConfigPartition],
    pool: Pool,
    most: int,
    box: dict[int, slice],
) -> list[tuple[ConfigPartition, np.ndarray]]:
    """At most ``most`` tables that sum to the group's table in a box: (v's view, float64 [view.n, entries of
    scope])."""
    parts: dict[ConfigPartition, np.ndarray] = {}
    whole = slice(None)
    shape = tuple(len(range(views[u].n)[box.get(u, whole)]) for u in scope)
    for f in group:
        view = f.views[f.scope.index(v)]
        order = [u for u in (v, *scope) if u in f.scope]
        table = pool.arrays[f.sig].transpose([f.scope.index(u) for u in order])
        haves = {u: f.views[f.scope.index(u)] for u in order[1:]}
        table = table[whole, *(box.get(u, whole) if have is views[u] else whole for u, have in haves.items())]
        # Take the nodes that the box restricts first, so that little is copied.
        for u in sorted(haves, key=lambda u: u not in box):
            if haves[u] is not views[u]:
                classes = pool.sub(haves[u], views[u])[box.get(u, whole)]
                table = table.take(classes, axis=order.index(u))
        table = table.reshape(
            [view.n, *(n if u in f.scope else 1 for u, n in zip(scope, shape, strict=True))]
        )
        parts[view] = parts[view] + table if view in parts else table
    # Tables over the whole scope may stay separate. A smaller table is added to the next smallest.
    small = sorted(parts.items(), key=lambda p: p[1].size)
    while len(small) > most or (len(small) > 1 and small[0][1].shape[1:] != shape):
        (a, table), (b, other), *rest = small
        own = pool.joint(a, b)
        added = _table_for(table, a, own, pool) + _table_for(other, b, own, pool)
        small = sorted([(own, added), *rest], key=lambda p: p[1].size)
    out = []
    for view, table in small:
        spread = table if table.shape[1:] == shape else np.broadcast_to(table, (view.n, *shape)).copy()
        out.append((view, np.ascontiguousarray(spread).reshape(view.n, -1)))
    return out


def _table_for(table: np.ndarray, have: ConfigPartition, want: ConfigPartition, pool: Pool) -> np.ndarray:
    """Spread the first axis of a table from the classes of one view to those of a finer view."""
    return table if have is want else table.take(pool.sub(have, want), axis=0)


def back_substitute(plan: EliminationPlan, pool: Pool, n: int, given: np.ndarray | None = None) -> np.ndarray:
    """Choose configs in reverse order of elimination; int64 [n]. given: the choice of the kept nodes, int64 [n]."""
    choice = np.zeros(n, np.int64) if given is None else given.copy()
    arrays = pool.arrays
    known: dict[tuple[int, ...], int] = {}
    for step in reversed(plan.steps):
        # The same step with the same neighbours' classes has the same result.
        key = (
            step.out.sig,
            *(int(w.cls[choice[u]]) for u, w in zip(step.out.scope, step.out.views, strict=True)),
        )
        k = known.get(key)
        if k is None:
            total = _base(step, pool)
            for f in step.factors:
                if len(f.scope) == 1:
                    continue
                at = tuple(
                    slice(None) if u == step.v else w.cls[choice[u]]
                    for u, w in zip(f.scope, f.views, strict=True)
                )
                total = total + arrays[f.sig][at][f.views[f.scope.index(step.v)].cls]
            k = known[key] = int(total.argmin())
        choice[step.v] = k
    return choice
