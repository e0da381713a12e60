"""Lists the collectives that a local program sends. The list equals the plan's, without prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pase.local.types import LocalProgram, LocalReshardStep, LocalTransfer, NodeCollective
from pase.tables.work import Phase

__all__ = ["ProgramCollective", "program_collectives"]


@dataclass(frozen=True, kw_only=True)
class ProgramCollective(NodeCollective):
    """A collective of a training step.

    node: the node that the plan charges for it (for a transfer, the reader). source: the node that its data comes from.
    """

    node: str
    source: str


def program_collectives(program: LocalProgram) -> Iterator[ProgramCollective]:
    """Every collective of a training step, in the order of ``pase.tables.itemize.collectives``."""
    arriving: dict[str, list[LocalTransfer]] = {}
    for t in program.transfers:
        arriving.setdefault(t.dst, []).append(t)
    last = ""
    for op in program.ops:
        if op.node != last:
            last = op.node
            for t in arriving.get(last, ()):
                yield from _collectives(t, t.phase, t.forward, t.runs[0])
                yield from _collectives(t, "backward", t.backward or (), t.runs[1])
        for s in op.sent:
            yield ProgramCollective(
                kind=s.kind,
                axes=s.axes,
                nbytes=s.nbytes,
                tensor=s.tensor,
                phase=s.phase,
                times=s.times,
                node=op.node,
                source=op.node,
            )


def _collectives(
    t: LocalTransfer, phase: Phase, steps: tuple[LocalReshardStep, ...], times: float
) -> Iterator[ProgramCollective]:
    for m in steps:
        if m.kind != "slice" and m.kind != "own" and m.nbytes:
            yield ProgramCollective(
                kind=m.kind,
                axes=m.axes,
                nbytes=m.nbytes,
                tensor=t.tensor,
                phase=phase,
                times=round(times),
                node=t.dst,
                source=t.src,
            )
