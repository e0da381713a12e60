"""Gradients that wait for later steps: the open updates of an iteration, and the messages sent for each of them so far.

A gradient waits unreduced on its device, added up over the steps of its update. The local program says in which step
each message is sent, and how gradients are merged and split into messages. When an update is due, all its gradients are
reduced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from pase.backends.jax.spmd.messages import DeviceSending
from pase.ir import Graph
from pase.local.messages import JOINED
from pase.local.types import LocalMessage, LocalProgram, TransferPart

if TYPE_CHECKING:
    from jax import Array

__all__ = [
    "DelayedIteration",
    "OpenUpdate",
    "UpdateSums",
    "WaitingGradients",
    "fit_into",
    "key_of_part",
    "parts_of",
    "sent_updates",
    "summed_in_step",
    "waiting_bytes",
    "waiting_keys",
]

WaitingGradients: TypeAlias = "dict[str, dict[tuple[int, ...], Array]]"
"""The waiting gradients of an update. The first dim of each array is the device.

"values": the gradients, by transfer and loop iteration (-1: no loop). "columns": the received chunks of gradients that
are split into several messages, by transfer, iteration, stage and first byte. "sums": the reduced gradients that are in
no message, by parameter."""


@dataclass(frozen=True, kw_only=True)
class OpenUpdate:
    """An update of a run: the mean gradient of iterations first to last is applied after iteration ``at``.

    Iterations are counted from the start of the run. update: its number in the period. behind: whether some of its
    messages are sent in the next iteration. If so, the program of the next iteration applies the update before its own
    work.
    """

    update: int
    first: int
    last: int
    at: int
    behind: bool = False

    @property
    def due(self) -> int:
        """The iteration whose program applies the update."""
        return self.at + self.behind


@dataclass(frozen=True, kw_only=True)
class DelayedIteration:
    """One iteration of a run."""

    program: LocalProgram
    number: int

    @cached_property
    def updates(self) -> tuple[OpenUpdate, ...]:
        """The updates that are open in this iteration, the oldest first. The last one takes its gradients."""
        p, found = self.program, []
        newest = self.number // p.period
        behind = [p.behind(k) for k in range(len(p.updates))]
        reach = max(u.at + late for u, late in zip(p.updates, behind, strict=True))
        for period in range(max(newest - reach // p.period, 0), newest + 1):
            for k, u in enumerate(p.updates):
                first, last, at = (i + period * p.period for i in (u.first, u.last, u.at))
                made = OpenUpdate(update=k, first=first, last=last, at=at, behind=behind[k])
                if first <= self.number <= made.due:
                    found.append(made)
        return tuple(found)

    @property
    def overdue(self) -> tuple[OpenUpdate, ...]:
        """The updates that are completed and applied before the rest of this iteration."""
        return tuple(u for u in self.updates if u.behind and u.due == self.number)

    @property
    def current(self) -> tuple[OpenUpdate, ...]:
        """The open updates that are not overdue."""
        return self.updates[len(self.overdue) :]

    @property
    def applies(self) -> bool:
        """Whether an update is applied at the end of this iteration."""
        return any(u.due == self.number for u in self.current)

    @property
    def held(self) -> tuple[OpenUpdate, ...]:
        """The open updates that have gradients of earlier iterations."""
        return tuple(u for u in self.updates if u.first < self.number)

    @property
    def left(self) -> tuple[OpenUpdate, ...]:
        """The updates that are still open after this iteration."""
        return tuple(u for u in self.updates if u.due > self.number)

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for iterations with the same program."""
        return tuple((u.update, self.number - u.first) for u in self.updates)

    def messages(self, u: OpenUpdate) -> tuple[list[LocalMessage], list[LocalMessage], list[LocalMessage]]:
        """The update's messages: (sent before this iteration, sent in it, sent later), each in order."""
        found: tuple[list[LocalMessage], ...] = ([], [], [])
        for m in self.program.messages:
            if m.way == "back" and m.update == u.update:
                when = u.last + m.late
                found[(when > self.number) - (when < self.number) + 1].append(m)
        return found  # type: ignore[return-value]


def parts_of(program: LocalProgram) -> list[TransferPart]:
    """The parts of transfers whose gradients wait in each update."""
    found = (p.part for m in program.messages if m.way == "back" and m.update == 0 for p in m.chunks)
    return list(dict.fromkeys(found))


def summed_in_step(program: LocalProgram) -> frozenset[str]:
    """The nodes of parameters with a gradient in no message. It is reduced in its own step, and then waits."""
    carried = {number for number, _ in parts_of(program)}
    rest = {t.src for k, t in enumerate(program.transfers) if k not in carried and t.backward is not None}
    return program.parameters & rest


def waiting_bytes(program: LocalProgram, graph: Graph) -> int:
    """The most bytes of gradients that a device holds between steps.

    A gradient that is added up over several iterations has the dtype in which its parameter is stored. Any other
    gradient has the dtype in which it is sent.
    """
    stored = {op.node: op.results[0] for op in program.ops if op.op.kind == "parameter"}
    added = whole = 0
    for number, _ in parts_of(program):
        t, sent = program.transfers[number], program.stages(number, "back")[0].nbytes
        whole += sent
        added += sent // graph.tensors[t.tensor].itemsize * graph.tensors[stored[t.src].tensor].itemsize
    for node in summed_in_step(program):
        r = stored[node]
        own = math.prod(r.gradient.local_shape(r.shape, program.mesh)) * graph.tensors[r.tensor].itemsize
        added, whole = added + own, whole + own
    steady = (max(u.at for u in program.updates) + 1) // program.period + 1
    numbers = range(steady * program.period, (steady + 1) * program.period)
    left = {n: DelayedIteration(program=program, number=n).left for n in numbers}
    return max(sum(added if u.last > n else whole for u in updates) for n, updates in left.items())


def columns_of(program: LocalProgram, sent: Sequence[LocalMessage]) -> set[tuple[int, ...]]:
    """The received chunks of reshard steps that are not complete after these messages, as ``WaitingGradients`` keys."""
    received: dict[tuple[TransferPart, int], dict[int, int]] = {}
    for m in sent:
        for p in m.chunks:
            received.setdefault((p.part, p.stage), {})[p.begin] = p.nbytes
    out: set[tuple[int, ...]] = set()
    for (part, stage), chunks in received.items():
        step = program.stages(part[0], "back")[stage]
        if step.kind in JOINED and sum(chunks.values()) < step.nbytes:
            out |= {(*key_of_part(part), stage, begin) for begin in chunks}
    return out


def reshard_steps_done(program: LocalProgram, part: TransferPart, sent: Sequence[LocalMessage]) -> int:
    """How many of a gradient's reshard steps are complete after these messages are sent."""
    done, steps = 0, program.reshard_steps(part[0], "back")
    at = [i for i, m in enumerate(steps) if m.nbytes and not m.free]
    for stage, i in enumerate(at):
        chunks = [p for m in sent for p in m.chunks if (p.part, p.stage) == (part, stage)]
        if chunks:
            whole = steps[i].kind not in JOINED or sum(p.nbytes for p in chunks) == steps[i].nbytes
            done = i + whole
    return done


def key_of_part(part: TransferPart) -> tuple[int, int]:
    """The key of a part in ``WaitingGradients``."""
    return part[0], -1 if part[1] is None else part[1]


def _part(key: Sequence[int]) -> TransferPart:
    return key[0], None if key[1] < 0 else key[1]


@dataclass(frozen=True, kw_only=True)
class UpdateSums:
    """A complete update on one device: gradients reduced over devices and summed over the update's iterations.

    parts: the gradients, in the parameters' storage layouts. own: the gradients that are in no message, by parameter.
    """

    update: OpenUpdate
    parts: dict[TransferPart, Array]
    own: dict[tuple[int, ...], Array]

    @property
    def batches(self) -> int:
        """The number of iterations that are summed."""
        return self.update.last - self.update.first + 1


def sent_updates(
    iteration: DelayedIteration,
    updates: Sequence[OpenUpdate],
    held: Sequence[WaitingGradients],
    merged: Callable[[OpenUpdate, WaitingGradients], WaitingGradients] | None = None,
) -> tuple[list[WaitingGradients], UpdateSums | None]:
    """On one device, send the iteration's messages for these updates.

    Returns (the gradients that still wait, the update that is due, or None). held: the waiting gradients of the first
    of these updates; the others have none yet. merged: adds this iteration's gradients to those of an update.
    """
    last: dict[tuple[str, float], Array] = {}
    kept: list[WaitingGradients] = []
    due = None
    for k, u in enumerate(updates):
        mine: WaitingGradients = held[k] if k < len(held) else {}
        if merged is not None and u.last >= iteration.number:
            mine = merged(u, mine)
        sending = _sending(iteration, u, mine, last)
        for _ in iteration.messages(u)[1]:
            sending.send()
        if u.due == iteration.number:
            parts = {part: sending.finished(part) for part in map(_part, mine["values"])}
            due = UpdateSums(update=u, parts=parts, own=mine["sums"])
            continue
        columns: dict[tuple[int, ...], Array] = {
            (*key_of_part(part), stage, begin): x
            for (part, stage), received in sending.parts.items()
            for begin, x in received.items()
        }
        values: dict[tuple[int, ...], Array] = {key_of_part(part): x for part, x in sending.values.items()}
        kept.append({"values": values, "columns": columns, "sums": mine["sums"]})
    return kept, due


def _sending(
    iteration: DelayedIteration, u: OpenUpdate, mine: WaitingGradients, last: dict[tuple[str, float], Array]
) -> DeviceSending:
    """The state of sending an update's gradients, after the messages of earlier iterations.

    last: shared by all updates that send in the same step.
    """
    sent, now, later = iteration.messages(u)
    parts: dict[tuple[TransferPart, int], dict[int, Array]] = {}
    for key, x in mine["columns"].items():
        parts.setdefault((_part(key), key[2]), {})[key[3]] = x
    values = {_part(key): x for key, x in mine["values"].items()}
    return DeviceSending(
        program=iteration.program,
        way="back",
        values=values,
        messages=[*now, *later],
        done={part: reshard_steps_done(iteration.program, part, sent) for part in values},
        last=last,
        parts=parts,
    )


def waiting_keys(
    iteration: DelayedIteration, u: OpenUpdate, own: Sequence[int], *, sent: bool
) -> dict[str, list[tuple[int, ...]]]:
    """The keys of an update's ``WaitingGradients`` before or, if sent, after the iteration's messages.

    own: the parameters that have a gradient in no message.
    """
    before, now, _ = iteration.messages(u)
    gone = [*before, *now] if sent else before
    return {
        "values": [key_of_part(part) for part in parts_of(iteration.program)],
        "columns": sorted(columns_of(iteration.program, gone)),
        "sums": [(i,) for i in own],
    }


def fit_into(held: Sequence[WaitingGradients], left: Sequence[WaitingGradients]) -> bool:
    """Whether the gradients that wait after a step can reuse the memory of those that waited before it."""
    received, come = (Counter(key for u in some for key in u["columns"]) for some in (held, left))
    return len(held) <= len(left) and received <= come
