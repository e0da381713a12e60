"""Repeated elimination at different prices: tables are loaded and an order is planned once, and only prices change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.search.elimination.eliminate import back_substitute, run_plan
from pase.search.elimination.exact import KernelName, best_plan, kernels_for
from pase.search.elimination.factors import Factor, Pool, load
from pase.search.elimination.plan import EliminationPlan, plan_elimination
from pase.tables.types import CostTables

__all__ = ["HeldAlong", "PricedTables", "effort_of", "prepare"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldAlong:
    """What a pair of nodes adds to each sum: float64 [classes of src, classes of dst, sums]."""

    src: int
    dst: int
    src_class: np.ndarray
    dst_class: np.ndarray
    held: np.ndarray

    def between(self, v: int, own: np.ndarray, others: np.ndarray) -> np.ndarray:
        """What pairs of configs (node v's, the other node's) add to each sum: float64 [pairs, sums]."""
        a, b = (own, others) if v == self.src else (others, own)
        return self.held[self.src_class[a], self.dst_class[b]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedTables:
    """Tables whose nodes and pairs hold bytes, ready to be eliminated at any price per byte.

    held: per node, float64 [K, sums], the bytes that each config adds to each sum. along_sigs: signature -> what a pair
    holds, float64 [classes of src, classes of dst, sums].
    """

    tables: CostTables
    held: tuple[np.ndarray, ...]
    plan: EliminationPlan
    pool: Pool
    node_sigs: tuple[int, ...]
    along_sigs: dict[int, np.ndarray]
    kernel: KernelName
    threads: int

    @property
    def effort(self) -> int:
        """The effort of one elimination (see ``effort_of``)."""
        return effort_of(self.plan.work)

    def at(self, prices: np.ndarray) -> tuple[np.ndarray, float, Pool]:
        """(Cheapest choice int64 [nodes], its cost, the pool of all tables) if a byte of sum s costs prices[s]."""
        arrays = dict(self.pool.arrays)
        for sig, costs, held in zip(self.node_sigs, self.tables.node_costs, self.held, strict=True):
            if sig not in arrays:
                arrays[sig] = costs + held @ prices
        for sig, held in self.along_sigs.items():
            arrays[sig] = held @ prices
        pool = replace(self.pool, arrays=arrays)
        least = run_plan(self.plan, pool, kernels_for(self.kernel, self.plan.work), self.threads)
        return back_substitute(self.plan, pool, len(self.held)), least, pool


_PRODUCTS = 50
_STEPS = 50_000


def effort_of(products: int) -> int:
    """The effort of an elimination of ``products`` min-plus operations.

    The unit is that of work within a memory limit: 50 ns on an idle core (x86-64, 2026). A compiled kernel does 50
    operations in that time. The Python steps of an elimination take 2.5 ms.

    >>> effort_of(8_000_000)
    210000
    """
    return products // _PRODUCTS + _STEPS


def prepare(
    tables: CostTables,
    held: Sequence[np.ndarray],
    kernel: KernelName,
    threads: int,
    seed: int,
    along: Sequence[HeldAlong] = (),
    order: tuple[int, ...] | None = None,
) -> PricedTables | None:
    """Plan the elimination of priced tables. None if no order fits.

    Nodes are treated as equal if both their costs and their bytes are equal. along: what pairs hold. order: from a
    problem with the same edges and at least as many configs; None: the best order that is found.
    """
    n = len(tables.node_costs)
    marks = tuple(h.tobytes() for h in held)
    pool = Pool()
    factors = load(tables, pool, kernels_for(kernel, tables.entries * 20), marks)
    pairs: dict[int, np.ndarray] = {}
    for e in along:
        views = pool.view(e.src_class), pool.view(e.dst_class)
        own = np.ascontiguousarray(e.held[np.ix_(e.src_class[views[0].rep], e.dst_class[views[1].rep])])
        sig = pool.sig(("along", own.shape, own.tobytes()))
        pairs[sig] = own
        factors.append(Factor((e.src, e.dst), views, sig))
    plan = (
        best_plan(n, factors, pool, seed)
        if order is None
        else plan_elimination(n, factors, pool, order=order)
    )
    if plan is None:
        return None
    sigs = tuple(f.sig for f in factors[:n])
    for sig in set(sigs):
        del pool.arrays[sig]
    return PricedTables(
        tables=tables,
        held=tuple(held),
        plan=plan,
        pool=pool,
        node_sigs=sigs,
        along_sigs=pairs,
        kernel=kernel,
        threads=threads,
    )
