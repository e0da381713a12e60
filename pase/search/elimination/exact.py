"""Exact elimination with the best of several orders, within a budget of work and memory."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Literal

import numpy as np

from pase.clock import Stopped, never
from pase.compiled import BreakEven
from pase.search.elimination import kernels_numpy
from pase.search.elimination.eliminate import back_substitute, run_plan
from pase.search.elimination.factors import Factor, Pool, load
from pase.search.elimination.plan import EliminationPlan, Greedy, plan_elimination
from pase.tables.types import CostTables, EdgeTable

__all__ = ["KernelName", "best_plan", "eliminate_pairwise", "kernels_for"]

KernelName = Literal["numba", "numpy"]

MAX_WORK = 20_000_000_000  # min-plus operations, a few seconds on two cores
MAX_ENTRIES = 100_000_000  # entries of all tables together, 8 bytes each
_OPERATION_S = 1.5e-9  # about how long numpy takes for a min-plus operation
_PLANNING_WORK = 4_000_000  # the cost of planning one more order, per ten nodes


KERNELS = BreakEven(load_s=1.5)


def kernels_for(kernel: KernelName, work: float) -> ModuleType:
    """The kernel module for about ``work`` operations: numpy's, or numba's if requested and worth its import.

    Both give the same bits.
    """
    if kernel not in ("numba", "numpy"):
        raise ValueError(f"unknown kernel {kernel!r}; choose 'numba' or 'numpy'")
    if kernel == "numpy" or not KERNELS.pays(work * _OPERATION_S):
        return kernels_numpy
    from pase.search.elimination import kernels_numba

    return kernels_numba


def best_plan(
    n: int, factors: list[Factor], pool: Pool, seed: int = 0, stop: Callable[[], bool] = never
) -> EliminationPlan | None:
    """The cheapest order found; None if all exceed MAX_WORK or MAX_ENTRIES.

    Tries more rules, and then random ones, while planning is cheap compared with the best plan's work. stop: called
    from time to time; if it returns True, the best order so far is returned.
    """
    best: EliminationPlan | None = None
    ceiling = float(MAX_WORK)
    tries: list[tuple[str, float]] = [("growth", 0.0), ("work", 0.0), ("size", 0.0)]
    tries += [("growth", 0.5), ("work", 0.5)] * 4
    for i, (rule, noise) in enumerate(tries):
        plan = plan_elimination(
            n,
            factors,
            pool,
            order=Greedy(rule=rule, noise=noise, seed=seed + i),
            stop_above=ceiling,
            stop=stop,
        )
        if plan.complete and plan.entries <= MAX_ENTRIES and (best is None or plan.work < best.work):
            best, ceiling = plan, float(plan.work)
        spent = (i + 1) * n * _PLANNING_WORK // 10
        if (best is not None and best.work < 8 * spent) or (best is None and i >= 4) or stop():
            break
    return best


def eliminate_pairwise(
    costs: list[np.ndarray],
    pairs: list[tuple[int, int]],
    matrices: list[np.ndarray],
    stop: Callable[[], bool] = never,
) -> np.ndarray | None:
    """The best choice, int64 [n], by elimination. None if no order fits the budget, or if ``stop`` returns True
    first."""
    iota = {c.size: np.arange(c.size, dtype=np.int32) for c in costs}
    edges = tuple(
        EdgeTable(src=a, dst=b, cost=m, src_class=iota[m.shape[0]], dst_class=iota[m.shape[1]])
        for (a, b), m in zip(pairs, matrices, strict=True)
    )
    tables = CostTables(node_costs=tuple(costs), edges=edges)
    pool = Pool()
    factors = load(tables, pool, kernels_for("numba", tables.entries * 20))
    plan = best_plan(len(costs), factors, pool, stop=stop)
    if plan is None:
        return None
    try:
        run_plan(plan, pool, kernels_for("numba", plan.work), 2, stop)
    except Stopped:
        return None
    return back_substitute(plan, pool, len(costs))
