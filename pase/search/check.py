"""Two oracles: the cost of a choice, recomputed from scratch, and brute force."""

from __future__ import annotations

import numpy as np

from pase.errors import Infeasible
from pase.search.types import MemoryProfile, Solution
from pase.tables.types import CostTables

__all__ = ["brute_force", "cost_of", "verify"]

_BRUTE_LIMIT = 1 << 22


def cost_of(tables: CostTables, choice: np.ndarray) -> float:
    """The sum of node costs and edge costs of ``choice`` (int [nodes]), from the tables alone."""
    total = 0.0
    for v, costs in enumerate(tables.node_costs):
        total += float(costs[choice[v]])
    for e in tables.edges:
        total += float(e.cost[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]])
    return total


def verify(
    tables: CostTables, solution: Solution, memory: MemoryProfile | None = None, rtol: float = 1e-9
) -> float:
    """Recompute the cost of ``solution`` from scratch and return it.

    Raises ValueError if the choice is out of range, the stated cost is off by more than ``rtol``
    relative, the bound exceeds the cost, or a solution that is marked feasible exceeds the memory limit.
    """
    n = len(tables.node_costs)
    choice = np.asarray(solution.choice)
    if choice.shape != (n,):
        raise ValueError(f"the solution has {choice.size} choices for {n} nodes")
    for v, costs in enumerate(tables.node_costs):
        if not 0 <= choice[v] < costs.size:
            raise ValueError(
                f"node {tables.name(v)}: config {choice[v]} is out of range; there are {costs.size} configs"
            )
    cost = cost_of(tables, choice)
    slack = rtol * max(1.0, abs(cost)) if np.isfinite(cost) else 0.0
    if not (cost == solution.cost or abs(cost - solution.cost) <= slack):
        raise ValueError(f"the solution states a cost of {solution.cost!r}, but its choice costs {cost!r}")
    if solution.bound > cost + slack:
        raise ValueError(f"the bound {solution.bound!r} exceeds the cost {cost!r}")
    over = memory is not None and bool((memory.usage(choice) > memory.limit_bytes * (1 + 1e-12)).any())
    if solution.feasible and (over or not np.isfinite(cost)):
        raise ValueError(
            "the solution is marked feasible, but "
            + ("exceeds the memory limit" if over else "uses a forbidden config or pair")
        )
    return cost


def brute_force(tables: CostTables, memory: MemoryProfile | None = None) -> Solution:
    """Evaluates every choice in one array; an oracle for tests. At most 4 M choices."""
    sizes = [c.size for c in tables.node_costs]
    total = 1
    for k in sizes:
        total *= k
    if total > _BRUTE_LIMIT:
        raise ValueError(f"brute force can enumerate at most {_BRUTE_LIMIT} choices, but there are {total}")
    cost = np.zeros(sizes)
    axis = [(1,) * v + (k,) + (1,) * (len(sizes) - v - 1) for v, k in enumerate(sizes)]
    for v, costs in enumerate(tables.node_costs):
        cost = cost + costs.reshape(axis[v])
    for e in tables.edges:
        dense = e.dense() if e.src < e.dst else e.dense().T
        shape = tuple(k if v in (e.src, e.dst) else 1 for v, k in enumerate(sizes))
        cost = cost + dense.reshape(shape)
    if memory is not None:
        for t in range(int(memory.stop.max(initial=0))):
            used = np.zeros(sizes)
            for i in np.flatnonzero((memory.start <= t) & (t < memory.stop)):
                used = used + memory.bytes[i].reshape(axis[memory.owners[i]])
            cost = np.where(used > memory.limit_bytes, np.inf, cost)
    best = float(cost.min(initial=np.inf))
    if not np.isfinite(best):
        raise Infeasible(
            "no choice of configs has a finite cost" + (" within the memory limit" if memory else "")
        )
    best_choice = np.array(np.unravel_index(int(cost.argmin()), cost.shape), dtype=np.int64)
    return Solution(
        choice=best_choice,
        cost=best,
        bound=best,
        optimal=True,
        method="brute force",
        certificate="enumeration",
    )
