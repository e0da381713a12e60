"""Elimination of a plan's steps as min-plus products, and back-substitution (FindBestStrategy)."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from pase.errors import Infeasible
from pase.search.factors import Factor, Pool, View
from pase.search.plan import Plan, Step

__all__ = ["back_substitute", "run_plan"]


def run_plan(plan: Plan, pool: Pool, kernels: ModuleType, threads: int = 1) -> float:
    """Compute the table of every distinct step; returns the minimum. Raises Infeasible if that is inf."""
    total = 0.0
    for step in plan.steps:
        if step.out.sig not in pool.arrays:
            pool.arrays[step.out.sig] = _eliminate(step, pool, kernels, threads)
        if not step.out.scope:
            total += float(pool.arrays[step.out.sig])
    if not np.isfinite(total):
        raise Infeasible("no choice of configs has a finite cost: every one meets a forbidden config or pair")
    return total


def _base(step: Step, pool: Pool) -> np.ndarray:
    """Sum of v's node factors over its configs, float64 [K]."""
    total: np.ndarray | None = None
    for f in step.factors:
        if len(f.scope) == 1:
            part = pool.arrays[f.sig][f.views[0].cls]
            total = part if total is None else total + part
    return np.zeros(step.view.cls.size) if total is None else total


def _aligned(
    f: Factor, v: int, own: View, scope: tuple[int, ...], views: dict[int, View], pool: Pool
) -> np.ndarray:
    """f's table, axes (v in classes of ``own``, then ``scope`` in classes of ``views``), broadcastable."""
    order = [f.scope.index(u) for u in (v, *scope) if u in f.scope]
    table = pool.arrays[f.sig].transpose(order)
    for axis, u in enumerate([u for u in (v, *scope) if u in f.scope]):
        have = f.views[f.scope.index(u)]
        want = own if u == v else views[u]
        if have is not want:
            table = table.take(pool.sub(have, want), axis=axis)
    shape = [own.n, *(views[u].n if u in f.scope else 1 for u in scope)]
    return table.reshape(shape)


def _eliminate(step: Step, pool: Pool, kernels: ModuleType, threads: int) -> np.ndarray:
    base = _base(step, pool)
    joint = [f for f in step.factors if len(f.scope) > 1]
    if not joint:
        return np.asarray(base.min())
    views = dict(zip(step.out.scope, step.out.views, strict=True))
    groups = _two_groups(joint, step.v, views)
    if len(groups) == 1:
        own, scope, table = _merge(groups[0], step, views, pool)
        flat = np.ascontiguousarray(table.reshape(own.n, -1))
        least = np.full(own.n, np.inf)
        np.minimum.at(least, own.cls, base)
        zero = np.zeros(own.n, np.int32)
        out = kernels.segment_min(least, zero, 1, np.arange(own.n, dtype=np.int32), flat)
        return _ordered(out.reshape([views[u].n for u in scope]), scope, step.out.scope)
    left, right = (_merge(g, step, views, pool) for g in groups)
    # The side of fewer classes is the one that min-plus walks; the other is first minimised over the
    # configs that lie in each of its classes.
    if left[0].n > right[0].n:
        left, right = right, left
    (own_l, scope_l, table_l), (own_r, scope_r, table_r) = left, right
    shared = [u for u in scope_l if u in scope_r]
    only_l = [u for u in scope_l if u not in scope_r]
    only_r = [u for u in scope_r if u not in scope_l]
    x, p, q = (int(np.prod([views[u].n for u in s], dtype=np.int64)) for s in (shared, only_l, only_r))
    lhs = _ordered(table_l, (-1, *scope_l), (-1, *shared, *only_l)).reshape(own_l.n, x, p)
    rhs = _ordered(table_r, (-1, *scope_r), (-1, *shared, *only_r)).reshape(own_r.n, x * q)
    rhs = kernels.segment_min(base, own_l.cls, own_l.n, own_r.cls, np.ascontiguousarray(rhs)).reshape(
        own_l.n, x, q
    )
    lhs = np.ascontiguousarray(lhs)
    if p > q:  # the long axis is the one that runs through memory
        out = kernels.min_plus(rhs, lhs, threads) if threads > 1 else kernels.min_plus(rhs, lhs)
        made = (*shared, *only_r, *only_l)
    else:
        out = kernels.min_plus(lhs, rhs, threads) if threads > 1 else kernels.min_plus(lhs, rhs)
        made = (*shared, *only_l, *only_r)
    return _ordered(out.reshape([views[u].n for u in made]), made, step.out.scope)


def _ordered(table: np.ndarray, have: tuple[int, ...], want: tuple[int, ...]) -> np.ndarray:
    return np.ascontiguousarray(table.transpose([have.index(u) for u in want])) if have != want else table


def _two_groups(joint: list[Factor], v: int, views: dict[int, View]) -> list[list[Factor]]:
    """Split v's factors into at most two groups: contained scopes together, the larger group small."""
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


def _merge(
    group: list[Factor], step: Step, views: dict[int, View], pool: Pool
) -> tuple[View, tuple[int, ...], np.ndarray]:
    """The sum of a group's tables: (v's view there, scope, table [view.n, *scope])."""
    own: View | None = None
    for f in group:
        view = f.views[f.scope.index(step.v)]
        own = view if own is None else pool.joint(own, view)
    assert own is not None
    scope = tuple(u for u in step.out.scope if any(u in f.scope for f in group))
    total: np.ndarray | None = None
    for f in group:
        part = _aligned(f, step.v, own, scope, views, pool)
        total = part if total is None else total + part
    assert total is not None
    return own, scope, total


def back_substitute(plan: Plan, pool: Pool, n: int, given: np.ndarray | None = None) -> np.ndarray:
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
