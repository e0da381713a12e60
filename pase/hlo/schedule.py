"""Follows the schedule of a compiled program: its kernels one after the other, and the collectives beside them.

XLA orders the instructions of a step, and starts a collective some instructions before it waits for it. Each kernel and
each collective gets the seconds that the caller says it takes. Kernels run one after the other. A collective runs from
its start, or from the end of the one before it, and its ``-done`` waits for its end.

>>> text = '''HloModule m, is_scheduled=true, num_partitions=2
... %add (a: f32[], b: f32[]) -> f32[] {
...   %a = f32[] parameter(0)
...   %b = f32[] parameter(1)
...   ROOT %sum = f32[] add(%a, %b)
... }
... ENTRY %main (p: f32[8], q: f32[8]) -> (f32[8], f32[8]) {
...   %p = f32[8]{0} parameter(0)
...   %q = f32[8]{0} parameter(1)
...   %s = f32[8]{0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add
...   %beside = f32[8]{0} negate(%q)
...   %d = f32[8]{0} all-reduce-done(%s)
...   ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%d, %beside)
... }'''
>>> step = scheduled(text, kernel_s=lambda kernel: 2.0, collective_s=lambda c: 5.0)
>>> step.seconds, step.kernels, step.waited_s, step.overlapped
(5.0, 1, 3.0, {'all_reduce': 1.0})
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pase.errors import PaseError
from pase.hlo.collectives import HloCollective, HloKind, collectives
from pase.hlo.kernels import HloKernel, kernel_of
from pase.hlo.loops import trip_count
from pase.hlo.module import Computation, Instruction, Module, XlaProgram, modules
from pase.machine.types import Mesh

__all__ = ["ScheduledCollective", "ScheduledStep", "scheduled"]


@dataclass(frozen=True, kw_only=True)
class ScheduledCollective:
    """A collective and what is beside it. seconds: of one execution."""

    collective: HloCollective
    seconds: float
    kernels_beside: int
    """How many kernels run between its start and the wait for its end; 0 if nothing overlaps with it."""


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """A step as its compiled program runs it. seconds: of the whole step. kernels_s: of its kernels alone.

    waited_s: the part of a step in which no kernel runs because it waits for a collective.
    """

    seconds: float
    kernels: int
    kernels_s: float
    waited_s: float
    collectives: tuple[ScheduledCollective, ...]
    trips_known: bool
    """False if the trip count of some loop is unknown; that loop is then counted as one iteration."""

    @property
    def overlapped(self) -> dict[HloKind, float]:
        """For each kind of collective, the share of its bytes that has kernels between start and done."""
        whole: dict[HloKind, int] = {}
        beside: dict[HloKind, int] = {}
        for s in self.collectives:
            c = s.collective
            if c.group_size > 1:
                whole[c.kind] = whole.get(c.kind, 0) + c.bytes * c.count
                beside[c.kind] = beside.get(c.kind, 0) + c.bytes * c.count * (s.kernels_beside > 0)
        return {k: beside[k] / n if n else 1.0 for k, n in whole.items()}


def scheduled(
    compiled: str | XlaProgram,
    *,
    kernel_s: Callable[[HloKernel], float],
    collective_s: Callable[[HloCollective], float],
    mesh: Mesh | None = None,
) -> ScheduledStep:
    """The step of a compiled program, in the order in which the compiler scheduled it.

    kernel_s: seconds of one execution of a kernel. collective_s: seconds of one execution of a collective. mesh: as in
    ``collectives``. Of the branches of a conditional, the slowest is counted. Raises PaseError if the text is not
    compiled HLO.
    """
    found = collectives(compiled, mesh)
    walk = _ScheduleWalk(
        kernel_s=kernel_s,
        of={
            (c.computation, c.name): ScheduledCollective(
                collective=c, seconds=collective_s(c), kernels_beside=0
            )
            for c in found
        },
    )
    parts = []
    for module in modules(compiled):
        walk.module = module
        parts.append(walk.run(module.entry))
    whole = _ScheduledPart.sum(parts)
    return ScheduledStep(
        seconds=whole.seconds,
        kernels=whole.kernels,
        kernels_s=whole.kernels_s,
        waited_s=whole.seconds - whole.kernels_s,
        collectives=tuple(walk.of.values()),
        trips_known=whole.trips_known,
    )


@dataclass(frozen=True, kw_only=True)
class _ScheduledPart:
    """One execution of a computation."""

    seconds: float = 0.0
    kernels: int = 0
    kernels_s: float = 0.0
    trips_known: bool = True

    @staticmethod
    def sum(parts: list[_ScheduledPart]) -> _ScheduledPart:
        return _ScheduledPart(
            seconds=sum(p.seconds for p in parts),
            kernels=sum(p.kernels for p in parts),
            kernels_s=sum(p.kernels_s for p in parts),
            trips_known=all(p.trips_known for p in parts),
        )

    def times(self, n: int) -> _ScheduledPart:
        return replace(self, seconds=n * self.seconds, kernels=n * self.kernels, kernels_s=n * self.kernels_s)


@dataclass(kw_only=True)
class _ScheduleWalk:
    kernel_s: Callable[[HloKernel], float]
    of: dict[tuple[str, str], ScheduledCollective]
    """(computation, instruction) -> its collective."""
    module: Module | None = None

    def run(self, computation: Computation) -> _ScheduledPart:
        """One execution of a computation, with no collective under way at its start or at its end."""
        now, links_free, kernels = 0.0, 0.0, 0
        done: list[_ScheduledPart] = []
        under_way: dict[int, tuple[tuple[str, str], float, int]] = {}
        for i in computation.instructions.values():
            if (key := self._sends(computation, i)) is not None:
                links_free = max(now, links_free) + self.of[key].seconds
                if i.opcode.endswith("-start"):
                    under_way[i.id] = key, links_free, kernels
                else:
                    now = links_free
            elif i.opcode.endswith("-done") and i.operands and i.operands[0] in under_way:
                key, end, before = under_way.pop(i.operands[0])
                now = max(now, end)
                self.of[key] = replace(self.of[key], kernels_beside=kernels - before)
            else:
                part = self._part(computation, i)
                now += part.seconds
                kernels += part.kernels
                done.append(part)
        return replace(
            _ScheduledPart.sum(done), seconds=max([now, *(end for _, end, _ in under_way.values())])
        )

    def _sends(self, computation: Computation, i: Instruction) -> tuple[str, str] | None:
        """The collective that an instruction performs or starts, also inside of the computation that it wraps."""
        if (computation.name, i.name) in self.of:
            return computation.name, i.name
        if i.opcode == "async-start" or i.opcode == "fusion":
            assert self.module is not None
            for callee in self.module.called(i):
                for inner in callee.instructions.values():
                    if (callee.name, inner.name) in self.of:
                        return callee.name, inner.name
        return None

    def _part(self, computation: Computation, i: Instruction) -> _ScheduledPart:
        module = self.module
        assert module is not None
        if i.opcode == "while":
            trips = trip_count(module, computation, i)
            body, _ = (self.run(c) for c in module.called(i))  # the host counts the turns
            return replace(
                body.times(1 if trips is None else trips), trips_known=body.trips_known and trips is not None
            )
        if i.opcode in ("call", "async-start"):
            return _ScheduledPart.sum([self.run(c) for c in module.called(i)])
        if i.opcode == "conditional":
            return max(
                (self.run(c) for c in module.called(i)), key=lambda p: p.seconds, default=_ScheduledPart()
            )
        kernel = kernel_of(module, computation, i)
        if kernel is None:
            return _ScheduledPart()
        seconds = self.kernel_s(kernel)
        if not seconds >= 0:
            raise PaseError(f"the kernel '{i.name}' takes {seconds} s", where="kernel_s")
        return _ScheduledPart(seconds=seconds, kernels=1, kernels_s=seconds)
