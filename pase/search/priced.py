"""The same elimination at many prices: tables are loaded and an order is planned once; only node costs change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.search.eliminate import back_substitute, run_plan
from pase.search.exact import KernelName, best_plan, kernels_for
from pase.search.factors import Pool, load
from pase.search.plan import EliminationPlan
from pase.tables.types import CostTables

__all__ = ["PricedTables", "prepare"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedTables:
    """Tables whose nodes hold bytes, ready to be eliminated at any price per byte.

    held: per node float64 [K, sums], the bytes that config k adds to each sum.
    """

    tables: CostTables
    held: tuple[np.ndarray, ...]
    plan: EliminationPlan
    pool: Pool
    node_sigs: tuple[int, ...]
    kernel: KernelName
    threads: int

    def at(self, prices: np.ndarray) -> tuple[np.ndarray, float, Pool]:
        """(cheapest choice int64 [nodes], its cost, the pool of all tables) where a byte of sum s costs prices[s]."""
        arrays = dict(self.pool.arrays)
        for sig, costs, held in zip(self.node_sigs, self.tables.node_costs, self.held, strict=True):
            if sig not in arrays:
                arrays[sig] = costs + held @ prices
        pool = replace(self.pool, arrays=arrays)
        least = run_plan(self.plan, pool, kernels_for(self.kernel, self.plan.work), self.threads)
        return back_substitute(self.plan, pool, len(self.held)), least, pool


def prepare(
    tables: CostTables, held: Sequence[np.ndarray], kernel: KernelName, threads: int, seed: int
) -> PricedTables | None:
    """None if no order fits. Nodes are equal if both their costs and their bytes are."""
    marks = tuple(h.tobytes() for h in held)
    pool = Pool()
    factors = load(tables, pool, kernels_for(kernel, tables.entries * 20), marks)
    plan = best_plan(len(tables.node_costs), factors, pool, seed)
    if plan is None:
        return None
    sigs = tuple(f.sig for f in factors[: len(held)])
    for sig in set(sigs):
        del pool.arrays[sig]
    return PricedTables(
        tables=tables, held=tuple(held), plan=plan, pool=pool, node_sigs=sigs, kernel=kernel, threads=threads
    )
