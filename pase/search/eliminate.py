"""Elimination of a plan's steps as min-plus products, and back-substitution (FindBestStrategy)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from pase.errors import Infeasible
from pase.search import kernels_numpy
from pase.search.clock import Stopped, never
from pase.search.factors import ConfigPartition, Factor, Pool
from pase.search.plan import Elimination, EliminationPlan, joint_view

__all__ = ["back_substitute", "run_plan"]


_WORK_A_LOOK = 1e8
"""Entries times configs of the tables that are made between two looks at the clock."""


def run_plan(
    plan: EliminationPlan,
    pool: Pool,
    kernels: ModuleType,
    threads: int = 1,
    stop: Callable[[], bool] = never,
) -> float:
    """Compute the table of every distinct step; returns the minimum. Raises Infeasible if that is inf.

    stop: asked between steps, after some work; raises Stopped if it says so.
    """
    total, work = 0.0, 0.0
    for step in plan.steps:
        if step.out.sig not in pool.arrays:
            if work > _WORK_A_LOOK:
                work = 0.0
                if stop():
                    raise Stopped
            work += step.view.cls.size * float(np.prod([w.n for w in step.out.views]))
            pool.arrays[step.out.sig] = _eliminate(step, pool, kernels, threads)
        if not step.out.scope:
            total += float(pool.arrays[step.out.sig])
    if not np.isfinite(total):
        raise Infeasible("no choice of configs has a finite cost: every one meets a forbidden config or pair")
    return total


def _base(step: Elimination, pool: Pool) -> np.ndarray:
    """Sum of v's node factors over its configs, float64 [K]."""
    total: np.ndarray | None = None
    for f in step.factors:
        if len(f.scope) == 1:
            part = pool.arrays[f.sig][f.views[0].cls]
            total = part if total is None else total + part
    return np.zeros(step.view.cls.size) if total is None else total


def _eliminate(step: Elimination, pool: Pool, kernels: ModuleType, threads: int) -> np.ndarray:
    base = _base(step, pool)
    if not step.groups:
        return np.asarray(base.min())
    if step.view.n < base.size:  # configs that no neighbour tells apart: the cheapest speaks for them
        least = np.full(step.view.n, np.inf)
        np.minimum.at(least, step.view.cls, base)
        base = least
    views = dict(zip(step.out.scope, step.out.views, strict=True))
    threaded = (threads,) if threads > 1 and kernels is not kernels_numpy else ()
    if len(step.groups) == 1:
        (group,) = step.groups
        scope = _memory_order(group, step.out.scope, pool)
        parts = [(pool.sub(view, step.view), t) for view, t in _parts(group, step.v, scope, views, pool, 2)]
        out = kernels.segment_min(base, np.zeros(base.size, np.int32), 1, parts, *threaded)
        return _shaped(out, scope, step, views)
    # The side of fewer classes is the one that min-plus walks; the other is first minimised over the
    # configs that lie in each of its classes.
    left, right = sorted(step.groups, key=lambda g: joint_view(g, step.v, pool).n)
    near_l, near_r = ({u for f in g for u in f.scope} for g in (left, right))
    shared = [u for u in _memory_order(right, step.out.scope, pool) if u in near_l and u in near_r]
    only_l = [u for u in _memory_order(left, step.out.scope, pool) if u not in near_r]
    only_r = [u for u in _memory_order(right, step.out.scope, pool) if u not in near_l]
    x, p, q = (int(np.prod([views[u].n for u in s], dtype=np.int64)) for s in (shared, only_l, only_r))
    ((own, table),) = _parts(left, step.v, [*shared, *only_l], views, pool, 1)
    lhs = table.reshape(own.n, x, p)
    side = _parts(right, step.v, [*shared, *only_r], views, pool, 2)
    parts = [(pool.sub(view, step.view), t) for view, t in side]
    rhs = kernels.segment_min(base, pool.sub(own, step.view), own.n, parts, *threaded).reshape(own.n, x, q)
    if p > q:  # the long axis is the one that runs through memory
        return _shaped(kernels.min_plus(rhs, lhs, *threaded), [*shared, *only_r, *only_l], step, views)
    return _shaped(kernels.min_plus(lhs, rhs, *threaded), [*shared, *only_l, *only_r], step, views)


def _memory_order(group: list[Factor], scope: tuple[int, ...], pool: Pool) -> list[int]:
    """The nodes of ``scope`` in the order in which the group's largest tables have them in memory."""
    out: list[int] = []
    for f in sorted(group, key=lambda f: -pool.arrays[f.sig].size):
        strides = pool.arrays[f.sig].strides
        out += [u for _, u in sorted(zip(strides, f.scope, strict=True), reverse=True) if u not in out]
    return [u for u in out if u in scope]


def _shaped(
    out: np.ndarray, have: list[int], step: Elimination, views: dict[int, ConfigPartition]
) -> np.ndarray:
    """Axes in the order of the step's scope; memory stays as it is."""
    table = out.reshape([views[u].n for u in have])
    return table.transpose([have.index(u) for u in step.out.scope])


def _parts(
    group: list[Factor], v: int, scope: list[int], views: dict[int, ConfigPartition], pool: Pool, most: int
) -> list[tuple[ConfigPartition, np.ndarray]]:
    """At most ``most`` tables whose sum is the group's: (v's view there, float64 [view.n, entries of scope])."""
    parts: dict[ConfigPartition, np.ndarray] = {}
    for f in group:
        view = f.views[f.scope.index(v)]
        order = [u for u in (v, *scope) if u in f.scope]
        table = pool.arrays[f.sig].transpose([f.scope.index(u) for u in order])
        for axis, u in enumerate(order[1:], 1):
            have = f.views[f.scope.index(u)]
            if have is not views[u]:
                table = table.take(pool.sub(have, views[u]), axis=axis)
        table = table.reshape([view.n, *(views[u].n if u in f.scope else 1 for u in scope)])
        parts[view] = parts[view] + table if view in parts else table
    shape = tuple(views[u].n for u in scope)
    # Tables over all of the scope may stay apart; smaller ones are added to the smallest that is left.
    small = sorted(parts.items(), key=lambda p: p[1].size)
    while len(small) > most or (len(small) > 1 and small[0][1].shape[1:] != shape):
        (a, table), (b, other), *rest = small
        own = pool.joint(a, b)
        added = _table_for(table, a, own, pool) + _table_for(other, b, own, pool)
        small = sorted([(own, added), *rest], key=lambda p: p[1].size)
    out = []
    for view, table in small:
        whole = table if table.shape[1:] == shape else np.broadcast_to(table, (view.n, *shape)).copy()
        out.append((view, np.ascontiguousarray(whole).reshape(view.n, -1)))
    return out


def _table_for(table: np.ndarray, have: ConfigPartition, want: ConfigPartition, pool: Pool) -> np.ndarray:
    return table if have is want else table.take(pool.sub(have, want), axis=0)


def back_substitute(plan: EliminationPlan, pool: Pool, n: int, given: np.ndarray | None = None) -> np.ndarray:
    """Choose configs in reverse order of elimination; int64 [n]. given: the choice of nodes kept, int64 [n]."""
    choice = np.zeros(n, np.int64) if given is None else given.copy()
    arrays = pool.arrays
    known: dict[tuple[int, ...], int] = {}
    for step in reversed(plan.steps):
        # The same step under the same neighbours' classes has the same answer.
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
