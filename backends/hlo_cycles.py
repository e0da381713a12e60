"""Cycles in a program compiled for TPU: the compiler's own estimate for each op, loops counted as often as they turn.

>>> text = '''HloModule m
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %p = f32[8]{0} parameter(0)
...   ROOT %c = f32[8]{0} copy(%p), backend_config={"window_config":{"estimated_cycles":"70"}}
... }'''
>>> cycles(text).total
70

XLA for TPU notes ``estimated_cycles`` on the ops that it tiles: products, fusions, copies, and the products that a
collective runs beside. It notes none on a collective that stands alone in the schedule, and a step waits for those
just as well: ``waiting`` lists them, to be priced by who knows the links. (Seen with libtpu 0.0.40 and 0.0.51.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pase.backends import hlo_loops
from pase.backends.hlo import HloCollective, collectives
from pase.backends.hlo_text import Computation, Instruction, Module, parse_modules
from pase.errors import PaseError
from pase.frontends.jax_versions import Compiled, program_text
from pase.machine.types import Mesh

__all__ = ["Cycles", "Estimated", "cycles"]

_NOTED = re.compile(r'"estimated_cycles":\s*"?(\d+)')


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """One op of the schedule: cycles of one run, and how often a step runs it."""

    name: str
    computation: str
    cycles: int
    times: int


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """A step by the compiler's estimates."""

    ops: tuple[Estimated, ...]
    waiting: tuple[HloCollective, ...]
    """Collectives that nothing runs beside: no cycles are noted for them."""
    hidden: tuple[HloCollective, ...]
    """Collectives that products run beside: their cycles are those of the products, or of what is left to wait."""
    trips_known: bool
    """False where a loop's trips cannot be read: it then counts as one turn."""

    @property
    def total(self) -> int:
        return sum(op.cycles * op.times for op in self.ops)


def cycles(compiled: str | Compiled, mesh: Mesh | None = None) -> Cycles:
    """The cycles of a program compiled for TPU; ``mesh`` as in ``collectives``.

    Raises PaseError on text that is no compiled HLO, or that holds no estimates (another platform's, say).
    """
    text = program_text(compiled)
    ops: list[Estimated] = []
    alone: set[tuple[str, str]] = set()
    known = True
    for module in parse_modules(text):
        for computation, times, sure in _scheduled(module, module.entry, 1, True):
            known = known and sure
            for i in computation.instructions.values():
                noted = _NOTED.search(i.attributes)
                if noted is not None and i.opcode != "while":
                    ops.append(
                        Estimated(
                            name=i.name, computation=computation.name, cycles=int(noted[1]), times=times
                        )
                    )
                alone |= set(_standing(module, computation, i))
    if not ops:
        raise PaseError("no op of this program bears estimated_cycles: only XLA for TPU notes them")
    found = collectives(text, mesh)
    return Cycles(
        ops=tuple(ops),
        waiting=tuple(c for c in found if (c.computation, c.name) in alone),
        hidden=tuple(c for c in found if (c.computation, c.name) not in alone),
        trips_known=known,
    )


def _scheduled(module: Module, name: str, times: int, known: bool) -> Iterator[tuple[Computation, int, bool]]:
    """The computations whose instructions run one after another, and how often; of branches, all of them."""
    computation = module.computations[name]
    yield computation, times, known
    for i in computation.instructions.values():
        if i.opcode == "while":
            trips = hlo_loops.trip_count(module, name, i)
            turns = times * (1 if trips is None else trips)
            for callee in (i.attribute("body"), i.attribute("condition")):
                yield from _scheduled(module, (callee or "").lstrip("%"), turns, known and trips is not None)
        elif i.opcode in ("call", "conditional"):
            callees = [i.attribute(a) for a in ("to_apply", "branch_computations", "true_computation")]
            callees.append(i.attribute("false_computation"))
            for listed in callees:
                for callee in (listed or "").strip("{}").split(","):
                    if callee.strip():
                        yield from _scheduled(module, callee.strip().lstrip("%"), times, known)


def _standing(module: Module, computation: Computation, i: Instruction) -> Iterator[tuple[str, str]]:
    """(computation, name) of the collectives that this instruction is, or holds, with nothing beside them."""
    if i.opcode == "fusion":
        callee = (i.attribute("calls") or "").lstrip("%")
        inside = module.computations[callee].instructions
        if not any("AsyncCollective" in other.attributes for other in inside.values()):
            yield from ((callee, name) for name in inside)
    elif not i.opcode.endswith(("-start", "-done")):
        yield computation.name, i.name
