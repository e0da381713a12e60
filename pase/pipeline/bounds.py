"""What no run of a pipeline's lists can beat, by a path argument, and what none exceeds; seconds.

All count what a rank does before its first and after its last action only where the argument carries it.
"""

from __future__ import annotations

import math

import numpy as np

from pase.pipeline.types import Kind, Schedule, StageTimes

__all__ = ["lower_bound", "round_trip_bound", "slowest_stage_bound", "wait_bound", "work_bound"]


def _ways(times: StageTimes) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the step's start to each stage's first input, and from each stage's backward to its end."""
    send = np.append(times.send, 0.0)
    there = np.concatenate([[0.0], np.cumsum(times.forward + send)[:-1]])
    back = np.concatenate([[0.0], np.cumsum(times.again + times.input + send)[:-1]])
    return there, back


def _crossing(schedule: Schedule, times: StageTimes) -> StageTimes:
    """The same times without transfers between stages of one rank."""
    rank = np.array(schedule.rank_of)
    return StageTimes.of(
        times.forward, times.input, times.weight, again=times.again, ranks=schedule.ranks,
        send=np.where(rank[1:] != rank[:-1], times.send, 0.0), before=times.before, after=times.after,
    )  # fmt: skip


def _whole(times: StageTimes, splits: bool) -> StageTimes:
    """Of whole backwards: all of it stands in the way of the stage before."""
    if splits:
        return times
    return StageTimes.of(
        times.forward, times.input + times.weight, 0.0, again=times.again, ranks=times.before.size, send=times.send,
        before=times.before, after=times.after,
    )  # fmt: skip


def work_bound(schedule: Schedule, times: StageTimes) -> float:
    """Each rank's whole work, after the way to its first stage and before the way home from it.

    A rank's first action is its first stage's forward, its last one that stage's backward. Where gradients of weights
    are apart they may come after it: then without the way home, or without them.
    """
    t, best = _whole(_crossing(schedule, times), schedule.splits_backward), 0.0
    there, back = _ways(t)
    m = schedule.micro_batches
    for r in range(schedule.ranks):
        mine = [k for k, rank in enumerate(schedule.rank_of) if rank == r]
        first, all_ = mine[0], m * float(t.full[mine].sum())
        arrives = max(there[first], t.before[r])
        home = all_ - m * float(t.weight[mine].sum()) + back[first]
        best = max(best, arrives + all_ + t.after[r], arrives + home)
    return best


def _ahead(schedule: Schedule, rank: int) -> int:
    """Forwards before the rank's first backward."""
    return next(i for i, a in enumerate(schedule.orders[rank]) if a.kind != Kind.FORWARD)


def wait_bound(schedule: Schedule, times: StageTimes) -> float:
    """Of one stage a rank: its first backward waits for the first micro-batch's way there and back; of the rank's work
    only the forwards before it are done by then.

    Σ t + max_j [(m - 1) t_j - (w_j - 1) f_j], where w_j forwards stand before stage j's first backward.
    """
    t, m, best = _whole(times, schedule.splits_backward), schedule.micro_batches, 0.0
    there, back = _ways(t)
    round_ = t.forward + t.again + t.input
    for j in range(schedule.ranks):
        after = float(round_[j + 1 :].sum() + 2 * t.send[j:].sum())
        waited = there[j] + t.forward[j] + after
        left = m * t.full[j] - _ahead(schedule, j) * t.forward[j]
        best = max(best, waited + left + t.after[j], waited + left - m * t.weight[j] + back[j])
    return best


def round_trip_bound(schedule: Schedule, times: StageTimes) -> float:
    """Of one stage a rank: no more than so many micro-batches are past stage j at once, and each stays as long as the
    way to the last stage and back takes. It is the one that sees transfers in 1F1B's steady state."""
    t, best = _whole(times, schedule.splits_backward), 0.0
    there, back = _ways(t)
    round_ = t.forward + t.again + t.input
    for j in range(schedule.ranks):
        stay = float(round_[j:].sum() + 2 * t.send[j:].sum())
        turns = math.ceil(schedule.micro_batches / _most_ahead(schedule, j))
        best = max(best, there[j] + turns * stay + back[j])
    return best


def _most_ahead(schedule: Schedule, rank: int) -> int:
    steps = [{Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(a.kind, -1) for a in schedule.orders[rank]]
    return int(np.cumsum(steps).max())


def lower_bound(schedule: Schedule, times: StageTimes) -> float:
    """The largest of those that hold for the schedule."""
    out = work_bound(schedule, times)
    if schedule.stages == schedule.ranks:
        out = max(out, wait_bound(schedule, times), round_trip_bound(schedule, times))
    return out


def slowest_stage_bound(micro_batches: int, times: StageTimes) -> float:
    """Σ t + (m - 1) max t: what 1F1B and GPipe never exceed without transfers, and Alpa's objective (Zheng et al., OSDI
    2022, equation 2). An upper bound, not the time."""
    return float(times.full.sum() + (micro_batches - 1) * times.full.max())
