"""The cheapest choice within a memory limit, where an elimination order fits.

The limit is a few sums (``sums``); the best price per byte of each gives a bound and choices that fit (``lagrangian``);
labels close the gap between the two (``labels``). If an excess of sums costs as much (``excess``), the labels see these
sums too. What is asked of it is counted in work, so that the answer is the
same on every machine.
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
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables

__all__ = ["Eliminate", "Within", "fits"]

Eliminate = Callable[[CostTables], tuple[np.ndarray, float, int]]
"""Tables -> (cheapest choice int64 [nodes], lower bound on its cost, what it took)."""

_MOST_SUMS = 6
_LABELS = 1_000_000  # to make at most in each look for choices
_LABEL_WORK = 100  # of a label, where ``PricedTables.effort`` is that of an elimination
_MOST_BRANCHED = 150  # nodes; of more, or where most are equal, layers would be parted one by one
_MOST_PARTS = 400  # that are divided in one search
_MOST_TESTED = 256  # choices within the sums, of one set of labels, that are tested at every point
_EXACT = 1e-9  # relative: an answer this close to its bound is the best
_MOST_PLANNED = (
    20_000  # nodes; of more, planning one order takes longer than folding their blocks at each price
)
_FIRST_CAP, _WIDER = 1 / 16, 4.0  # of the gap; each set of labels is looked for in a wider part of it


def fits(memory: MemoryProfile, choice: np.ndarray) -> bool:
    return not (memory.usage(choice) > memory.limit_bytes).any()


@dataclass(kw_only=True, eq=False)
class Within:
    """A search for the cheapest choice that fits, and what it has found.

    eliminate: serves where no single order fits for all prices, or would take long to plan; None: nothing else does.
    excess: sums whose excess is paid; the tables are a mean that bounds the cost. None: the tables are the cost.
    below: what costs that much need not be found. price: of a byte, in all sums together; to begin with, and in the end
    where the bound is best. stop: asked between steps.
    choice, int64 [nodes], costs ``cost``; None: none was found. No choice that fits costs less than ``bound``.
    work: so far, of eliminations (``PricedTables.effort``) and labels.
    """

    tables: CostTables
    memory: MemoryProfile
    eliminate: Eliminate | None
    kernel: KernelName
    threads: int
    seed: int
    excess: Excess | None = None
    below: float = np.inf
    price: float = 0.0
    stop: Callable[[], bool] = lambda: False
    choice: np.ndarray | None = None
    cost: float = np.inf
    bound: float = -np.inf
    work: int = 0

    @property
    def optimal(self) -> bool:
        return self.choice is not None and self.cost - self.bound <= _EXACT * abs(self.cost)

    @property
    def decided(self) -> bool:
        """No cheaper choice can exist, or none below what was asked for."""
        return self.optimal or self.bound >= self.below * (1 - _EXACT if self.below > 0 else 1 + _EXACT)

    def run(self, free: np.ndarray, most_sums: int = _MOST_SUMS, close: bool = True) -> bool:
        """Search; free: the cheapest choice in the tables without the limit, which does not fit or has an excess.
        close: the gap that prices leave.

        False where no order fits, or nothing is limited.

        Raises Infeasible where it is proven that nothing fits.
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
                    f"the memory limit of {self.memory.limit_bytes:,.0f} bytes cannot be met: what "
                    f"must be held at least takes {-float(sums.room.min()):,.0f} bytes more"
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
        """The best prices of the oracle's sums, beginning with those of the sums before the last one."""
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
        """Take a choice if it is cheaper and fits; whether it fits."""
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
        return _most(self.tables) + (0.0 if self.excess is None else self.excess.most)

    def _prove(self, bound: float) -> None:
        if bound > self._ceiling:
            raise Infeasible(
                "no choice of configs fits the memory limit: elimination at a price per byte proves it"
            )
        self.bound = max(self.bound, bound)

    def _group(self, choice: np.ndarray, numbers: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
        """The points like the one at which the choice holds most; that one alone where they are a group already."""
        worst = int(self.memory.usage(choice).argmax())
        group = numbers == numbers[worst]
        if any((group == g).all() for g in groups):
            return np.asarray(np.arange(numbers.size) == worst)
        return np.asarray(group)

    def _broken(self, choices: Iterable[np.ndarray]) -> np.ndarray | None:
        """The first of the choices that breaks the limit at some point."""
        return next((c for c in choices if not fits(self.memory, c)), None)

    def _branch(self, sums: Sums, prices: np.ndarray) -> None:
        """Part configs until what is left of the gap is no more than is asked for, or the budget is spent."""
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
        """Look for choices in ever wider parts of the gap. A choice within the sums that breaks the limit, cheaper than
        any that was found to fit, where there is one."""
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
            labels, costs = look.within(cap)
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
            # With nothing to stay below, only a choice ends it, or that there is none up to the dearest (``_prove``).
            if self.decided or (known and share >= 1.0) or broken is not None or self.stop():
                return broken
            share *= _WIDER


@dataclass(frozen=True, kw_only=True, eq=False)
class _Look:
    """What labels start from: the tables eliminated at prices of the limited sums. room: float64 [sums], those of an
    excess after the limited ones."""

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
        if x is not None:  # the tables hold its sums at its weights already
            at, prices = np.append(prices, np.zeros(x.weights.size)), np.append(prices, x.weights)
            room = np.append(room, np.full(x.weights.size, np.inf))
        _, least, pool = priced.at(at)
        return cls(priced=priced, pool=pool, least=least, prices=prices, room=room, excess=x)

    def within(self, cap: float) -> tuple[Labels, np.ndarray]:
        """The choices up to ``cap`` above the least, and their costs, float64 [choices]."""
        x = self.excess
        along = () if x is None else x.along_joined(self.room.size - x.weights.size)
        labels = label_choices(
            self.priced, self.pool, self.prices, self.least, self.room, cap, _LABELS, along
        )
        return labels, labels.cost if x is None else x.costs(labels)


@dataclass(kw_only=True, eq=False)
class _Oracle:
    """Cheapest choices at prices."""

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
        """Tables with the price of bytes in the nodes' costs; what is equal stays one array."""
        made: dict[tuple[int, bytes], np.ndarray] = {}
        costs = []
        for c, held in zip(self.search.tables.node_costs, self.sums.held, strict=True):
            key = (id(c), held.tobytes())
            if key not in made:
                made[key] = c + held @ prices
            costs.append(made[key])
        return replace(self.search.tables, node_costs=tuple(costs))


def _most(tables: CostTables) -> float:
    """No choice without a forbidden config or pair costs more."""
    arrays = [*tables.node_costs, *(e.cost for e in tables.edges)]
    distinct = {id(a): a for a in arrays}
    most = {i: max(float(np.max(a, where=np.isfinite(a), initial=0.0)), 0.0) for i, a in distinct.items()}
    return sum(most[id(a)] for a in arrays)
