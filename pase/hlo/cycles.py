"""Sums the compiler's cycle estimates of a program compiled for TPU, multiplied by the trip counts of its loops.

>>> text = '''HloModule m
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %p = f32[8]{0} parameter(0)
...   ROOT %c = f32[8]{0} copy(%p), backend_config={"window_config":{"estimated_cycles":"70"}}
... }'''
>>> cycles(text).total
70

XLA for TPU writes ``estimated_cycles`` on the ops that it tiles: matrix products (including those that overlap with a
collective), fusions and copies. It writes no estimate for a collective that overlaps with nothing, although the step
waits for it. ``waiting`` lists these collectives; a caller who knows the links can price them. (Observed with libtpu
0.0.40 and 0.0.51.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pase.errors import PaseError
from pase.hlo.collectives import HloCollective, collectives
from pase.hlo.loops import trip_count
from pase.hlo.module import Computation, Instruction, Module, XlaProgram, modules
from pase.machine.types import Mesh

__all__ = ["Cycles", "Estimated", "cycles"]


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """One scheduled op: cycles per execution, and executions per step (``times``)."""

    name: str
    computation: str
    cycles: int
    times: int


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """The compiler's estimates for one step."""

    ops: tuple[Estimated, ...]
    waiting: tuple[HloCollective, ...]
    """Exposed collectives: nothing overlaps with them, and the compiler estimates no cycles for them."""
    hidden: tuple[HloCollective, ...]
    """Collectives that overlap with matrix products. The cycles of those products include any remaining wait."""
    trips_known: bool
    """False if the trip count of some loop is unknown; that loop is then counted as one iteration."""

    @property
    def total(self) -> int:
        return sum(op.cycles * op.times for op in self.ops)


def cycles(compiled: str | XlaProgram, mesh: Mesh | None = None) -> Cycles:
    """Returns the cycle estimates of a program compiled for TPU. ``mesh`` is as in ``collectives``.

    Raises PaseError if the text is not compiled HLO, or has no estimates (for example, from another platform).
    """
    ops: list[Estimated] = []
    alone: set[tuple[str, str]] = set()
    known = True
    for module in modules(compiled):
        for computation, times, sure in _scheduled(module, module.entry, 1, True):
            known = known and sure
            for i in computation.instructions.values():
                noted = None if i.opcode == "while" else i.noted("estimated_cycles")
                if noted is not None:
                    ops.append(
                        Estimated(name=i.name, computation=computation.name, cycles=int(noted), times=times)
                    )
                alone |= set(_standing(module, computation, i))
    if not ops:
        raise PaseError(
            "no op of this program has estimated_cycles, which only XLA for TPU records",
            fix="compile the program for TPU",
        )
    found = collectives(compiled, mesh)
    return Cycles(
        ops=tuple(ops),
        waiting=tuple(c for c in found if (c.computation, c.name) in alone),
        hidden=tuple(c for c in found if (c.computation, c.name) not in alone),
        trips_known=known,
    )


def _scheduled(
    module: Module, computation: Computation, times: int, known: bool
) -> Iterator[tuple[Computation, int, bool]]:
    """Yields each computation whose instructions run in sequence, its executions per step, and whether that is known.

    All branches of a conditional are yielded.
    """
    yield computation, times, known
    for i in computation.instructions.values():
        if i.opcode not in ("while", "call", "conditional"):
            continue
        trips = trip_count(module, computation, i) if i.opcode == "while" else 1
        for callee in module.called(i):
            yield from _scheduled(
                module, callee, times * (1 if trips is None else trips), known and trips is not None
            )


def _standing(module: Module, computation: Computation, i: Instruction) -> Iterator[tuple[str, str]]:
    """Yields (computation, name) of the instruction, or of a fusion's contents, if nothing overlaps with them."""
    if i.opcode == "fusion":
        (callee,) = module.called(i)
        inside = callee.instructions.values()
        if not any(_overlaps(other) for other in inside):
            yield from ((callee.name, other.name) for other in inside)
    elif not i.opcode.endswith(("-start", "-done")):
        yield computation.name, i.name


def _overlaps(i: Instruction) -> bool:
    return i.custom_call_target.startswith("AsyncCollective")
