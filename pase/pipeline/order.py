"""A schedule's actions as arrays, in an order in which they can run. The error of a deadlock names who waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.errors import PaseError
from pase.pipeline.types import Action, Kind, Schedule

__all__ = ["Order", "order_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The actions of all ranks in waves: an action waits only for actions of earlier waves.

    All arrays are int64 [actions] unless stated otherwise. before: the previous action on the same rank, -1 for none.
    waits: the action of another stage whose result it needs, -1 for none. send: the cut that this result crosses
    between two ranks (cut k is between stages k and k + 1), -1 for none. wave: where each wave begins, [waves + 1].
    last: the last action of each rank, [ranks].
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

    Raises PaseError if an action is missing or duplicated, or if ranks wait for one another.
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
    """What an action needs from another stage: (stage, whether it is a forward, micro-batch).

    The earlier actions of its own stage come before it on the same rank, as ``_complete`` has checked.
    """
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
                raise PaseError(
                    f"rank {r} has {a}, but its stage is not on this rank",
                    where=f"schedule '{schedule.name}'",
                    fix="list each action on the rank that rank_of gives for its stage",
                )
            if letter not in after.get(state.get(key, ""), ""):
                raise PaseError(
                    f"rank {r} has {a} out of order",
                    where=f"schedule '{schedule.name}'",
                    fix="list a forward, then a backward or its two parts, each once",
                )
            state[key] = letter
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            if state.get((stage, micro)) not in ("B", "W"):
                raise PaseError(
                    f"stage {stage} never ends the backward of micro-batch {micro}",
                    where=f"schedule '{schedule.name}'",
                    fix="add the missing actions",
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
    return PaseError(
        f"it deadlocks: {', '.join(waiting[:4])}",
        where=f"schedule '{schedule.name}'",
        fix="reorder the actions of these ranks",
    )
