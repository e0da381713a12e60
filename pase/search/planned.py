"""Searches over tables that differ only in their costs: an elimination order is planned once and reused.

Two tables have the same structure if their edges join the same nodes by the same classes of configs, and if the same
nodes and edges share their costs. The plan does not use the costs themselves, so equal rows are not merged, and a table
that is a sum is not split.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from pase.search.check import cost_of
from pase.search.elimination.eliminate import back_substitute, run_plan
from pase.search.elimination.exact import best_plan, kernels_for
from pase.search.elimination.factors import Factor, Pool
from pase.search.elimination.plan import EliminationPlan
from pase.search.solve import WORTH_FOLDING, solve
from pase.search.types import Solution
from pase.tables.types import CostTables

__all__ = ["PlanCache"]

_THREADS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class _Planned:
    """A plan for one structure.

    nodes: signature -> a node with these costs. edges: signature -> an edge with these costs, and the representative
    classes of its two ends in the edge's views.
    """

    pool: Pool
    plan: EliminationPlan
    nodes: dict[int, int]
    edges: dict[int, tuple[int, np.ndarray, np.ndarray]]

    def solve(self, tables: CostTables) -> Solution:
        arrays = {sig: tables.node_costs[v] for sig, v in self.nodes.items()}
        for sig, (i, rows, columns) in self.edges.items():
            array = tables.edges[i].cost[rows[:, None], columns]
            arrays[sig] = array.ravel() if 1 in array.shape else array
        pool, plan = replace(self.pool, arrays=arrays), self.plan
        bound = run_plan(plan, pool, kernels_for("numba", plan.work), _THREADS)
        choice = back_substitute(plan, pool, len(tables.node_costs))
        cost = cost_of(tables, choice)
        return Solution(
            choice=choice, cost=cost, bound=min(bound, cost), optimal=True, order=plan.order, work=plan.work
        )


@dataclass(kw_only=True, eq=False)
class PlanCache:
    """Plans by structure; None if no order fits the budget. Large tables are searched without a cached plan."""

    plans: dict[Hashable, _Planned | None] = field(default_factory=dict)

    def solve(self, tables: CostTables) -> Solution:
        """The choice of least cost. Raises Infeasible if every choice costs infinity."""
        if len(tables.node_costs) >= WORTH_FOLDING:
            return solve(tables)
        key = _structure(tables)
        if key not in self.plans:
            self.plans[key] = _planned(tables)
        plan = self.plans[key]
        return solve(tables) if plan is None else plan.solve(tables)


def _structure(tables: CostTables) -> Hashable:
    """A key that is equal for tables of the same structure."""
    seen: dict[int, int] = {}

    def number(costs: np.ndarray) -> int:
        return seen.setdefault(id(costs), len(seen))

    nodes = tuple((c.size, number(c)) for c in tables.node_costs)
    classes = {id(c): c.tobytes() for e in tables.edges for c in (e.src_class, e.dst_class)}
    edges = tuple(
        (e.src, e.dst, classes[id(e.src_class)], classes[id(e.dst_class)], number(e.cost))
        for e in tables.edges
    )
    return nodes, edges


def _planned(tables: CostTables) -> _Planned | None:
    """Plan the elimination of tables of this structure. None if no order fits the budget."""
    pool, factors = Pool(), list[Factor]()
    nodes, edges = dict[int, int](), dict[int, tuple[int, np.ndarray, np.ndarray]]()
    for v, costs in enumerate(tables.node_costs):
        sig = pool.sig(id(costs))
        nodes.setdefault(sig, v)
        factors.append(Factor((v,), (pool.view(np.arange(costs.size)),), sig))
    for i, e in enumerate(tables.edges):
        views = pool.view(e.src_class), pool.view(e.dst_class)
        sig = pool.sig((id(e.cost), views[0].key, views[1].key))
        edges.setdefault(sig, (i, e.src_class[views[0].rep], e.dst_class[views[1].rep]))
        apart = [j for j, view in enumerate(views) if view.n > 1] or [0]
        factors.append(Factor(tuple((e.src, e.dst)[j] for j in apart), tuple(views[j] for j in apart), sig))
    for sig, v in nodes.items():
        pool.arrays[sig] = tables.node_costs[v]
    plan = best_plan(len(tables.node_costs), factors, pool)
    return None if plan is None else _Planned(pool=pool, plan=plan, nodes=nodes, edges=edges)
