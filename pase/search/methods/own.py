"""The searches that `pase.search` provides."""

from __future__ import annotations

import time

from pase.search.check import brute_force
from pase.search.registry import SearchOptions, register
from pase.search.solve import find_best_strategy, solve
from pase.search.types import Effort, MemoryProfile, Solution
from pase.tables.types import CostTables

__all__: list[str] = []


@register("auto", "elimination if an order fits, otherwise bounds and neighbourhood search", rank=0)
def _auto(tables: CostTables, memory: MemoryProfile | None, options: SearchOptions) -> Solution:
    return solve(
        tables,
        memory,
        seed=options.seed,
        kernel=options.kernel,
        progress=options.progress,
        effort=Effort(time_limit=options.time_limit, rounds=options.rounds),
    )


@register("paper", "PaSE's GenerateSeq and FindBestStrategy, without a budget", takes_limit=False)
def _paper(tables: CostTables, memory: MemoryProfile | None, options: SearchOptions) -> Solution:
    return find_best_strategy(tables, kernel=options.kernel)


@register("bounded", "bounds and neighbourhood search only")
def _bounded(tables: CostTables, memory: MemoryProfile | None, options: SearchOptions) -> Solution:
    from pase.search.bounded.search import bounded_search

    began = time.perf_counter()
    return bounded_search(
        tables,
        memory,
        Effort(time_limit=options.time_limit, rounds=options.rounds),
        options.seed,
        began,
        options.progress,
    )


@register("brute_force", "enumerates every choice, at most 4 million")
def _brute_force(tables: CostTables, memory: MemoryProfile | None, options: SearchOptions) -> Solution:
    return brute_force(tables, memory)
