"""What no run of a pipeline's lists can beat, by a path argument, and what 1F1B never exceeds.

A chain of actions that wait for one another is a lower bound on the step, whatever the times. Which chains a schedule
has follows from its lists: here are those that decide for equal stages, or nearly equal ones. A simulation's longest
path is one more (``pase.pipeline.simulate``).
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
        """A micro-batch forward through stages start … stop - 1, and on to stop."""
        self.runs[Kind.FORWARD, start:stop] += times
        self.crossed[0, start:stop] += times * self.crosses[start:stop]
        return self

    def backward(self, start: int, stop: int, times: float = 1) -> _Chain:
        """Its gradient from stage stop to stop - 1 and through those to start."""
        self.runs[self.back, start:stop] += times
        self.crossed[1, start:stop] += times * self.crosses[start:stop]
        return self

    def work(self, actions: Iterable[Action]) -> _Chain:
        """What one rank does one after another."""
        for a in actions:
            self.runs[a.kind, a.stage] += 1
        return self

    def path(self, first: int, last: int) -> Path:
        rank = self.schedule.rank_of
        return Path(runs=self.runs, crossed=self.crossed, first=rank[first], last=rank[last])


def work_paths(s: Schedule) -> Iterator[Path]:
    """Each rank's whole work, after the way to its first stage and before the way home from its last backward."""
    for order in s.orders:

        def way(chain: _Chain, first: int = order[0].stage) -> _Chain:
            return chain.there(0, first)

        yield from _from(s, order, way)


def wait_paths(s: Schedule) -> Iterator[Path]:
    """A rank's first backward waits for a micro-batch's way to the last stage and back; of the rank's work only the
    forwards that its list has before it are done by then.

    With one stage a rank: Σ t + max_j [(m - 1) t_j - (w_j - 1) f_j], where w_j forwards come before stage j's first
    backward.
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
    """On the way, then through a rank's list: to its end; or up to its last backward that others wait for, and home."""
    until = max(i for i, a in enumerate(order) if a.kind in (Kind.BACKWARD, Kind.INPUT)) + 1
    rank, at = s.rank_of[order[0].stage], order[until - 1].stage
    yield way(_Chain(s)).work(order).path(0, at)
    yield way(_Chain(s)).work(order[:until]).backward(0, at).path(0, 0)
    if order is s.orders[rank]:
        yield _Chain(s).work(order).path(order[0].stage, at)


def round_trip_paths(s: Schedule) -> Iterator[Path]:
    """Of one stage a rank: no more than so many micro-batches are past stage j at once, and each stays as long as the
    way to the last stage and back takes. These see transfers in 1F1B's steady state."""
    for j in range(s.ranks):
        steps = [{Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(a.kind, -1) for a in s.orders[j]]
        turns = math.ceil(s.micro_batches / int(np.cumsum(steps).max()))
        chain = _Chain(s).there(0, j).there(j, s.stages, turns).backward(j, s.stages, turns)
        yield chain.backward(0, j).path(0, 0)


@lru_cache(maxsize=256)
def paths(schedule: Schedule) -> tuple[Path, ...]:
    """All of those that the schedule has."""
    one = schedule.stages == schedule.ranks
    more = round_trip_paths(schedule) if one else ()
    return (*work_paths(schedule), *wait_paths(schedule), *more)


def lower_bound(schedule: Schedule, times: StageTimes) -> float:
    """Seconds that no run of the schedule's lists beats."""
    return max(p.seconds(times) for p in paths(schedule))


def slowest_stage_bound(micro_batches: int, times: StageTimes) -> float:
    """Σ t + (m - 1) max t: what 1F1B and GPipe never exceed without transfers, and Alpa's objective (Zheng et al., OSDI
    2022, equation 2). An upper bound, not the time."""
    return float(times.full.sum() + (micro_batches - 1) * times.full.max())
