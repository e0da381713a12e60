"""The main entry point: exact elimination if an order fits; otherwise, or under a memory limit, bounded search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pase.clock import Deadline, Stopped, never
from pase.search.check import cost_of
from pase.search.elimination import kernels_numpy
from pase.search.elimination.eliminate import back_substitute, run_plan
from pase.search.elimination.exact import KernelName, best_plan, kernels_for
from pase.search.elimination.factors import Pool, load
from pase.search.elimination.plan import EliminationPlan, generate_seq, plan_elimination
from pase.search.elimination.priced import effort_of
from pase.search.elimination.repeat import fold
from pase.search.limits.excess import Excess
from pase.search.limits.within import Within, fits
from pase.search.types import FULL_EFFORT, Effort, MemoryProfile, SearchProgress, Solution
from pase.tables.types import CostTables

__all__ = ["Known", "find_best_strategy", "price_memory", "solve"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the caller already knows of a problem before it is searched within a memory limit.

    below: choices of this cost or more are not needed. Once no lower cost is possible, the search may end without a
        feasible choice.
    byte_price: the price per byte from the solution of a similar problem; the search starts with it.
    free: the solution without the limit, of these tables or of tables that forbid less.
    excess: sums whose excess is charged: the tables are a mean that bounds the cost of a choice. If no elimination
    order
        fits, it is ignored, and the solution's cost is that of the tables.
    close: whether to search on for a better choice after pricing bytes has found one that fits.
    """

    below: float = np.inf
    byte_price: float = 0.0
    free: Solution | None = None
    excess: Excess | None = None
    close: bool = True


NOTHING_KNOWN = Known()


def find_best_strategy(
    tables: CostTables, order: tuple[int, ...] | None = None, *, kernel: KernelName = "numba"
) -> Solution:
    """PaSE's FindBestStrategy: exact elimination in the given order of nodes (default: GenerateSeq's).

    There is no budget of work, and no other order is tried. ``solve`` chooses better orders.
    """
    began = time.perf_counter()
    order = generate_seq(tables) if order is None else order
    n = len(tables.node_costs)
    if sorted(order) != list(range(n)):
        raise ValueError(f"order must contain each of the {n} nodes exactly once")
    pool = Pool()
    factors = load(tables, pool, kernels_numpy)
    plan = plan_elimination(n, factors, pool, order=order)
    return _finish(tables, plan, pool, kernel, 1, began)


def _finish(
    tables: CostTables,
    plan: EliminationPlan,
    pool: Pool,
    kernel: KernelName,
    threads: int,
    began: float,
    stop: Callable[[], bool] = never,
) -> Solution:
    """Execute a plan and return its optimal solution."""
    kernels = kernels_for(kernel, plan.work)
    bound = run_plan(plan, pool, kernels, threads, stop)
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
    seed: int = 0,
    kernel: KernelName = "numba",
    threads: int = 2,
    progress: SearchProgress | None = None,
    effort: Effort = FULL_EFFORT,
    known: Known = NOTHING_KNOWN,
) -> Solution:
    """The choice of least cost, optionally within a memory limit, with its certificate.

    The search is exact, by elimination, if an order fits the budget (about 10 s and 1 GB). Otherwise, and if the memory
    limit binds, a bounded search improves its choice and its lower bound until they meet or its budget of work is
    spent. Ctrl-C ends it with the best choice so far.

    seed: for the random parts. The same seed gives the same result, unless a time limit ends the search.
    kernel: "numba", or "numpy" (elimination only).
    effort: how long it goes on.
    known: what the caller already knows, which shortens a search within a limit.
    progress: called from time to time with (phase, best cost, bound, seconds).
    Raises Infeasible if it is proven that no choice has a finite cost or that none fits.
    """
    began = time.perf_counter()
    if memory is not None and memory.nodes != len(tables.node_costs):
        raise ValueError(
            f"the memory profile has {memory.nodes} nodes, but the tables have {len(tables.node_costs)}"
        )
    free = known.free
    if free is None or not free.optimal or not np.isfinite(cost_of(tables, free.choice)):
        stop = Deadline.after(began, effort.time_limit).past(_TO_ELIMINATE)
        free = _eliminate(tables, kernel, threads, seed, began, stop)
    if free is not None and (memory is None or (known.excess is None and fits(memory, free.choice))):
        return free
    begin = None
    if memory is not None and free is not None:
        clock = Deadline.after(began, effort.time_limit)
        within = _within(tables, memory, kernel, threads, seed, clock)
        within.below, within.price, within.excess = known.below, known.byte_price, known.excess
        within.labels = effort.labels
        if within.run(free.choice, close=known.close):
            enough = within.cost - within.bound <= effort.gap * abs(within.cost)
            if (
                within.decided
                or enough
                or clock.left <= 0
                or known.excess is not None
                or (effort.rounds is not None and within.choice is not None)
            ):
                return _limited_solution(within, free, began, free is known.free)
            begin = (free.choice if within.choice is None else within.choice), within.bound
    from pase.search.bounded.search import bounded_search

    found = bounded_search(tables, memory, effort, seed, began, progress, begin)
    if begin is not None:
        found = replace(found, work=found.work + within.work)
    if free is not None and free.bound > found.bound:
        found = replace(found, bound=min(free.bound, found.cost), certificate="elimination without the limit")
    return found


def price_memory(
    tables: CostTables, memory: MemoryProfile, free: Solution, byte_price: float = 0.0
) -> tuple[float, float]:
    """(A lower bound on the cost of what fits, the price per byte at that bound), by elimination with priced bytes.

    free: the solution without the limit. byte_price: if given, the only price to try; 0: search for the best price.
    Returns (-inf, 0) if no order fits. Raises Infeasible if it is proven that nothing fits.
    """
    # Pricing starts from the least cost, which only an optimal solution provides.
    if fits(memory, free.choice) or not free.optimal:
        return free.bound, 0.0
    within = _within(tables, memory, "numba", 2, 0, Deadline(np.inf))
    within.price = byte_price
    if byte_price:
        within.below = -np.inf  # any bound from the first price is enough
    if not within.run(free.choice, most_sums=1, close=False):
        return -np.inf, 0.0
    return within.bound, within.price


def _limited_solution(within: Within, free: Solution, began: float, known: bool) -> Solution:
    """The solution found within the limit. known: whether the caller provided ``free``, so that it took no work
    here."""
    choice = free.choice if within.choice is None else within.choice
    cost = free.cost if within.choice is None else within.cost
    return Solution(
        choice=choice,
        cost=cost,
        bound=min(within.bound, within.cost),
        optimal=within.optimal,
        feasible=within.choice is not None,
        seconds=time.perf_counter() - began,
        order=free.order,
        method="elimination at prices per byte",
        certificate="elimination at the best price per byte, and labels",
        work=within.work + (0 if known else effort_of(free.work)),
        peak_entries=free.peak_entries,
        byte_price=within.price,
    )


def _within(
    tables: CostTables, memory: MemoryProfile, kernel: KernelName, threads: int, seed: int, clock: Deadline
) -> Within:
    """The search within a memory limit."""

    def folded(priced: CostTables) -> tuple[np.ndarray, float, int]:
        at = solve(priced, kernel=kernel, threads=threads, seed=seed)
        return at.choice, at.bound, effort_of(at.work)

    return Within(
        tables=tables,
        memory=memory,
        eliminate=folded if len(tables.node_costs) >= WORTH_FOLDING else None,
        kernel=kernel,
        threads=threads,
        seed=seed,
        stop=lambda: clock.left <= 0,
    )


def _eliminate(
    tables: CostTables, kernel: KernelName, threads: int, seed: int, began: float, stop: Callable[[], bool]
) -> Solution | None:
    """The optimum without a limit. None if no order fits, or if ``stop`` returns True first."""
    if len(tables.node_costs) > _MAX_PLANNED_NODES:
        return None
    try:
        folded = _fold_and_solve(tables, kernel, threads, seed, began, stop)
        if folded is not None:
            return folded
        pool = Pool()
        factors = load(tables, pool, kernels_for(kernel, tables.entries * 20))
        plan = best_plan(len(tables.node_costs), factors, pool, seed, stop)
        return None if plan is None else _finish(tables, plan, pool, kernel, threads, began, stop)
    except Stopped:
        return None


def _fold_and_solve(
    tables: CostTables, kernel: KernelName, threads: int, seed: int, began: float, stop: Callable[[], bool]
) -> Solution | None:
    """Solves by folding repeated blocks. None if there are none, or if the folded tables cannot be eliminated."""
    small = tables
    folds = []
    while len(small.node_costs) >= WORTH_FOLDING:
        folded = fold(small, kernel, threads)
        if folded is None:
            break
        folds.append(folded)
        small = folded.tables
    if not folds:
        return None
    pool = Pool()
    factors = load(small, pool, kernels_for(kernel, small.entries * 20))
    plan = best_plan(len(small.node_costs), factors, pool, seed, stop)
    if plan is None:
        return None
    found = _finish(small, plan, pool, kernel, threads, began, stop)
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


_TO_ELIMINATE = 0.5  # the largest fraction of the time limit for planning and elimination
WORTH_FOLDING = 150  # nodes; below this, planning is as fast
_MAX_PLANNED_NODES = 20_000  # above this, reductions come first, because planning takes long per node
