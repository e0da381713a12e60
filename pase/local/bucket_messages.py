"""Turns a bucket plan into messages of a local program.

A bucket plan lists each iteration of a loop separately; a local program has one loop body for all iterations. So a
loop's messages are those of its middle iteration. A message that joins several iterations, or a transfer inside of a
loop with one outside, is cut between them. A second gather for backward belongs to the recomputed region, which runs
the first gather again. What backward does not gather again is in separate messages.

If gradients are sent or applied in later steps, they wait outside of loops. Messages are then sent before and after a
step's computation, joined and cut as in the bucket plan, for each iteration of a loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.ir import Scope
from pase.local.types import LocalMessage, LocalProgram, MessageChunk, TransferDirection
from pase.plan.buckets import schedule_of
from pase.plan.communication import TransferOrigin, middle_run, transfer_origins
from pase.schedule.plan import BucketPlan, Message, Update
from pase.schedule.preserver import TrainingState, judge
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["ProgramSchedule", "iterations_late", "outside_messages", "with_updates"]


@dataclass(frozen=True, kw_only=True)
class ProgramSchedule:
    """A plan's communication schedule.

    origins: for each tensor of the problem, the collective of the step that it stands for. nodes: name of a forward
    compute block -> its node; of a loop, only the middle iteration is listed. micro_batches: number per step.
    """

    problem: ScheduleProblem
    plan: BucketPlan
    origins: Sequence[TransferOrigin]
    nodes: Mapping[str, str]
    micro_batches: int

    @classmethod
    def of(
        cls, plan: PlanData, made: tuple[ScheduleProblem, BucketPlan] | None = None
    ) -> ProgramSchedule | None:
        """The schedule of a plan; None if the plan has none. made: a problem of the plan's collectives and a bucket
        plan, instead of the plan's own."""
        if made is None:
            if plan.buckets is None:
                return None
            made = schedule_of(plan)
            assert made is not None
        k, several = plan.accumulate, [n for n in plan.nodes if n.op != "input"]
        nodes = {n.name + (f"[{middle_run(n.times, k)}]" if n.times > 1 else ""): n.name for n in several}
        return cls(
            problem=made[0], plan=made[1], origins=transfer_origins(plan), nodes=nodes, micro_batches=k
        )

    @property
    def delayed(self) -> bool:
        """Whether any gradient is applied in a later step than its own, or together with another step's."""
        return self.plan.period > 1 or self.plan.staleness > 0

    @property
    def crosses(self) -> bool:
        """Whether any gradient is sent in a later step than its own."""
        late = iterations_late(self.problem, self.plan, across=True)
        return any(n and not self._gathers(m) for n, m in zip(late, self.plan.messages, strict=True))

    def _gathers(self, message: Message) -> bool:
        return not any(self.origins[p.tensor].gradient for p in message.pieces)

    def later(self) -> str:
        """The warning about a step with delayed updates: that its parameters differ from those of the synchronous step,
        and whether it is expected to train equally well."""
        p = self.plan
        verdict = p.detail.get("preserver") or judge(TrainingState(), [u.batches for u in p.updates])
        late, steps = _counted(p.staleness, "step"), _counted(p.period, "step")
        return (
            f"the bucket plan '{p.policy}' applies gradients up to {late} late, in "
            f"{_counted(len(p.updates), 'update')} every {steps}: by design, the parameters differ from those of the "
            f"synchronous step. {verdict}"
        )

    def placed(self, program: LocalProgram) -> LocalProgram:
        """The program with this schedule's messages. If updates are delayed, it warns and returns the program as is."""
        if self.delayed:
            warnings.warn(
                f"the bucket plan '{self.plan.policy}' applies gradients in later steps, but this step applies its "
                f"own gradients and sends each of them by itself",
                stacklevel=2,
            )
            return program
        numbers = self._transfers(program)
        starts = self._starts()
        messages: list[LocalMessage] = []
        for i, message in enumerate(self.plan.messages):
            parts: dict[tuple[TransferDirection, tuple[Scope, ...], float], list[MessageChunk]] = {}
            for p in message.pieces:
                origin = self.origins[p.tensor]
                key = origin.node, origin.source, origin.tensor
                middle = origin.repeat == middle_run(origin.times, self.micro_batches)
                if origin.recompute or origin.updated or not middle or key not in numbers:
                    continue
                number, loops = numbers[key]
                chunk = MessageChunk(transfer=number, stage=origin.stage, begin=p.offset, nbytes=p.nbytes)
                way: TransferDirection = "back" if origin.gradient else "there"
                parts.setdefault((way, loops, program.runs(number, way)), []).append(chunk)
            link = self.problem.links[message.link].name
            for (way, *_), chunks in parts.items():
                after = starts.get(i, "") if way == "there" else ""
                messages.append(LocalMessage(way=way, link=link, chunks=tuple(chunks), after=after))
        whole = replace(program, messages=tuple(messages))
        bound = (m.after and not whole.can_wait(i, m.after) for i, m in enumerate(messages))
        free = (replace(m, after="") if early else m for m, early in zip(messages, bound, strict=True))
        return replace(program, messages=tuple(free))

    def placed_later(
        self, program: LocalProgram, waits: Callable[[int], bool], across: bool = False
    ) -> LocalProgram:
        """The program with messages that are sent outside of its computation: those of parameters before it, those of
        gradients after it, as many steps later as ``iterations_late`` returns.

        waits: whether the gradient of a transfer can wait unreduced. Other gradients are reduced in their own step,
        each by itself, and then wait. across: as in ``iterations_late``.
        """
        late = iterations_late(self.problem, self.plan, across=across)
        found = self._transfers(program).items()
        outside = {key: number for key, (number, _) in found if waits(number)}
        messages: list[LocalMessage] = []
        for message, behind in zip(self.plan.messages, late, strict=True):
            ways: dict[TransferDirection, list[MessageChunk]] = {"there": [], "back": []}
            for p in message.pieces:
                origin = self.origins[p.tensor]
                number = outside.get((origin.node, origin.source, origin.tensor))
                if number is None or origin.recompute or origin.updated:
                    continue
                iteration = origin.repeat if origin.times > 1 else None
                chunk = MessageChunk(
                    transfer=number, stage=origin.stage, begin=p.offset, nbytes=p.nbytes, iteration=iteration
                )
                ways["back" if origin.gradient else "there"].append(chunk)
            messages += outside_messages(self.problem, message, behind, ways)
        return with_updates(replace(program, messages=tuple(messages)), self.plan)

    def _transfers(
        self, program: LocalProgram
    ) -> Mapping[tuple[str, str, str], tuple[int, tuple[Scope, ...]]]:
        """(reader, parameter, tensor) -> (number of the transfer, the loops around its readers).

        Left out, and so sent by themselves: tensors with two transfers to one node (a chain of collectives in the
        schedule problem, but two programs in the step), and tensors that are read in several loops or by a user's
        derivative rule.
        """
        found: dict[tuple[str, str, str], list[int]] = {}
        for k, t in enumerate(program.transfers):
            found.setdefault((t.dst, t.src, t.tensor), []).append(k)
        out = {}
        for key, (number, *more) in found.items():
            readers = list(program.users(number))
            loops = {op.op.loops for op in readers}
            ruled = any(op.op.kind == "gradient" for op in readers)
            if not more and len(loops) == 1 and not ruled:
                out[key] = number, loops.pop()
        return out

    def _starts(self) -> Mapping[int, str]:
        """Message -> the forward node that is running when the message starts, in the steady state. Messages that start
        before the step, or in backward, are left out."""
        from pase.schedule.simulate import evaluate

        timeline = evaluate(self.problem, self.plan, check=False).timeline
        blocks = [i for i in timeline if i.message is None]
        out: dict[int, str] = {}
        for sent in timeline:
            begun = [b for b in blocks if b.start_s <= sent.start_s]
            if (
                sent.message is not None and begun and begun[-1].name in self.nodes
            ):  # a block of backward has another name
                out[sent.message] = self.nodes[begun[-1].name]
        return out


def iterations_late(problem: ScheduleProblem, plan: BucketPlan, *, across: bool) -> list[int]:
    """For each message, how many training steps after the last step of its update it is sent.

    This is the later of the plan's step and the step in which the message starts in the steady state, and at the latest
    the step in which its update is applied. across: messages that a plan without delays sends during the next forward
    pass are sent in the next step instead of at the end of their own.
    """
    from pase.schedule.simulate import evaluate

    late = evaluate(problem, plan, timeline=False, check=False).late
    plain = plan.period == 1 and plan.staleness == 0 and not plan.barrier
    out = []
    for m, behind in zip(plan.messages, late, strict=True):
        u = plan.updates[m.update]
        out.append(min(max(behind, m.iteration), u.at - u.last + (across and plain)))
    return out


def outside_messages(
    problem: ScheduleProblem,
    message: Message,
    late: int,
    ways: Mapping[TransferDirection, Sequence[MessageChunk]],
) -> Iterator[LocalMessage]:
    """The local program's messages for one message of a bucket plan, if messages are sent outside of a step's
    computation. Gathers of parameters do not depend on the update, so only those of the first update are taken."""
    link = problem.links[message.link].name
    for way, chunks in ways.items():
        if chunks and (way == "back" or message.update == 0):
            back = way == "back"
            yield LocalMessage(
                way=way, link=link, chunks=tuple(chunks), update=message.update * back, late=late * back
            )


def with_updates(program: LocalProgram, plan: BucketPlan) -> LocalProgram:
    """The program with a bucket plan's updates and with its messages in the order in which they are sent.

    Training steps are counted from the plan's first batch.
    """
    begin = plan.updates[0].first
    updates = tuple(Update(first=u.first - begin, last=u.last - begin, at=u.at - begin) for u in plan.updates)
    messages = tuple(sorted(program.messages, key=lambda m: m.late))
    return replace(program, messages=messages, period=plan.period, updates=updates)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
