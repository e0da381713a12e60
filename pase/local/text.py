"""A local program for people to read: a line an op, and under it a line each thing that is sent for it.

A layout names, per tensor dim, the axes that split it (``a/4``: into four blocks in all), then ``+a`` where it is
partial over an axis.
"""

from __future__ import annotations

from collections.abc import Iterator

from pase.local.types import (
    Layout,
    LocalMove,
    LocalOp,
    LocalProgram,
    LocalTensor,
    LocalTransfer,
    digits_of,
    local_shape,
)
from pase.machine import Mesh

__all__ = ["program_text"]


def program_text(program: LocalProgram) -> str:
    """The whole program, in the order of the graph."""
    mesh = " × ".join(f"{n}={s}" for n, s in zip(program.mesh.names, program.mesh.sizes, strict=True))
    return "\n".join([f"local program of {program.name} on {mesh}", *_lines(program)]) + "\n"


def _lines(program: LocalProgram) -> Iterator[str]:
    last, told = "", set()
    for op in program.ops:
        if op.node != last:
            last = op.node
            yield f"{op.node}:"
        for o in op.operands:
            if o.transfer is not None and o.transfer not in told:
                told.add(o.transfer)
                yield from _transfer(program.transfers[o.transfer])
        yield f"  {_op(op, program.mesh)}"
        for s in op.sent:
            yield f"    {s.phase}: {s.kind} {s.tensor} over {' '.join(s.axes)}, {s.nbytes:,} B × {s.times}"


def _transfer(t: LocalTransfer) -> Iterator[str]:
    for word, moves, times in (("<-", t.forward, t.runs[0]), ("->", t.backward or (), t.runs[1])):
        if moves:
            yield f"  {word} {t.tensor} of {t.src}: {'; '.join(map(_move, moves))} × {times:g}"


def _move(m: LocalMove) -> str:
    return f"{m.kind} {' '.join(m.axes)}" + (f" {m.nbytes:,} B" if m.nbytes else "")


def _op(op: LocalOp, mesh: Mesh) -> str:
    made, read = (", ".join(_tensor(v, mesh) for v in values) for values in (op.results, op.operands))
    return f"{made or '()'} = {op.op.name}({read})"


def _tensor(value: LocalTensor, mesh: Mesh) -> str:
    sizes = " ".join(
        str(n) if (split := _split(value.layout, dim, mesh)) == "" else f"{n}{split}"
        for dim, n in enumerate(local_shape(value.shape, value.layout, mesh))
    )
    partial = "".join(f" +{name}" for name, s in zip(mesh.names, value.layout, strict=True) if s == "partial")
    return f"{value.tensor}[{sizes}{partial}]"


def _split(layout: Layout, dim: int, mesh: Mesh) -> str:
    held = sorted((blocks, axis) for axis, blocks in digits_of(layout, dim))
    return "".join(f":{mesh.names[axis]}/{blocks}" for blocks, axis in held)
