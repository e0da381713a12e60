"""Finds the cheapest strategy if collectives of parameters overlap with compute (``pase.tables.overlap``).

A step is a sum plus two maxima of compute and collectives, one for each pass. Tables are additive, but a maximum is
not. However, a maximum is at least every mean of its two sides, so

    min over strategies of the step  >=  min over strategies of its mean at (f, b),  for any weights f, b in [0, 1].

With several micro-batches, the first one's forward is a pass of its own (``pase.tables.overlap``), so there are three
passes.

The tables at such weights mix the prices of the parts. Their exact optima are bounds, and their solutions, priced
exactly, are candidates. The next weights are those at which the planes of the solutions known so far promise the
highest bound. This is the Lagrangian dual of the two maxima, solved by cutting planes. If it leaves a gap, labels
(``pase.search.limits.labels``) list the choices whose mean lies in the gap, except those that others dominate. The
cheapest of them is proven optimal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pase.search import Known, Solution, solve
from pase.search.elimination.priced import HeldAlong, PricedTables, effort_of, prepare
from pase.search.limits.excess import Excess
from pase.search.limits.labels import label_choices
from pase.search.solve import WORTH_FOLDING
from pase.tables import CostTables
from pase.tables.overlap import Passes, StepTables

__all__ = ["OverlapSearch", "SolveMean", "SolveWithin"]

PassWeights = tuple[float, ...]
"""For each pass, the weight of compute."""

SolveMean = Callable[[PassWeights], Solution]
"""Solves the tables of the mean for given weights of the passes' compute."""

SolveWithin = Callable[[CostTables, Known], Solution]
"""Solves tables under a memory limit: (tables, what is known about them)."""

_MOST_WEIGHTS = 8
_EXACT = 1e-9
_LABELS = 100_000
_THREADS = 2
_LONGER = 2  # how much longer elimination may take if that saves loading the tables


@dataclass(kw_only=True, eq=False)
class OverlapSearch:
    """The search of one mesh.

    passes: which parts of a step overlap.
    means: weights -> the optimum of their tables, without a limit.
    best: the weights with the highest bound.
    """

    tables: StepTables
    passes: Passes
    means: dict[PassWeights, Solution] = field(default_factory=dict)
    best: PassWeights = ()
    _made: dict[PassWeights, CostTables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best = self.best or self.passes.longest

    def cost(self, choice: np.ndarray) -> float:
        """Return the cost of a choice: one config index per node."""
        return self.tables.of_choice(choice).total(self.passes.slow, self.passes.first)

    def at(self, weights: PassWeights) -> CostTables:
        """Return the tables of the mean for given weights of the passes' compute; they are built once."""
        if weights not in self._made:
            self._made[weights] = self.tables.at(self.passes.between(weights))
        return self._made[weights]

    def mean(self, weights: PassWeights) -> Solution:
        """Return the optimum of the tables for given weights; it is computed once."""
        if weights not in self.means:
            known = self._priced if self.means else None
            self.means[weights] = solve(self.at(weights)) if known is None else self._optimum(known, weights)
        return self.means[weights]

    @cached_property
    def _priced(self) -> PricedTables | None:
        """The tables of the first weights, loaded and with an elimination order, to be solved at any other weights.

        None if there is no order, if blocks are folded first, or if equal rows that the weights distinguish make
        elimination take much longer.
        """
        (weights, first), excess = next(iter(self.means.items())), self.excess()
        if not first.order or len(self.tables.nodes) >= WORTH_FOLDING:
            return None
        made = prepare(self.at(weights), excess.held, "numba", _THREADS, 0, excess.along, first.order)
        longer = made is None or made.effort > _LONGER * effort_of(first.work)
        return None if longer else made

    def _optimum(self, priced: PricedTables, weights: PassWeights) -> Solution:
        """Return ``solve``'s answer for the tables of given weights."""
        first = next(iter(self.means))
        choice, least, _ = priced.at(np.subtract(weights, first))
        cost = float(self.passes.between(weights) @ self.tables.of_choice(choice).row)
        return replace(
            self.means[first], choice=choice, cost=cost, bound=min(least, cost), work=priced.plan.work
        )

    def solve(
        self,
        one: SolveMean,
        below: float = np.inf,
        enough: float = _EXACT,
        likely: Sequence[PassWeights] = (),
    ) -> Solution:
        """Return the best strategy found, with the proven bound.

        one: solves tables. Under a memory limit, which forbids the same strategies at all weights, its bounds may not
            be attained. If it finds no allowed strategy, its answer is returned unchanged.
        below: strategies of that cost or more need not be found.
        enough: the relative gap at which to stop.
        likely: weights to try before others, such as the best ones of a similar mesh.
        """
        found: Solution | None = None
        planes: list[tuple[float, np.ndarray]] = []
        bound, w, tried = -np.inf, self.best, set[PassWeights]()
        while w not in tried and len(tried) < _MOST_WEIGHTS:
            tried.add(w)
            s = one(w)
            if s.bound > bound:
                bound, self.best = s.bound, w
            if not s.feasible:
                if found is None:
                    return s
                break
            parts = self.tables.of_choice(s.choice)
            cost = parts.total(self.passes.slow, self.passes.first)
            if found is None or cost < found.cost:
                found = replace(s, cost=cost)
            planes.append(
                (float(self.passes.least_parts @ parts.row), self.passes.compute_margin @ parts.row)
            )
            height, w = _highest(planes)
            if min(found.cost, below, height) <= bound * (1 + enough):
                break
            w = next((x for x in likely if x not in tried), w)
        self.__dict__.pop("_priced", None)  # it holds a copy of the tables
        assert found is not None
        return replace(
            found,
            bound=min(bound, found.cost),
            optimal=found.cost <= bound * (1 + _EXACT),
            method=f"{found.method}, {len(tried)} weight{'s' * (len(tried) > 1)} of compute and collectives",
            certificate=f"{found.certificate}, at weights of compute and collectives",
        )

    def close(self, found: Solution, below: float) -> Solution:
        """Return the answer without a memory limit. The gap to its bound is closed if labels suffice.

        below: strategies of that cost or more need not be found.
        """
        excess, sums = self.excess(), len(self.best)
        priced = prepare(self.at(self.best), excess.held, "numba", _THREADS, 0)
        if priced is None:
            return found
        _, least, pool = priced.at(np.zeros(sums))
        below = min(found.cost, below)
        room = np.full(sums, np.inf)
        labels = label_choices(
            priced, pool, excess.weights, least, room, below - least, _LABELS, excess.along
        )
        costs = excess.costs(labels)
        if costs.size:
            choice = labels.choice(int(costs.argmin()))
            if (cost := self.cost(choice)) < found.cost:
                found = replace(found, choice=choice, cost=cost)
        if not labels.whole:
            return found
        return self._proven(found, min(found.cost, below))

    def close_within(self, found: Solution, one: SolveWithin, below: float) -> Solution:
        """Return the answer under a memory limit. The gap to its bound is closed as far as labels suffice."""
        top = min(found.cost, below)
        if not found.feasible or found.bound >= top * (1 - _EXACT):
            return found
        s = one(self.at(self.best), Known(free=self.means.get(self.best), excess=self.excess()))
        bound = max(found.bound, min(s.bound, top))
        if s.feasible and (cost := self.cost(s.choice)) < found.cost:
            found = replace(found, choice=s.choice, cost=cost, byte_price=s.byte_price)
        return self._proven(found, min(bound, found.cost))

    def _proven(self, found: Solution, bound: float) -> Solution:
        return replace(
            found,
            bound=bound,
            optimal=found.cost <= bound * (1 + _EXACT),
            certificate=f"{found.certificate}, and labels",
        )

    def excess(self) -> Excess:
        """Return by how much compute exceeds collectives in each pass, for the tables at the best weights."""
        t = self.tables
        made: dict[int, np.ndarray] = {}

        def ahead(parts: np.ndarray) -> np.ndarray:
            if id(parts) not in made:
                made[id(parts)] = np.ascontiguousarray(
                    np.tensordot(parts, self.passes.compute_margin, (0, 1))
                )
            return made[id(parts)]

        along = (
            HeldAlong(src=e.src, dst=e.dst, src_class=e.src_class, dst_class=e.dst_class, held=ahead(p))
            for e, p in zip(t.edges, t.parts, strict=True)
            if p is not None
        )
        return Excess(weights=np.array(self.best), held=tuple(map(ahead, t.nodes)), along=tuple(along))


def _highest(planes: Sequence[tuple[float, np.ndarray]]) -> tuple[float, PassWeights]:
    """Return (height, weights) of the highest point below all planes over [0, 1]^n.

    The highest point is one at which n + 1 of the planes and sides meet.

    planes: the height at 0 and the n slopes of each plane.
    """
    n = len(planes[0][1])
    lower, upper = np.zeros((n, n + 2)), np.zeros((n, n + 2))
    lower[:, 1:-1], upper[:, 1:-1], upper[:, -1] = -np.eye(n), np.eye(n), 1.0
    below = [
        np.array([1.0, *-slopes, height]) for height, slopes in planes
    ]  # height - slopes·weights <= height at 0
    a = np.vstack([*below, lower, upper])
    scale = max(float(np.abs(a[: len(planes)]).max()), 1e-300)
    a[: len(planes), 1:] /= scale
    meet = a[np.array(list(itertools.combinations(range(len(a)), n + 1)))]
    meet = meet[np.abs(np.linalg.det(meet[:, :, :-1])) >= 1e-12]
    points = np.linalg.solve(meet[:, :, :-1], meet[:, :, -1:])[:, :, 0]
    points = points[(points @ a[:, :-1].T <= a[:, -1] + 1e-12).all(axis=1)]
    best = points[points[:, 0].argmax()]
    return float(best[0]) * scale, tuple(map(float, np.clip(best[1:], 0.0, 1.0)))
