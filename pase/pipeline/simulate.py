"""Simulates a pipeline step action by action: an action starts when its rank is free and its inputs have arrived.

Sends are asynchronous: an activation takes time to arrive but blocks neither rank. The dependencies follow from the
lists of actions only, so one order of all actions works for any times, and the step takes as long as the longest path.
It never gets shorter if a time grows. Each path (``Path``) is a lower bound for every cut of the model, linear in the
times.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np

from pase.compiled import BreakEven
from pase.pipeline import kernels_numpy
from pase.pipeline.order import order_of
from pase.pipeline.types import Kind, Schedule, StageTimes

__all__ = ["Path", "Simulated", "in_flight", "peak_bytes", "simulate"]

_ACTION_S = 5e-7
"""About how long numpy takes to simulate an action."""

KERNELS = BreakEven(load_s=1.0)


def kernels_for(kernel: Literal["auto", "numba", "numpy"], actions: int) -> ModuleType:
    """The kernel to use. "auto": numpy until it has run for as long as numba takes to load.

    Both kernels return the same bits.
    """
    if kernel not in ("auto", "numba", "numpy"):
        raise ValueError(f"kernel must be 'auto', 'numba' or 'numpy', not {kernel!r}")
    if kernel == "numpy" or (kernel == "auto" and not KERNELS.pays(actions * _ACTION_S)):
        return kernels_numpy
    from pase.pipeline import kernels_numba

    return kernels_numba


@dataclass(frozen=True, kw_only=True, eq=False)
class Path:
    """A chain of actions, each of which waits for the one before it. Its length is a lower bound on the step.

    runs: how often each kind of action of each stage occurs in the path, float64 [kinds, stages]. crossed: how often
    the path crosses each cut, forward and back, float64 [2, stages - 1]. first, last: the ranks on which it starts and
    ends.
    """

    runs: np.ndarray
    crossed: np.ndarray
    first: int
    last: int

    def seconds(self, times: StageTimes) -> float:
        return float(
            (self.runs * times.by_kind).sum()
            + (self.crossed * times.send).sum()
            + times.before[self.first]
            + times.after[self.last]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """A simulated step.

    step_s: seconds until the last rank is done. period_s: seconds per step if ranks do not wait for each other between
    steps, which is the longest time of any rank. Zero-bubble papers measure this, because their optimizer checks norms
    afterwards. start, end: the start and end of each action in seconds, in the order of ``order_of``. busy: the seconds
    that each rank works on micro-batches, float64 [ranks]. path: the longest path.
    """

    schedule: Schedule
    step_s: float
    period_s: float
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    path: Path

    @property
    def bubble(self) -> float:
        """The fraction of the step in which the average rank is idle or busy with once-per-step work.

        >>> from pase.pipeline.registry import schedule
        >>> done = simulate(schedule("1f1b", 4, 12), StageTimes.of([1.0] * 4, 2.0, 0.0, ranks=4))
        >>> round(done.bubble, 12)
        0.2
        """
        return 1 - float(self.busy.mean()) / self.step_s if self.step_s else 0.0

    @property
    def imbalance(self) -> float:
        """How much more work the busiest rank has than the average one."""
        mean = float(self.busy.mean())
        return float(self.busy.max()) / mean - 1 if mean else 0.0


def simulate(
    schedule: Schedule, times: StageTimes, *, kernel: Literal["auto", "numba", "numpy"] = "auto"
) -> Simulated:
    """Simulate a step of the schedule with these stage times. Raises PaseError if the schedule deadlocks."""
    if times.forward.size != schedule.stages:
        raise ValueError(
            f"the times have {times.forward.size} stages, but the schedule has {schedule.stages}"
        )
    order = order_of(schedule)
    spent = times.by_kind[order.kind, order.stage]
    back = (order.kind != Kind.FORWARD).astype(int)
    late = np.pad(times.send, ((0, 0), (0, 1)))[back, order.send]  # index -1 selects the zero at the end
    if schedule.lockstep:
        turn_s = times.send.max(axis=1, initial=0.0)
        spent, late = _lockstep(times, order.kind, spent), np.where(order.waits >= 0, turn_s[back], 0.0)
    begin = times.before[order.rank]
    end, by = kernels_for(kernel, order.kind.size).run(
        order.wave, order.before, order.waits, spent, late, begin
    )
    total = end[order.last] + times.after
    last = int(total.argmax())
    first = np.array([end.size] * schedule.ranks)
    np.minimum.at(first, order.rank, np.arange(end.size))
    spans = total - (end - spent)[first] + times.before
    busy = np.bincount(order.rank, times.by_kind[order.kind, order.stage], schedule.ranks)
    return Simulated(
        schedule=schedule,
        step_s=float(total[last]),
        period_s=float(spans.max()),
        start=end - spent,
        end=end,
        busy=busy,
        path=_path(schedule, by, last),
    )


def _lockstep(times: StageTimes, kind: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The seconds of each action in lockstep, where each slot takes as long as the slowest stage."""
    slowest = times.by_kind.max(axis=1)
    out: np.ndarray = np.maximum(spent, slowest[kind])
    return out


def _path(schedule: Schedule, by: np.ndarray, last: int) -> Path:
    """The longest path, traced back from the last action of rank ``last``.

    by: for each action, the action that it waited for, -1 for none.
    """
    order = order_of(schedule)
    runs, crossed = np.zeros((len(Kind), schedule.stages)), np.zeros((2, schedule.stages - 1))
    at = first = int(order.last[last])
    while at >= 0:
        runs[order.kind[at], order.stage[at]] += 1
        if by[at] >= 0 and by[at] == order.waits[at] and order.send[at] >= 0:
            crossed[int(order.kind[at] != Kind.FORWARD), order.send[at]] += 1
        first, at = at, int(by[at])
    return Path(runs=runs, crossed=crossed, first=int(order.rank[first]), last=last)


def in_flight(schedule: Schedule, rank: int) -> np.ndarray:
    """The micro-batches that the rank holds after each of its actions, float64 [actions, 2, stages].

    The first row counts the micro-batches whose activations a stage holds, the second those of which its weight
    gradients still need a part. In lockstep, a rank's idle slots count as micro-batches of its first stage.
    """
    change = np.zeros((len(schedule.orders[rank]), 2, schedule.stages))
    for row, a in zip(change, schedule.orders[rank], strict=True):
        row[0, a.stage] = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1, Kind.WEIGHT: 0}[a.kind]
        row[1, a.stage] = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.INPUT: 1, Kind.WEIGHT: -1}[a.kind]
    if schedule.lockstep:  # a scan keeps the residuals of every iteration, including idle ones
        first, idle = schedule.orders[rank][0].stage, schedule.ranks - 1
        change[0, 0, first] += idle
        change[-1, 0, first] -= idle
    return np.cumsum(change, axis=0)


def peak_bytes(schedule: Schedule, kept: np.ndarray, for_weights: np.ndarray | float = 0.0) -> np.ndarray:
    """The most bytes of activations that each rank holds at once, float64 [ranks].

    kept: bytes of one micro-batch until its backward, [stages]. for_weights: the part of them that stays until WEIGHT.
    """
    left = np.broadcast_to(np.asarray(for_weights, float), kept.shape)
    held = (in_flight(schedule, r) for r in range(schedule.ranks))
    return np.array([float((h[:, 0] @ kept + h[:, 1] @ left).max(initial=0.0)) for h in held])
