"""Finds the best pipeline of a model without equal blocks: each stage has a range of the units between cut points.

Every range has exact tables of its own: the model's tables, with the nodes of other units at weight 0. The search over
ranges replaces the search over numbers of blocks (``search``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from pase.compiler.stages.chain_places import UnitPlaces, UnitRange
from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.features import direction, running, slower_may_weigh_less
from pase.compiler.stages.menu import COMPUTED, RUN, StageRole, StageSplit
from pase.compiler.stages.search import GAP, NODES, PRICES, SIMULATIONS, Staged, StageMenu
from pase.errors import Infeasible
from pase.pipeline.bounds import paths
from pase.pipeline.cuts import Cuts
from pase.pipeline.overlap import exposed_s
from pase.pipeline.ranges import (
    RangeProblem,
    Ranges,
    RangeWay,
    best_ranges,
    least_divided,
    least_partition,
    partitions_below,
    runs_of,
    shortest,
)
from pase.pipeline.registry import Discipline, schedule
from pase.pipeline.simulate import Path, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes

__all__ = ["ChainMenu"]

_MOST_CHUNKS = 2
"""The most stages on each rank."""


class ChainMenu(StageMenu):
    """A ``StageMenu`` for the tables of a chain of unequal units."""

    places: UnitPlaces

    @cached_property
    def _ways(self) -> dict[StageRole, list[StageSplit]]:
        return {}

    @cached_property
    def _least(self) -> dict[tuple[StageRole, bytes], float]:
        return {}

    def schedules(self) -> Iterator[tuple[Discipline, int]]:
        yield from ((d, v) for d, v in super().schedules() if v <= _MOST_CHUNKS and not d.lockstep)

    def crossing(self, a: StageSplit) -> tuple[tuple[str, str], ...]:
        assert a.role.units is not None
        return self.places.chain.crossing[a.role.units[1] - 1]

    def tied_after(self, s: Schedule, splits: Sequence[StageSplit]) -> np.ndarray:
        """Seconds per step in which each rank sums gradients of shared parameters, one pair of ranks after another."""
        out, holders = np.zeros(s.ranks), dict[str, list[int]]()
        for k, split in enumerate(splits):
            for name in self._shared(split):
                holders.setdefault(name, []).append(k)
        for name, stages in holders.items():
            ranks = list(dict.fromkeys(s.rank_of[k] for k in stages))
            nbytes = self.gradient_bytes(splits[stages[0]], name)
            for one, other in pairwise(ranks):
                out[[one, other]] += self.sum_s(self.groups[one], self.groups[other], nbytes)
        return out

    def _shared(self, split: StageSplit) -> tuple[str, ...]:
        assert split.role.units is not None
        return self.places.shared(split.role.units)

    def least_s(self) -> float:
        """The work of all units, each by itself, divided so that no rank waits."""
        many = Counter(self.groups)
        if len(many) == 1:
            t = self._at(self.groups[0])[0]
            return t.least_apart(t.step) / self.ranks
        each = [t.least_of_units(t.step) for t in (self._at(group)[0] for group in many)]
        return least_divided(np.array(each), np.array(list(many.values())))

    def ranges(self) -> list[UnitRange]:
        n = self.places.blocks
        return [(a, b) for a in range(n) for b in range(a + 1, n + 1)]

    def _role(self, units: UnitRange, rank: int) -> StageRole:
        return StageRole(units=units, group=self.groups[rank])

    def splits(self, role: StageRole) -> list[StageSplit]:
        """Return the ways to split a range, the fastest first, ignoring memory."""
        if role not in self._ways:
            t = self._at(role.group)[0]
            self._ways[role] = _distinct(t.cheapest(role, 0.0, step=step) for step in t.steps)
        return self._ways[role]

    def _sparing(self, role: StageRole) -> list[StageSplit]:
        """Return these ways and ways that need less memory, from all tables at some prices of bytes."""
        rank, out = self.groups.index(role.group), self.splits(role)
        for t in self._at(role.group):
            free = t.cheapest(role, 0.0)
            each = free.step_s(0.0, self.micro_batches) / self.limits[rank]
            out = [*out, free, *(t.cheapest(role, 0.0, p * each, self.ranks) for p in PRICES if each)]
        return _distinct(out)

    def first(self, d: Discipline, chunks: int) -> float:
        return 0.0

    def compared(self, d: Discipline, chunks: int) -> Staged | None:
        return self._found.get((d.name, chunks)) or self.staged(d, chunks)[0]

    def _searched(self, d: Discipline, chunks: int, below: float) -> tuple[Staged | None, bool]:
        s = schedule(d.name, self.ranks, self.micro_batches, chunks)
        if self.places.blocks < s.stages:
            return None, False
        first = tuple(
            self.splits(self._role(units, s.rank_of[k]))[0]
            for k, units in enumerate(least_partition(self._least_work, s.stages))
        )
        best = None
        if self._fits(s, first):
            done = simulate(s, self._exact(s, first))
            best = self._of(s, first, Ranges(choice=(), simulated=done, bound=done.step_s, simulations=1))
        top = min(below, np.inf if best is None else best.step_s)
        open_ = partitions_below(self._least_work, s.stages, top)
        if all(open_):
            ways = self._offered(s, chunks, open_)
            try:
                found = best_ranges(self._problem(s, chunks, ways), top, SIMULATIONS, GAP, NODES)
            except Infeasible:
                return (best if best is not None and best.step_s < below else None), best is not None
            self.spent.cells += found.cells
            if found.choice is not None:
                best = self._of(s, tuple(ways[k][i] for k, i in enumerate(found.choice)), found)
            elif best is not None:
                best = replace(best, cuts=replace(best.cuts, bound=min(found.bound, best.step_s)))
        return (best if best is not None and best.step_s < below else None), True

    def _offered(
        self, s: Schedule, chunks: int, open_: Sequence[Sequence[UnitRange]]
    ) -> list[list[StageSplit]]:
        """Return, for each stage, the ways to run these ranges.

        Ways that need less memory are included if the fast ones may reach the limit of the stage's rank.
        """
        roles = [[self._role(units, s.rank_of[k]) for units in of] for k, of in enumerate(open_)]
        fast = [[w for role in of for w in self.splits(role)] for of in roles]
        rows, room = self._problem(s, chunks, fast).memory_rows
        begins = np.cumsum([0, *map(len, fast[:-1])])
        most = np.maximum.reduceat(rows, begins, axis=1)
        tight = (most[most.sum(axis=1) > room] > 0).any(axis=0)
        return [
            [w for role in of for w in self._sparing(role)] if tight[k] else fast[k]
            for k, of in enumerate(roles)
        ]

    def _problem(self, s: Schedule, chunks: int, ways: Sequence[Sequence[StageSplit]]) -> RangeProblem:
        return RangeProblem(
            schedule=s,
            units=self.places.blocks,
            ways=[[self._way(w, chunks, s) for w in of] for of in ways],
            exact=lambda choice: self._exact(s, tuple(ways[k][i] for k, i in enumerate(choice))),
            limits=self.limits,
        )

    def _ranks_by_group(self) -> list[int]:
        return [self.groups.index(i) for i in dict.fromkeys(self.groups)]

    def _fits(self, s: Schedule, splits: tuple[StageSplit, ...]) -> bool:
        rows, room = self.problem(s, splits).memory_rows
        counts = np.array([_many(w) for w in splits])
        return not len(rows) or bool((rows @ counts <= room * (1 + 1e-9)).all())

    def _exact(self, s: Schedule, splits: tuple[StageSplit, ...]) -> StageTimes:
        return self.problem(s, splits).times(np.array([_many(w) for w in splits]))

    def _of(self, s: Schedule, splits: tuple[StageSplit, ...], found: Ranges) -> Staged:
        cuts = Cuts(
            counts=tuple(_many(w) for w in splits),
            simulated=found.simulated,
            bound=found.bound,
            simulations=found.simulations,
            cells=found.cells,
        )
        return self.made(self.problem(s, splits), cuts, splits)

    def _way(self, w: StageSplit, chunks: int, s: Schedule) -> RangeWay:
        assert w.role.units is not None
        last = w.role.units[1] == self.places.blocks
        before, after = _exposed(w, alone=chunks == 1)
        return RangeWay(
            first=w.role.units[0],
            end=w.role.units[1],
            runs=runs_of(**{name: w.fixed(*what) for name, what in RUN.items()}),
            before=before,
            after=after,
            send=(0.0, 0.0) if last or s.ranks == 1 else self._least_sent_s(w),
            held=w.fixed(CostKind.STATIC),
            kept=w.fixed(CostKind.KEPT),
            waiting=w.waiting[0],
            buffers=w.buffers,
        )

    def _least_sent_s(self, w: StageSplit) -> tuple[float, float]:
        """Return the least seconds to send, without resharding; the next stage may have gradients in any layout."""
        of = self.sent_bytes(w)[0], self.least_bytes(self.crossing(w))[1]
        there, back = (min(self.sent_s(w.role.group, other, x) for other in set(self.groups)) for x in of)
        return there, back

    def bounded(self, below: float) -> tuple[float, Staged | None]:
        """Return a lower bound on every pipeline of these ranks.

        For each schedule it is the least, over all divisions, of the longest known path. A stage adds to a path the
        least that any of its splits adds.
        """
        least = below
        for d, chunks in self.schedules():
            s = schedule(d.name, self.ranks, self.micro_batches, chunks)
            if self.places.blocks < s.stages:
                continue
            open_ = partitions_below(self._least_work, s.stages, below)
            if not all(open_):
                continue
            known, rows = paths(s), list[np.ndarray]()
            ways = [[RangeWay(first=a, end=b, runs=np.zeros(len(Kind))) for a, b in of] for of in open_]
            for path in known:
                rows.append(
                    np.array(
                        [
                            self._along(s, path, k, self._role((w.first, w.end), s.rank_of[k]))
                            for k, of in enumerate(ways)
                            for w in of
                        ]
                    )
                )
            least = min(least, shortest(s, self.places.blocks, ways, rows)[1])
        return least, None

    @cached_property
    def _least_work(self) -> np.ndarray:
        """The least that each range adds to the work of its rank, over all splits, float64 [units + 1, units + 1]."""
        n = self.places.blocks
        out = np.full((n + 1, n + 1), np.inf)
        for units in self.ranges():
            out[units] = min(
                self._of_direction(self._role(units, r), self._at(self.groups[r])[0].step)
                for r in self._ranks_by_group()
            )
        return out

    def _slow(self, rank: int) -> float:
        return self._at(self.groups[rank])[0].slow

    def _along(self, s: Schedule, path: Path, k: int, role: StageRole) -> float:
        """Return the least that a stage adds to a path. Work once per step counts only at the path's ends."""
        whole, slow = path.runs[Kind.BACKWARD, k], self._slow(s.rank_of[k])
        forward = path.runs[Kind.FORWARD, k]
        grad, weight = path.runs[Kind.INPUT, k] + whole, path.runs[Kind.WEIGHT, k] + whole
        once = float(max(forward, grad, weight) > 1)
        sends = once * slow * np.array([s.rank_of[k] == path.first, s.rank_of[k] == path.last])
        weights = running(forward=forward, input=grad, weight=weight) + direction(
            before=sends[0], sums=sends[1], after=once * (s.rank_of[k] == path.last)
        )
        return self._of_direction(role, weights) if weights.any() else 0.0

    def _of_direction(self, role: StageRole, weights: np.ndarray) -> float:
        """Return the least weighted sum of features over all splits of a range."""
        size = float(np.abs(weights).max())
        key = role, np.round(weights / size, 12).tobytes()
        if key not in self._least:
            some = [t for t in self._at(role.group) if t.weights == "hoisted"]
            if not slower_may_weigh_less(weights):
                some = some[:1]
            elif np.isfinite(self.limits).any():
                some = [*some, *(t.sent_each() for t in some)]
            self._least[key] = min(t.least(role, 0.0, weights / size) for t in some)
        return size * self._least[key]


def _distinct(ways: Iterable[StageSplit]) -> list[StageSplit]:
    """Return each of the ways once."""
    return list(dict.fromkeys(ways))


def _many(w: StageSplit) -> int:
    assert w.role.units is not None
    return w.role.units[1] - w.role.units[0]


def _exposed(w: StageSplit, *, alone: bool) -> tuple[float, float]:
    """Return seconds per step before and after a stage's actions. If its rank has other stages: at least."""
    update = w.fixed(CostKind.AFTER)
    if not alone:
        return w.slow * w.fixed(CostKind.BEFORE), w.slow * w.fixed(CostKind.SUMS) + update
    gathers, sums = w.by_unit(CostKind.BEFORE), w.by_unit(CostKind.SUMS)
    forward, backward = (w.by_unit(*COMPUTED[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD))
    before = exposed_s(gathers, forward, 0.0, w.slow)
    return before, exposed_s(sums, backward, 0.0, w.slow) + update
