"""Lower bounds on a pipeline's step from paths through its schedule, and an upper bound for 1F1B.

A chain of actions that wait for one another is a lower bound on the step for any times. The chains follow from the
schedule's lists of actions. This module has those that decide for equal or nearly equal stages. A simulation finds the
longest path for given times (``pase.pipeline.simulate``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from pase.pipeline.simulate import Path
from pase.pipeline.types import Action, Kind, Schedule, StageTimes

__all__ = ["lower_bound", "paths", "round_trip_paths", "slowest_stage_bound", "wait_paths", "work_paths"]


class _Chain:
    """A path under construction."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.back = Kind.INPUT if schedule.splits_backward else Kind.BACKWARD
        self.runs = np.zeros((len(Kind), schedule.stages))
        self.crossed = np.zeros((2, schedule.stages - 1))
        rank = np.array(schedule.rank_of)
        self.crosses = (rank[1:] != rank[:-1]).astype(float)

    def there(self, start: int, stop: int, times: float = 1) -> _Chain:
        """Add a micro-batch's forward through stages start … stop - 1, and the transfer to stage stop."""
        self.runs[Kind.FORWARD, start:stop] += times
        self.crossed[0, start:stop] += times * self.crosses[start:stop]
        return self

    def backward(self, start: int, stop: int, times: float = 1) -> _Chain:
        """Add a micro-batch's backward: the transfer from stage stop, then stages stop - 1 … start."""
        self.runs[self.back, start:stop] += times
        self.crossed[1, start:stop] += times * self.crosses[start:stop]
        return self

    def work(self, actions: Iterable[Action]) -> _Chain:
        """Add actions of one rank, one after another."""
        for a in actions:
            self.runs[a.kind, a.stage] += 1
        return self

    def path(self, first: int, last: int) -> Path:
        rank = self.schedule.rank_of
        return Path(runs=self.runs, crossed=self.crossed, first=rank[first], last=rank[last])


def work_paths(s: Schedule) -> Iterator[Path]:
    """For each rank: a micro-batch's forward to its first stage, all its work, the backward to the first stage."""
    for order in s.orders:

        def way(chain: _Chain, first: int = order[0].stage) -> _Chain:
            return chain.there(0, first)

        yield from _from(s, order, way)


def wait_paths(s: Schedule) -> Iterator[Path]:
    """For each rank: a micro-batch's forward to the last stage, its backward to the rank, then the rank's other work.

    The rank's first backward waits for this micro-batch. Until then, the rank can only have done the forwards that its
    list has before the backward. With one stage per rank, the bound is Σ t + max_j [(m - 1) t_j - (w_j - 1) f_j], where
    w_j forwards come before stage j's first backward.
    """
    for order in s.orders:
        ahead = next(i for i, a in enumerate(order) if a.kind != Kind.FORWARD)
        j = order[ahead].stage

        def way(chain: _Chain, j: int = j) -> _Chain:
            chain.there(0, s.stages).backward(j + 1, s.stages)
            chain.crossed[1, j : j + 1] += chain.crosses[j : j + 1]  # to stage j itself
            return chain

        yield from _from(s, order[ahead:], way)


def _from(s: Schedule, order: Sequence[Action], way: Callable[[_Chain], _Chain]) -> Iterator[Path]:
    """Paths that start with ``way`` and go through a rank's list.

    One goes to the end of the list. Another goes up to the last backward that other ranks wait for, and then to the
    first stage.
    """
    until = max(i for i, a in enumerate(order) if a.kind in (Kind.BACKWARD, Kind.INPUT)) + 1
    rank, at = s.rank_of[order[0].stage], order[until - 1].stage
    yield way(_Chain(s)).work(order).path(0, at)
    yield way(_Chain(s)).work(order[:until]).backward(0, at).path(0, 0)
    if order is s.orders[rank]:
        yield _Chain(s).work(order).path(order[0].stage, at)


def round_trip_paths(s: Schedule) -> Iterator[Path]:
    """Paths of round trips from each stage to the last one and back, for schedules with one stage per rank.

    Only a limited number of micro-batches is beyond stage j at the same time, and each takes at least a round trip.
    These paths include the transfers in 1F1B's steady state.
    """
    for j in range(s.ranks):
        steps = [{Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(a.kind, -1) for a in s.orders[j]]
        turns = math.ceil(s.micro_batches / int(np.cumsum(steps).max()))
        chain = _Chain(s).there(0, j).there(j, s.stages, turns).backward(j, s.stages, turns)
        yield chain.backward(0, j).path(0, 0)


@lru_cache(maxsize=256)
def paths(schedule: Schedule) -> tuple[Path, ...]:
    """All paths of this module for the schedule."""
    one = schedule.stages == schedule.ranks
    more = round_trip_paths(schedule) if one else ()
    return (*work_paths(schedule), *wait_paths(schedule), *more)


def lower_bound(schedule: Schedule, times: StageTimes) -> float:
    """A lower bound in seconds on the step of the schedule."""
    return max(p.seconds(times) for p in paths(schedule))


def slowest_stage_bound(micro_batches: int, times: StageTimes) -> float:
    """Σ t + (m - 1) max t: an upper bound on the step of 1F1B and GPipe without transfers.

    It is Alpa's objective (Zheng et al., OSDI 2022, equation 2).
    """
    return float(times.full.sum() + (micro_batches - 1) * times.full.max())
