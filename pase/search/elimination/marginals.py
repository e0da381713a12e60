"""Min-marginals: the least cost of any choice that uses a given config, from one backward pass of an elimination.

On the forward pass, each step's table holds the least cost of its node and everything before it, for the configs of the
nodes after it. The backward pass computes the same from the other side. Both together give the min-marginals of the
node (Dechter, Artificial Intelligence 1999).
"""

from __future__ import annotations

import numpy as np

from pase.search.elimination.factors import ConfigPartition, Factor, Pool
from pase.search.elimination.plan import Elimination, EliminationPlan

__all__ = ["min_marginals"]


def min_marginals(plan: EliminationPlan, pool: Pool) -> list[np.ndarray]:
    """Per node, float64 [K]: the least cost of the choices with each config; inf if there is none. The costs of parts
    of the graph that are not connected with the node are left out.

    plan: a plan for all nodes, whose tables are in the pool. The backward pass takes as much memory again as the
    elimination's products.
    """
    made_by = {id(s.out): i for i, s in enumerate(plan.steps) if s.out.scope}
    # For each step's table, the least cost of everything else.
    rest: list[np.ndarray | None] = [None] * len(plan.steps)
    out = [np.zeros(0)] * len(plan.steps)
    for i in range(len(plan.steps) - 1, -1, -1):
        step = plan.steps[i]
        own, others = _whole(step, pool)
        if (more := rest[i]) is not None:
            others = others + more
        out[step.v] = own + others.reshape(step.view.n, -1).min(axis=1)[step.view.cls]
        joined: np.ndarray | None = None
        for f in step.factors:
            if (before := made_by.get(id(f))) is None:
                continue
            if joined is None:
                joined = _least(own, step.view).reshape(-1, *[1] * (others.ndim - 1)) + others
            seen = _least(out[step.v], f.views[0]) if len(f.scope) == 1 else _seen(joined, step, f, pool)
            known = pool.arrays[f.sig]
            with np.errstate(invalid="ignore"):
                rest[before] = np.where(np.isfinite(known), seen - known, np.inf)
    return out


def _least(costs: np.ndarray, view: ConfigPartition) -> np.ndarray:
    """The minimum of the costs in each class of a view."""
    out = np.full(view.n, np.inf)
    np.minimum.at(out, view.cls, costs)
    return out


def _whole(step: Elimination, pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """(The costs of the step's node alone [K], the sum of its tables with others [its classes, classes of the
    scope])."""
    views = {step.v: step.view, **dict(zip(step.out.scope, step.out.views, strict=True))}
    own, others = np.zeros(step.view.cls.size), np.zeros([w.n for w in views.values()])
    for f in step.factors:
        table = pool.arrays[f.sig]
        if len(f.scope) == 1:
            own = own + table[f.views[0].cls]
            continue
        for axis, (u, have) in enumerate(zip(f.scope, f.views, strict=True)):
            if have is not views[u]:
                table = table.take(pool.sub(have, views[u]), axis=axis)
        table = table.transpose([f.scope.index(u) for u in views if u in f.scope])
        others = others + table.reshape([w.n if u in f.scope else 1 for u, w in views.items()])
    return own, others


def _seen(joined: np.ndarray, step: Elimination, f: Factor, pool: Pool) -> np.ndarray:
    """The minimum of a step's joined table for each entry of one of its tables."""
    views = {step.v: step.view, **dict(zip(step.out.scope, step.out.views, strict=True))}
    kept = [u for u in views if u in f.scope]
    gone = tuple(axis for axis, u in enumerate(views) if u not in f.scope)
    table = joined.min(axis=gone) if gone else joined
    table = table.transpose([kept.index(u) for u in f.scope])
    for axis, (u, want) in enumerate(zip(f.scope, f.views, strict=True)):
        if want is not views[u]:
            least = np.full((want.n, *np.delete(table.shape, axis)), np.inf)
            np.minimum.at(least, pool.sub(want, views[u]), np.moveaxis(table, axis, 0))
            table = np.moveaxis(least, 0, axis)
    return table
