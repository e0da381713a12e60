"""The state of the search in bounded memory: the best choice so far, and the remaining problem."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pase.search.bounded.bundle import Bundle
from pase.search.bounded.contract import Contracted, fixed_bytes
from pase.search.bounded.flat import Flat, flatten
from pase.search.bounded.rows import Rows, memory_rows
from pase.search.check import cost_of
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables

__all__ = ["ACTIVE_POINTS", "Incumbent", "Residual", "usable_pairs"]

ACTIVE_POINTS = 400


class Incumbent:
    """The best choice so far and the best bound, in terms of the original problem."""

    def __init__(self, tables: CostTables, memory: MemoryProfile | None, began: float) -> None:
        self.tables, self.memory, self.began = tables, memory, began
        self.choice: np.ndarray | None = None
        self.cost = np.inf
        self.bound = -np.inf
        self.certificate = "dual bound"
        self.enough = 0.0

    @cached_property
    def integers(self) -> bool:
        """Whether all costs are integers, so that costs that differ by less than 1 are equal."""
        matrices = {id(e.cost): e.cost for e in self.tables.edges}.values()
        return all(map(_whole, self.tables.node_costs)) and all(map(_whole, matrices))

    def offer(self, choice: np.ndarray) -> bool:
        """Take ``choice`` (over the original nodes) if it is allowed and cheaper."""
        cost = cost_of(self.tables, choice)
        if cost >= self.cost:
            return False
        if self.memory is not None and (self.memory.usage(choice) > self.memory.limit_bytes).any():
            return False
        self.choice, self.cost = choice, cost
        return True

    def prove(self, bound: float, by: str) -> None:
        """Take a bound if it is higher than the best one so far. by: what proves it."""
        if bound > self.bound:
            self.bound, self.certificate = bound, by

    def done(self) -> bool:
        """Whether no cheaper choice can exist: bound and cost agree, up to rounding or within one integer."""
        if not np.isfinite(self.cost):
            return False
        gap = self.cost - self.bound
        return gap <= max(1e-9 * abs(self.cost), 1e-12) or (gap < 1 - 1e-6 and self.integers)


def _whole(a: np.ndarray) -> bool:
    """Whether all finite entries are integers that float64 represents exactly."""
    finite = a[np.isfinite(a)]
    return bool((finite == np.round(finite)).all() and (np.abs(finite) < 2**53).all())


class Residual:
    """Arrays of the remaining problem, and the state of its Lagrangian dual."""

    def __init__(self, left: Contracted, memory: MemoryProfile | None) -> None:
        self.left = left
        self.flat: Flat = flatten(left.costs, left.pairs, left.matrices)
        sizes = [c.size for c in left.costs]
        if memory is None:
            slot = self.flat.slot
            none = np.zeros(0, np.int64)
            self.rows = Rows(
                capacity=np.zeros(0),
                when=none,
                slot=slot,
                ptr=np.zeros(int(slot[-1]) + 1, np.int64),
                point=none,
                change=np.zeros(0),
            )
        else:
            self.rows = memory_rows(memory, sizes, left.members, fixed_bytes(left, memory))
        self.price = np.zeros(self.rows.points)
        self.message = np.zeros(self.flat.messages)
        self.active = np.zeros(ACTIVE_POINTS, np.int64)
        self.dual = np.array([-np.inf, 0.0, 0.0, 0.0, 0.0, 0.0])
        self.choice = np.array([c.argmin() for c in left.costs], np.int64)
        self.bundle = Bundle()
        self.cutting = True
        self.cut_points = np.zeros(0, np.int64)
        self.round = 0

    def inherit(self, old: Residual) -> None:
        """Start from the messages and prices of the residual from which this one was made.

        Any messages give a valid bound; if an edge has changed since, the bound is only weaker.
        """
        self._inherit_messages(old)
        if not self.rows.points:
            return
        for t in np.flatnonzero(old.price > 0):
            at = int(np.abs(self.rows.when - old.rows.when[t]).argmin())
            self.price[at] += old.price[t]
        live = np.flatnonzero(self.price)[:ACTIVE_POINTS]
        self.active[: live.size] = live
        self.dual[2] = live.size
        self.dual[1] = 2.0 * old.dual[1]
        self.cutting, self.cut_points = old.cutting, live

    def _inherit_messages(self, old: Residual) -> None:
        """Copy the messages of edges and configs that still exist."""
        before = {v: i for i, v in enumerate(old.left.nodes)}
        mine, theirs = ([configs for (_, configs), *_ in r.left.members] for r in (self, old))
        kept = [  # for each remaining config, its index in the old residual
            np.searchsorted(theirs[before[v]], configs)
            for v, configs in zip(self.left.nodes, mine, strict=True)
        ]
        edge = {
            (h, t): e
            for e, (h, t) in enumerate(zip(old.flat.head.tolist(), old.flat.tail.tolist(), strict=True))
        }
        for e, (h, t) in enumerate(zip(self.flat.head.tolist(), self.flat.tail.tolist(), strict=True)):
            was = edge.get((before[self.left.nodes[h]], before[self.left.nodes[t]]))
            if was is None:
                continue
            for v, to, of in (
                (t, self.flat.to_tail, old.flat.to_tail),
                (h, self.flat.to_head, old.flat.to_head),
            ):
                self.message[to[e] : to[e] + kept[v].size] = old.message[of[was] + kept[v]]

    def over(self, choice: np.ndarray) -> np.ndarray:
        """Bytes in use minus the capacity at each point, float64 [points]."""
        from pase.search.bounded.kernels_memory import usage_of

        used = np.zeros(self.rows.points)
        usage_of(self.rows.limit, self.flat.slot, choice, used)
        return used - self.rows.capacity

    def priced(self, price: np.ndarray) -> np.ndarray:
        """Node costs plus bytes at ``price``, float64 [slots]."""
        from pase.search.bounded.kernels_memory import priced_costs

        out = np.zeros(self.flat.cost.size)
        priced_costs(self.rows.limit, self.flat.cost, price, np.zeros(self.rows.points + 1), out)
        return out


def usable_pairs(state: Incumbent, now: Residual) -> tuple[np.ndarray, int]:
    """(bool per entry: whether a choice as good as the best may use it; the number of such entries over all edges)."""
    flat = now.flat
    usable = np.isfinite(flat.entries)
    if not flat.head.size:
        return usable, 0
    sizes = np.diff(flat.slot)
    area = sizes[flat.head] * sizes[flat.tail]
    if np.isfinite(state.cost):
        least_node = np.minimum.reduceat(flat.cost, flat.slot[:-1])
        least_edge = np.array(
            [flat.entries[s : s + a].min() for s, a in zip(flat.matrix, area, strict=True)], np.float64
        )
        spare = state.cost - now.left.constant - float(least_node.sum()) - float(least_edge.sum())
        # Several edges may share entries, so an entry is dropped only if all of these edges forbid it.
        most = np.full(flat.entries.size, -np.inf)
        for s, a, least in zip(flat.matrix, area, least_edge, strict=True):
            np.maximum(most[s : s + a], least + spare, out=most[s : s + a])
        usable &= flat.entries <= most + 1e-9 * abs(state.cost)
    count = np.concatenate([[0], np.cumsum(usable)])
    return usable, int((count[flat.matrix + area] - count[flat.matrix]).sum())
