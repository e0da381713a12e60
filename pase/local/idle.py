"""A local program without what it says of mesh axes of size 1.

Along such an axis nothing is split, summed or sent. Strategies may still assign a dim to it, and then layouts name it,
and transfers have reshard steps over it that do nothing. A reader that asks whether a value is partial, or whether a
transfer changes it, would take a program on one device for one that sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pase.local.types import LocalOp, LocalProgram, LocalReshardStep, LocalTransfer
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout

__all__ = ["without_idle_axes"]


def without_idle_axes(program: LocalProgram) -> LocalProgram:
    """The same program, whose layouts are replicated along the axes of size 1, and which has no steps over them.

    Programs with messages stay as they are, because messages number a transfer's steps.
    """
    if program.messages or all(n > 1 for n in program.mesh.sizes):
        return program
    return replace(
        program,
        ops=tuple(_op(op, program.mesh) for op in program.ops),
        transfers=tuple(_transfer(t, program.mesh) for t in program.transfers),
    )


def _wide(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    return tuple(a for a in axes if mesh.sizes[mesh.names.index(a)] > 1)


def _layout(layout: AxisLayout, mesh: Mesh) -> AxisLayout:
    return AxisLayout(s if n > 1 else None for s, n in zip(layout, mesh.sizes, strict=True))


def _op(op: LocalOp, mesh: Mesh) -> LocalOp:
    return replace(
        op,
        operands=tuple(
            replace(
                o,
                layout=_layout(o.layout, mesh),
                gradient=_layout(o.gradient, mesh),
                summed=_wide(o.summed, mesh),
                halo=_wide(o.halo, mesh),
            )
            for o in op.operands
        ),
        results=tuple(
            replace(
                r,
                layout=_layout(r.layout, mesh),
                gradient=_layout(r.gradient, mesh),
                summed=_wide(r.summed, mesh),
            )
            for r in op.results
        ),
        sent=tuple(replace(s, axes=_wide(s.axes, mesh)) for s in op.sent if _wide(s.axes, mesh)),
    )


def _transfer(t: LocalTransfer, mesh: Mesh) -> LocalTransfer:
    backward = None if t.backward is None else _steps(t.backward, mesh)
    return replace(t, forward=_steps(t.forward, mesh), backward=backward)


def _steps(steps: Iterable[LocalReshardStep], mesh: Mesh) -> tuple[LocalReshardStep, ...]:
    return tuple(
        replace(
            s,
            axes=_wide(s.axes, mesh),
            before=_layout(s.before, mesh),
            after=_layout(s.after, mesh),
        )
        for s in steps
        if _wide(s.axes, mesh)
    )
