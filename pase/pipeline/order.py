"""A schedule's actions as arrays, in an order in which they can run. A deadlock is an error that names who waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.errors import PaseError
from pase.pipeline.types import Action, Kind, Schedule

__all__ = ["Order", "order_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Actions of all ranks in waves: none waits for one of its own wave or of a later one. All int64 [actions].

    before: the action before it on its rank; waits: the one whose result it needs, on another stage; -1: none.
    send: the number of the cut that this result crosses between two ranks (stage k to k + 1), -1: none.
    wave: where each wave begins, [waves + 1]. last: per rank its last action, [ranks].
    """

    kind: np.ndarray
    stage: np.ndarray
    micro: np.ndarray
    rank: np.ndarray
    before: np.ndarray
    waits: np.ndarray
    send: np.ndarray
    wave: np.ndarray
    last: np.ndarray


_INPUTS = (Kind.BACKWARD, Kind.INPUT)


@lru_cache(maxsize=256)
def order_of(schedule: Schedule) -> Order:
    """The schedule's actions in an order in which they can run.

    PaseError if one is missing or duplicated, or if ranks wait for one another.
    """
    _complete(schedule)
    queue = [list(order) for order in schedule.orders]
    at, done = [0] * schedule.ranks, dict[tuple[int, bool, int], int]()
    rows: list[tuple[int, ...]] = []
    wave, last = [0], [-1] * schedule.ranks
    left = sum(map(len, queue))
    while left:
        now = []
        for r, actions in enumerate(queue):
            if at[r] < len(actions) and _ready(schedule, actions[at[r]], done):
                now.append((r, actions[at[r]]))
        if not now:
            raise _deadlock(schedule, at, done)
        for r, a in now:
            needed = _needs(schedule, a)
            across = -1
            if needed is not None and schedule.rank_of[needed[0]] != r:
                across = min(needed[0], a.stage)
            rows.append(
                (a.kind, a.stage, a.micro, r, last[r], -1 if needed is None else done[needed], across)
            )
            last[r] = len(rows) - 1
            at[r] += 1
        for r, a in now:
            if a.kind != Kind.WEIGHT:
                done[a.stage, a.kind == Kind.FORWARD, a.micro] = last[r]
        left -= len(now)
        wave.append(len(rows))
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    kind, stage, micro, rank, before, waits, send = (np.ascontiguousarray(c) for c in columns)
    return Order(
        kind=kind,
        stage=stage,
        micro=micro,
        rank=rank,
        before=before,
        waits=waits,
        send=send,
        wave=np.array(wave),
        last=np.array(last),
    )


def _needs(schedule: Schedule, a: Action) -> tuple[int, bool, int] | None:
    """What an action needs from another stage: (stage, forward?, micro-batch). Its own stage's work comes before it on
    the same rank, as ``_complete`` has checked."""
    if a.kind == Kind.FORWARD:
        return (a.stage - 1, True, a.micro) if a.stage else None
    if a.kind == Kind.WEIGHT:
        return None
    return (a.stage + 1, False, a.micro) if a.stage + 1 < schedule.stages else None


def _ready(schedule: Schedule, a: Action, done: dict[tuple[int, bool, int], int]) -> bool:
    needed = _needs(schedule, a)
    return needed is None or needed in done


def _complete(schedule: Schedule) -> None:
    """Check that every stage runs each micro-batch forward, then backward (whole or in two parts), on its own rank."""
    state: dict[tuple[int, int], str] = {}
    after = {"": "F", "F": "BI", "I": "W"}
    for r, order in enumerate(schedule.orders):
        for a in order:
            key, letter = (a.stage, a.micro), "FBIW"[a.kind]
            if not 0 <= a.stage < schedule.stages or schedule.rank_of[a.stage] != r:
                raise PaseError(f"schedule '{schedule.name}': rank {r} has {a}, whose stage is not its own")
            if letter not in after.get(state.get(key, ""), ""):
                raise PaseError(
                    f"schedule '{schedule.name}': rank {r} has {a} out of turn: forward, then backward or its two "
                    f"parts, each once"
                )
            state[key] = letter
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            if state.get((stage, micro)) not in ("B", "W"):
                raise PaseError(
                    f"schedule '{schedule.name}': stage {stage} never ends micro-batch {micro}'s backward"
                )


def _deadlock(schedule: Schedule, at: list[int], done: dict[tuple[int, bool, int], int]) -> PaseError:
    waiting = []
    for r, order in enumerate(schedule.orders):
        if at[r] < len(order):
            needed = _needs(schedule, a := order[at[r]])
            assert needed is not None and needed not in done
            stage, forward, micro = needed
            waiting.append(
                f"rank {r} at {a} waits for {Action(stage, Kind(0 if forward else 2), micro)} of rank "
                f"{schedule.rank_of[stage]}"
            )
    return PaseError(f"schedule '{schedule.name}' deadlocks: {'; '.join(waiting[:4])}")
