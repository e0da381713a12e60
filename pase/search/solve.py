"""The one entry: eliminate exactly where an order fits; else, or under a memory limit, search bounded."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from pase.search import kernels_numpy
from pase.search.check import cost_of
from pase.search.clock import DEFAULT_SECONDS, Clock
from pase.search.eliminate import back_substitute, run_plan
from pase.search.exact import Kernel, best_plan, kernels_for
from pase.search.factors import Pool, load
from pase.search.hull import hull, memory_fits
from pase.search.plan import EliminationPlan, generate_seq, plan_elimination
from pase.search.repeat import fold
from pase.search.types import MemoryProfile, Progress, Solution
from pase.tables.types import CostTables

__all__ = ["find_best_strategy", "solve"]


def find_best_strategy(
    tables: CostTables, order: tuple[int, ...] | None = None, *, kernel: Kernel = "numba"
) -> Solution:
    """PaSE's FindBestStrategy: exact, by the given order of nodes (default: GenerateSeq's).

    Whatever it takes: no budget, no other order. ``solve`` chooses better ones.
    """
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
    tables: CostTables, plan: EliminationPlan, pool: Pool, kernel: Kernel, threads: int, began: float
) -> Solution:
    kernels = kernels_for(kernel, plan.work)
    bound = run_plan(plan, pool, kernels, threads)
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
    memory: MemoryProfile | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    kernel: Kernel = "numba",
    threads: int = 2,
    progress: Progress | None = None,
    gap: float = 0.0,
) -> Solution:
    """The choice of least cost, optionally within a memory limit, with its certificate.

    Exact by elimination wherever an order fits the budget (about 10 s and 1 GB). Otherwise, and where the
    memory limit binds, a search that improves its answer and its lower bound until they meet or
    ``time_limit`` seconds (60 if None) are over; Ctrl-C ends it with the best so far.

    seed: steers the random parts; the same seed takes the same path, up to where the clock ends it.
    kernel: "numba", or "numpy" (elimination alone).
    gap: a bounded search may stop once (cost - bound) / |cost| is at most this; 0 asks for a proof.
    progress: called now and then with (phase, best cost, bound, seconds).
    Raises Infeasible where it is proven that nothing has a finite cost or nothing fits.
    """
    began = time.perf_counter()
    if memory is not None and len(memory.bytes) != len(tables.node_costs):
        raise ValueError(f"memory profile of {len(memory.bytes)} nodes for {len(tables.node_costs)} nodes")
    free = _eliminate(tables, kernel, threads, seed, began)
    if free is not None and (memory is None or memory_fits(memory, free.choice)):
        return free
    known = None
    if memory is not None and free is not None:
        clock = Clock(began + (DEFAULT_SECONDS if time_limit is None else time_limit))

        def best(priced: CostTables) -> tuple[np.ndarray, float]:
            at = solve(priced, kernel=kernel, threads=threads, seed=seed)
            return at.choice, at.bound

        known = hull(tables, memory, free.choice, best, clock)
    from pase.search.bounded import bounded_search

    found = bounded_search(tables, memory, time_limit, seed, began, progress, known=known, gap=gap)
    if free is not None and free.bound > found.bound:
        found = replace(found, bound=min(free.bound, found.cost), certificate="elimination without the limit")
    return found


def _eliminate(tables: CostTables, kernel: Kernel, threads: int, seed: int, began: float) -> Solution | None:
    """The optimum without a limit; None where no order fits."""
    if len(tables.node_costs) > _MAX_PLANNED_NODES:
        return None
    folded = _fold_and_solve(tables, kernel, threads, seed, began)
    if folded is not None:
        return folded
    pool = Pool()
    factors = load(tables, pool, kernels_for(kernel, tables.entries * 20))
    plan = best_plan(len(tables.node_costs), factors, pool, seed)
    return None if plan is None else _finish(tables, plan, pool, kernel, threads, began)


def _fold_and_solve(
    tables: CostTables, kernel: Kernel, threads: int, seed: int, began: float
) -> Solution | None:
    """Through repeated blocks, where there are some and what is left can be eliminated."""
    small = tables
    folds = []
    while len(small.node_costs) >= _WORTH_FOLDING:
        folded = fold(small, kernel, threads)
        if folded is None:
            break
        folds.append(folded)
        small = folded.tables
    if not folds:
        return None
    pool = Pool()
    factors = load(small, pool, kernels_for(kernel, small.entries * 20))
    plan = best_plan(len(small.node_costs), factors, pool, seed)
    if plan is None:
        return None
    found = _finish(small, plan, pool, kernel, threads, began)
    choice, order = found.choice, np.array(found.order, np.int64)
    for folded in reversed(folds):
        choice, order = folded.expand(choice), folded.nodes[order]
    cost = cost_of(tables, choice)
    return replace(
        found,
        choice=choice,
        cost=cost,
        bound=min(found.bound, cost),
        order=tuple(order.tolist()),
        seconds=time.perf_counter() - began,
        method="elimination, repeated blocks folded",
        work=found.work + sum(folded.work for folded in folds),
    )


_WORTH_FOLDING = 150  # nodes; below, planning is as quick
_MAX_PLANNED_NODES = 20_000  # beyond, reductions come first: planning takes a while per node
