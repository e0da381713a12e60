"""The predicted step of a pipelined plan, rank by rank: work on micro-batches, sends, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.pipeline.order import Order, order_of
from pase.pipeline.simulate import Simulated, in_flight, simulate
from pase.pipeline.types import Action, Kind, StageTimes
from pase.plan.pipeline import PipelinePlan, StagePlan
from pase.replay.types import Event, Group, Mark, Timeline, from_events

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["SimulatedStages", "action_name", "simulated_stages", "stage_timeline"]

_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward, inputs"} | {
    Kind.WEIGHT: "backward, weights"
}
_MOST_ACTIONS = 60_000


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStages:
    """The plan's schedule, simulated with the plan's times. order: its actions, in the order of ``done``."""

    pipeline: PipelinePlan
    order: Order
    done: Simulated

    def actions(self) -> Iterator[tuple[Action, int, int, int]]:
        """Yield (action, its rank, its start and its end in nanoseconds), in the order of ``order``."""
        o, starts, ends = self.order, _ns(self.done.start), _ns(self.done.end)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            yield Action(int(o.stage[i]), Kind(int(o.kind[i])), int(o.micro[i])), int(o.rank[i]), start, end

    def hoisted(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (what a rank does once per step, the rank, its start and its end in nanoseconds)."""
        p = self.pipeline
        for r in range(p.degree):
            after = float(self.done.end[self.order.last[r]])
            for name, begin, seconds in (
                ("before the first micro-batch: weights are gathered", 0.0, p.before_s[r]),
                ("after the last micro-batch: sums of gradients, the update", after, p.after_s[r]),
            ):
                if seconds:
                    yield name, r, round(begin * 1e9), round((begin + seconds) * 1e9)


def _ns(seconds: np.ndarray) -> list[int]:
    """Return whole nanoseconds."""
    out: list[int] = np.rint(seconds * 1e9).astype(np.int64).tolist()
    return out


def action_name(a: Action) -> str:
    """Return a name that starts with the micro-batch, because narrow boxes show only the beginning.

    >>> action_name(Action(3, Kind.FORWARD, 5))
    '5: forward, stage 3'
    """
    return f"{a.micro}: {_WORDS[a.kind]}, stage {a.stage}"


def simulated_stages(plan: PlanData) -> SimulatedStages | None:
    """Return the simulated stages of a plan.

    None if the plan has no stages, if its layout was written before stages' times were stored, or if the schedule has
    more actions than one can look at.
    """
    p = plan.pipeline
    times = None if p is None else _times(p)
    if p is None or times is None:
        return None
    listed = p.actions()
    order = order_of(listed)
    if order.kind.size > _MOST_ACTIONS:
        return None
    return SimulatedStages(pipeline=p, order=order, done=simulate(listed, times))


def _times(p: PipelinePlan) -> StageTimes | None:
    """Return the stages' seconds; None for layouts written before they were stored."""
    parts = [(s.weight_s, s.recompute_s, s.send_s) for s in p.stages]
    if not p.before_s or any(x is None for part in parts for x in part):
        return None
    weight, recompute, _ = np.array(parts, dtype=float).T
    backward = np.array([s.backward_s for s in p.stages])
    return StageTimes(
        forward=np.array([s.forward_s for s in p.stages]),
        input=backward - weight - recompute,
        weight=weight,
        recompute=recompute,
        send=np.array([[_sent_s(s, there=there) for s in p.stages[:-1]] for there in (True, False)]),
        before=np.array(p.before_s),
        after=np.array(p.after_s),
    )


def stage_timeline(plan: PlanData) -> Timeline | None:
    """Return the step as `pase replay` reads timelines; None if ``simulated_stages`` is None.

    Each rank has a stream of work and streams for what it sends to other ranks. What one of its devices holds is shown
    as memory events. A send has the same correlation as the work that waits for it.
    """
    stages = simulated_stages(plan)
    if stages is None:
        return None
    p, each = stages.pipeline, plan.mesh.devices
    end = round(stages.done.step_s * 1e9)
    made = from_events(
        [*_work(stages), *_sends(stages), *_memory(stages)],
        groups=tuple(
            Group(name=_between(a.rank, b.rank), ranks=(a.rank, b.rank))
            for pair in pairwise(p.stages)
            for a, b in (pair, pair[::-1])
            if a.rank != b.rank
        ),
        marks=tuple(Mark(rank=r, iteration=0, start_ns=0, end_ns=end) for r in range(p.degree)),
    )
    group = [f" of {name}" for name in p.groups] or [""] * p.degree
    return replace(
        made, hosts={r: f"devices {r * each} to {(r + 1) * each - 1}{group[r]}" for r in range(p.degree)}
    )


def _between(a: int, b: int) -> str:
    return f"rank {a} to rank {b}"


def _event(rank: int, lane: str, name: str, start: int, end: int, **more: Any) -> Event:
    kind = more.pop("kind", "kernel")
    return Event(
        rank=rank,
        lane=lane,
        device=kind != "memory",
        kind=kind,
        name=name,
        start_ns=start,
        duration_ns=end - start,
        iteration=0,
        **more,
    )


def _work(stages: SimulatedStages) -> Iterator[Event]:
    """Yield what ranks do. An action that waits for a send has its own number as its correlation."""
    for i, (a, rank, start, end) in enumerate(stages.actions()):
        needs = i if stages.order.send[i] >= 0 else -1
        yield _event(rank, "work", action_name(a), start, end, correlation=needs)
    for name, rank, start, end in stages.hoisted():
        yield _event(rank, "work", name, start, end)


def _sends(stages: SimulatedStages) -> Iterator[Event]:
    """Yield what ranks send: one stream per receiving rank, and more if a send begins before the previous one ends."""
    o, p, actions = stages.order, stages.pipeline, [*stages.actions()]
    busy: dict[tuple[int, int], list[int]] = {}
    needed = np.flatnonzero(o.send >= 0)
    for i in needed[np.argsort(stages.done.end[o.waits[needed]], kind="stable")].tolist():
        cut, (a, rank, _, start) = int(o.send[i]), actions[int(o.waits[i])]
        there = a.kind is Kind.FORWARD
        of = p.stages if stages.done.schedule.lockstep else p.stages[cut : cut + 1]
        taken = max(_sent_s(s, there=there) for s in of)
        end, to = start + round(taken * 1e9), actions[i][1]
        free = busy.setdefault((rank, to), [])
        k = next((k for k, until in enumerate(free) if until <= start), len(free))
        free[k : k + 1] = [end]
        what = "activations" if there else "gradients"
        sent = (
            p.stages[cut].send_bytes
            if there or p.stages[cut].back_bytes is None
            else p.stages[cut].back_bytes
        )
        yield _event(
            rank,
            f"sends to rank {to}" + (f" ({k + 1})" if k else ""),
            f"{what} of micro-batch {a.micro}, stage {a.stage} to {actions[i][0].stage}",
            start,
            end,
            kind="collective",
            operation="send_recv",
            group=_between(rank, to),
            nbytes=-1 if sent is None else sent,
            correlation=i,
        )


def _sent_s(s: StagePlan, *, there: bool) -> float:
    return (s.send_s if there or s.back_s is None else s.back_s) or 0.0


def _memory(stages: SimulatedStages) -> Iterator[Event]:
    """Yield the bytes on a device. What an action adds is there from its start; what it frees goes at its end."""
    p, s = stages.pipeline, stages.done.schedule
    parts = [(x.kept_bytes, x.waiting_bytes) for x in p.stages]
    if any(x is None for part in parts for x in part):
        return
    kept, waiting = np.array(parts, dtype=float).T
    mine: list[list[tuple[int, int]]] = [[] for _ in range(p.degree)]
    for _, rank, start, end in stages.actions():
        mine[rank].append((start, end))
    for r, actions in enumerate(mine):
        flying = in_flight(s, r)
        held = np.rint(flying[:, 0] @ kept + flying[:, 1] @ waiting)
        total = next(x.memory_bytes for x in p.stages if x.rank == r)
        stays = max(total - int(held.max(initial=0.0)), 0)
        yield _event(r, "memory", "weights, state, gradients, buffers", 0, 0, kind="memory", nbytes=stays)
        yield _event(r, "memory", _FLYING, 0, 0, kind="memory", nbytes=0)
        before = 0.0
        for (start, end), nbytes in zip(actions, held.tolist(), strict=True):
            at, before = start if nbytes > before else end, nbytes
            yield _event(r, "memory", _FLYING, at, at, kind="memory", nbytes=int(nbytes))


_FLYING = "activations of micro-batches in flight"
