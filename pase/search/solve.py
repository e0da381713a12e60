"""The one entry: shrink, plan, eliminate; when no order fits, bounded search."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Literal

import numpy as np

from pase.search import kernels_numpy
from pase.search.check import cost_of
from pase.search.eliminate import back_substitute, run_plan
from pase.search.factors import Pool, load
from pase.search.plan import Plan, generate_seq, plan_elimination
from pase.search.types import Solution
from pase.tables.types import CostTables

__all__ = ["find_best_strategy", "kernels_for", "solve"]

Kernel = Literal["numba", "numpy"]
_SMALL_WORK = 20_000_000  # below this numpy is done before numba is imported


def kernels_for(kernel: Kernel, work: float) -> ModuleType:
    """The kernel module: numba's where asked for and worth its import (0.4 s), else numpy's."""
    if kernel not in ("numba", "numpy"):
        raise ValueError(f"kernel {kernel!r}: there are 'numba' and 'numpy'")
    loaded = "pase.search.kernels_numba" in sys.modules
    if kernel == "numpy" or (work < _SMALL_WORK and not loaded):
        return kernels_numpy
    from pase.search import kernels_numba

    return kernels_numba


def find_best_strategy(
    tables: CostTables, order: tuple[int, ...] | None = None, *, kernel: Kernel = "numba"
) -> Solution:
    """PaSE's FindBestStrategy: exact, by the given order of nodes (default: GenerateSeq's)."""
    began = time.perf_counter()
    order = generate_seq(tables) if order is None else order
    n = len(tables.node_costs)
    if sorted(order) != list(range(n)):
        raise ValueError(f"order must name each of the {n} nodes once")
    pool = Pool()
    factors = load(tables, pool, kernels_numpy)
    plan = plan_elimination(n, factors, pool, order=order)
    return _finish(tables, plan, pool, kernel, 1, began)


def _finish(
    tables: CostTables, plan: Plan, pool: Pool, kernel: Kernel, threads: int, began: float
) -> Solution:
    kernels = kernels_for(kernel, plan.work)
    bound = run_plan(plan, pool, kernels, threads if kernels is not kernels_numpy else 1)
    choice = back_substitute(plan, pool, len(tables.node_costs))
    cost = cost_of(tables, choice)
    return Solution(
        choice=choice,
        cost=cost,
        bound=min(bound, cost),
        optimal=True,
        seconds=time.perf_counter() - began,
        order=plan.order,
        work=plan.work,
        peak_entries=plan.peak,
    )


def solve(
    tables: CostTables,
    memory: None = None,
    time_limit: float | None = None,
    seed: int = 0,
    kernel: Kernel = "numba",
    threads: int = 2,
) -> Solution:
    """The choice of least cost, with its certificate. Raises Infeasible if there is none."""
    began = time.perf_counter()
    n = len(tables.node_costs)
    pool = Pool()
    entries = sum({id(e.cost): e.cost.size for e in tables.edges}.values())
    factors = load(tables, pool, kernels_for(kernel, entries * 20))
    best: Plan | None = None
    for rule in ("growth", "work", "degree"):
        plan = plan_elimination(n, factors, pool, rule=rule, stop_above=best.work if best else np.inf)
        if plan.complete and (best is None or plan.work < best.work):
            best = plan
    assert best is not None
    return _finish(tables, best, pool, kernel, threads, began)
