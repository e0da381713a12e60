"""The cheapest choice within a memory limit, if an elimination order fits.

The limit becomes a few sums (``sums``). The best price per byte of each sum gives a bound and choices that fit
(``lagrangian``). Labels close the gap between the two (``labels``). If sums have an excess that is charged
(``excess``), the labels include these sums. Budgets are counted in work, so that the result is the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pase.errors import Infeasible
from pase.search.check import cost_of
from pase.search.elimination.exact import KernelName
from pase.search.elimination.factors import Pool
from pase.search.elimination.priced import HeldAlong, PricedTables, prepare
from pase.search.limits.branches import Branches, SummedTables
from pase.search.limits.excess import Excess
from pase.search.limits.labels import Labels, label_choices
from pase.search.limits.lagrangian import Dual, best_prices
from pase.search.limits.sums import Sums, alike, sums_of
from pase.search.types import FULL_EFFORT, MemoryProfile
from pase.tables.types import CostTables

__all__ = ["Eliminate", "Within", "fits"]

Eliminate = Callable[[CostTables], tuple[np.ndarray, float, int]]
"""Tables -> (cheapest choice int64 [nodes], lower bound on its cost, effort)."""

_MOST_SUMS = 6
_LABEL_WORK = 50  # the work per label, in the unit of ``PricedTables.effort``
_MOST_BRANCHED = 150  # nodes; with more, or if most are equal, layers would be split one by one
_MOST_PARTS = 400  # the most parts that are split in one search
_MOST_TESTED = 256  # choices within the sums, per set of labels, that are tested at every point
_EXACT = 1e-9  # relative gap at which a choice counts as optimal
_MOST_PLANNED = 20_000
"""Nodes. With more, planning one order takes longer than folding their blocks at each price."""
_FIRST_CAP, _WIDER = 1 / 16, 4.0  # fractions of the gap: the first cap, and how much wider each next one is


def fits(memory: MemoryProfile, choice: np.ndarray) -> bool:
    """Whether a choice respects the memory limit at every point."""
    return not (memory.usage(choice) > memory.limit_bytes).any()


@dataclass(kw_only=True, eq=False)
class Within:
    """A search for the cheapest choice that fits, and its result so far.

    eliminate: used if no single order fits for all prices, or if planning one would take long; None if there is none.
    excess: sums whose excess is charged; the tables are then a mean that bounds the cost. None: the tables are the
    cost.
    labels: the most labels made in each search for choices.
    below: choices of this cost or more are not needed. price: per byte, in all sums together; the initial one, and at
    the end the one with the best bound. stop: called between steps.
    choice: int64 [nodes], with cost ``cost``; None if none was found. bound: no choice that fits costs less.
    work: the work so far, of eliminations (``PricedTables.effort``) and labels.
    """

    tables: CostTables
    memory: MemoryProfile
    eliminate: Eliminate | None
    kernel: KernelName
    threads: int
    seed: int
    excess: Excess | None = None
    labels: int = FULL_EFFORT.labels
    below: float = np.inf
    price: float = 0.0
    stop: Callable[[], bool] = lambda: False
    choice: np.ndarray | None = None
    cost: float = np.inf
    bound: float = -np.inf
    work: int = 0

    @property
    def optimal(self) -> bool:
        """Whether the choice is proven optimal."""
        return self.choice is not None and self.cost - self.bound <= _EXACT * abs(self.cost)

    @property
    def decided(self) -> bool:
        """Whether no cheaper choice can exist, or none below ``below``."""
        return self.optimal or self.bound >= self.below * (1 - _EXACT if self.below > 0 else 1 + _EXACT)

    def run(self, free: np.ndarray, most_sums: int = _MOST_SUMS, close: bool = True) -> bool:
        """Search. Returns False if no order fits, or if nothing is limited.

        free: the cheapest choice in the tables without the limit; it does not fit, or has an excess. close: whether to
        close the gap that prices leave.

        Raises Infeasible if it is proven that nothing fits.
        """
        numbers = alike(self.memory)
        if not numbers.size:
            return False
        groups: list[np.ndarray] = []
        prices = np.zeros(0)
        worst: np.ndarray | None = free
        while worst is not None:
            groups.append(self._group(worst, numbers, groups))
            sums = sums_of(self.memory, groups)
            if (sums.room < 0).any():
                raise Infeasible(
                    f"the limit of {self.memory.limit_bytes:,.0f} bytes is too low: the smallest possible usage "
                    f"exceeds it by {-float(sums.room.min()):,.0f} bytes",
                    where="memory limit",
                    fix="raise the limit",
                )
            oracle = _Oracle(search=self, sums=sums)
            if not oracle.possible:
                return False
            dual = self._dual(oracle, free, prices)
            prices = dual.prices
            self.price = float(prices.sum())
            self._prove(dual.bound)
            for choice, _ in dual.choices:
                self.offer(choice)
            if self.decided or self.stop():
                break
            worst = None
            if len(groups) < most_sums:
                worst = self._broken(c for c, _ in dual.choices if (sums.used(c) <= sums.room).all())
            if worst is None and close:
                worst = self._close(oracle, prices)
            if self.decided or len(groups) >= most_sums:
                break
        return True

    def _dual(self, oracle: _Oracle, free: np.ndarray, prices: np.ndarray) -> Dual:
        """The best prices of the oracle's sums, starting from the prices of the sums before the last one."""
        room, least = oracle.sums.room, (free, cost_of(self.tables, free))
        if fits(self.memory, free):
            return Dual(prices=np.zeros(room.size), bound=least[1] - 1e-12 * abs(least[1]), choices=[least])
        return best_prices(
            oracle.at,
            oracle.sums.used,
            room,
            least,
            below=self.below,
            start=np.append(prices, prices.max()) if prices.size else np.array([self.price]),
            ceiling=self._ceiling,
            stop=self.stop,
        )

    def offer(self, choice: np.ndarray) -> bool:
        """Take a choice if it fits and is cheaper. Returns whether it fits."""
        if not fits(self.memory, choice):
            return False
        cost = cost_of(self.tables, choice)
        if self.excess is not None:
            cost = self.excess.cost(cost, choice)
        if cost < self.cost:
            self.choice, self.cost = choice, cost
        return True

    @cached_property
    def _ceiling(self) -> float:
        """An upper bound on the cost of any choice, including excesses."""
        return _most(self.tables) + (0.0 if self.excess is None else self.excess.most)

    def _prove(self, bound: float) -> None:
        """Raise the bound. Raises Infeasible if it exceeds the cost of any choice."""
        if bound > self._ceiling:
            raise Infeasible(
                "no choice of configs fits, as elimination at a price per byte proves",
                where="memory limit",
                fix="raise the limit",
            )
        self.bound = max(self.bound, bound)

    def _group(self, choice: np.ndarray, numbers: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
        """The points similar to the one at which the choice holds most; only that one if they are already a group."""
        worst = int(self.memory.usage(choice).argmax())
        group = numbers == numbers[worst]
        if any((group == g).all() for g in groups):
            return np.asarray(np.arange(numbers.size) == worst)
        return np.asarray(group)

    def _broken(self, choices: Iterable[np.ndarray]) -> np.ndarray | None:
        """The first of the choices that exceeds the limit at some point."""
        return next((c for c in choices if not fits(self.memory, c)), None)

    def _branch(self, sums: Sums, prices: np.ndarray) -> None:
        """Branch and bound until the gap is as small as requested or the budget is spent."""
        x, room = self.excess, sums.room
        held, along, weights = sums.held, tuple[HeldAlong, ...](), np.zeros(room.size)
        if x is not None:
            held, along = x.joined(held), x.along_joined(room.size)
            weights, prices = np.append(weights, x.weights), np.append(prices, x.weights)
            room = np.append(room, np.full(x.weights.size, np.inf))
        dearest = self._ceiling + 4 * _EXACT * abs(self._ceiling) + 1e-300
        branches = Branches(
            problem=SummedTables(tables=self.tables, held=held, along=along, room=room, weights=weights),
            kernel=self.kernel,
            seed=self.seed,
            offer=self.offer,
            top=lambda: min(self.cost, self.below, dearest),
            stop=self.stop,
        )
        bound = branches.run(prices, _MOST_PARTS)
        self.work += branches.work
        if bound is not None:
            self._prove(bound - 1e-12 * abs(bound))

    def _close(self, oracle: _Oracle, prices: np.ndarray) -> np.ndarray | None:
        """Search for choices in ever wider parts of the gap. Returns a choice within the sums that exceeds the limit
        and is cheaper than any that was found to fit, if there is one."""
        kinds = {*zip(map(id, self.tables.node_costs), map(id, oracle.sums.held), strict=True)}
        if len(self.tables.node_costs) <= min(_MOST_BRANCHED, 2 * len(kinds)):
            self._branch(oracle.sums, prices)
            if self.decided or self.stop():
                return None
        look = _Look.of(oracle, prices)
        if look is None:
            return None
        base = look.least - float(prices @ oracle.sums.room)
        share = _FIRST_CAP
        while True:
            gap = min(self.cost, self.below) - base
            known = bool(np.isfinite(gap))
            cap = share * (max(gap, 0.0) if known else abs(base) or self._ceiling - base or 1.0)
            labels, costs = look.within(cap, self.labels)
            self.work += look.priced.effort + _LABEL_WORK * labels.made
            broken = None
            for i in np.argsort(costs, kind="stable")[:_MOST_TESTED].tolist():
                if costs[i] >= self.cost or self.offer(choice := labels.choice(i)):
                    break
                broken = choice if broken is None else broken
            if not labels.whole:
                return broken
            proven = min(base + cap, float(costs.min(initial=np.inf)))
            self._prove(proven - 1e-12 * abs(proven))
            # Without a known cost, the search ends only with a choice, or once ``_prove`` has shown that there is none.
            if self.decided or (known and share >= 1.0) or broken is not None or self.stop():
                return broken
            share *= _WIDER


@dataclass(frozen=True, kw_only=True, eq=False)
class _Look:
    """The start of a label search: the tables, eliminated at prices of the limited sums.

    room: float64 [sums], the limited sums followed by the excess sums.
    """

    priced: PricedTables
    pool: Pool
    least: float
    prices: np.ndarray
    room: np.ndarray
    excess: Excess | None

    @classmethod
    def of(cls, oracle: _Oracle, prices: np.ndarray) -> _Look | None:
        """None if no order fits. prices: float64 [limited sums]."""
        s, x, room = oracle.search, oracle.search.excess, oracle.sums.room
        priced = oracle.priced
        if priced is not None and x is not None:
            priced = prepare(s.tables, x.joined(oracle.sums.held), s.kernel, s.threads, s.seed)
        if priced is None:
            return None
        at = prices
        if x is not None:  # the tables already include the excess sums at their weights
            at, prices = np.append(prices, np.zeros(x.weights.size)), np.append(prices, x.weights)
            room = np.append(room, np.full(x.weights.size, np.inf))
        _, least, pool = priced.at(at)
        return cls(priced=priced, pool=pool, least=least, prices=prices, room=room, excess=x)

    def within(self, cap: float, most: int) -> tuple[Labels, np.ndarray]:
        """The choices up to ``cap`` above the least cost, and their costs, float64 [choices]. most: labels to make."""
        x = self.excess
        along = () if x is None else x.along_joined(self.room.size - x.weights.size)
        labels = label_choices(self.priced, self.pool, self.prices, self.least, self.room, cap, most, along)
        return labels, labels.cost if x is None else x.costs(labels)


@dataclass(kw_only=True, eq=False)
class _Oracle:
    """Finds the cheapest choice at given prices."""

    search: Within
    sums: Sums

    @cached_property
    def priced(self) -> PricedTables | None:
        s = self.search
        if len(s.tables.node_costs) > _MOST_PLANNED:
            return None
        return prepare(s.tables, self.sums.held, s.kernel, s.threads, s.seed)

    @property
    def possible(self) -> bool:
        """Whether there is any way to find cheapest choices at prices."""
        return self.priced is not None or self.search.eliminate is not None

    def at(self, prices: np.ndarray) -> tuple[np.ndarray, float, float]:
        s = self.search
        if self.priced is not None:
            choice, least, _ = self.priced.at(prices)
            s.work += self.priced.effort
        else:
            assert s.eliminate is not None
            choice, least, work = s.eliminate(self.tables_at(prices))
            s.work += work
        return choice, cost_of(s.tables, choice), least

    def tables_at(self, prices: np.ndarray) -> CostTables:
        """The tables with the price of bytes added to node costs. Equal arrays stay one array."""
        made: dict[tuple[int, bytes], np.ndarray] = {}
        costs = []
        for c, held in zip(self.search.tables.node_costs, self.sums.held, strict=True):
            key = (id(c), held.tobytes())
            if key not in made:
                made[key] = c + held @ prices
            costs.append(made[key])
        return replace(self.search.tables, node_costs=tuple(costs))


def _most(tables: CostTables) -> float:
    """An upper bound on the cost of any choice without a forbidden config or pair."""
    arrays = [*tables.node_costs, *(e.cost for e in tables.edges)]
    distinct = {id(a): a for a in arrays}
    most = {i: max(float(np.max(a, where=np.isfinite(a), initial=0.0)), 0.0) for i, a in distinct.items()}
    return sum(most[id(a)] for a in arrays)
