"""What must hold of a local program: every value arrives as it is read, every partial sum is settled once and only
once, and so is every gradient; and every move hands on whole parts, so that no device waits for what none sends.

All devices run one program, and what decides a branch or a loop's end is read whole: they meet at the same moves in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from pase.errors import PaseError
from pase.local.parts import pairs, view
from pase.local.types import Extents, Layout, LocalMove, LocalOp, LocalProgram, LocalTransfer
from pase.machine import Mesh

__all__ = ["verify_program"]


def verify_program(program: LocalProgram) -> None:
    """PaseError where the program is unsound; it names the tensor and the move."""
    for problem in _problems(program):
        raise PaseError(f"local program of '{program.name}': {problem}")


def _problems(program: LocalProgram) -> Iterator[str]:
    read: dict[int, Layout] = {}
    left: dict[int, Layout] = {}
    for op in program.ops:
        for o in op.operands:
            if o.transfer is None:
                yield from _made_here(program, op, o.tensor, o.layout, o.constant)
            elif read.setdefault(o.transfer, o.layout) != o.layout:
                yield f"'{o.tensor}' is read in two layouts after one transfer, at {op.node}"
            elif left.setdefault(o.transfer, o.gradient) != o.gradient:
                yield f"gradients of '{o.tensor}' leave {op.node} in two layouts for one transfer"
    for k, t in enumerate(program.transfers):
        if k not in read:
            yield f"nobody reads '{t.tensor}' after its transfer to {t.dst}"
            continue
        made = program.result(t.tensor)
        for m in (*t.forward, *(t.backward or ())):
            yield from _sendable(t, m, made.shape, program.mesh)
        yield from _way(t, t.forward, made.layout, read[k] if t.runs[0] else made.layout)
        if t.backward is not None:
            yield from _way(t, t.backward, left[k], made.gradient)


def _made_here(
    program: LocalProgram, op: LocalOp, tensor: str, layout: Layout, constant: bool
) -> Iterator[str]:
    """A tensor that an op of the same node makes is read as it is made, and no longer partial."""
    if constant:
        return
    made = program.maker.get(tensor)
    if made is None or made.node != op.node:
        yield f"'{tensor}' is read at {op.node}, where nothing brings it"
    elif program.result(tensor).layout != layout:
        yield f"'{tensor}' is made as {program.result(tensor).layout} and read as {layout} at {op.node}"


def _way(t: LocalTransfer, moves: tuple[LocalMove, ...], start: Layout, end: Layout) -> Iterator[str]:
    """Moves that follow each other from one layout to another."""
    now = start
    for m in moves:
        if m.before != now:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} starts from {m.before}, and there is {now}"
        yield from _step(t, m)
        now = m.after
    if now != end:
        yield f"'{t.tensor}' arrives at {t.dst} (or its gradient from there) as {now}, and is wanted as {end}"


def _sendable(t: LocalTransfer, m: LocalMove, shape: Extents, mesh: Mesh) -> Iterator[str]:
    """Who sends what to whom can be said: the digits that two layouts tell apart nest, and whole ones change hands."""
    try:
        if m.kind == "permute":
            pairs(m, shape, mesh)
        elif m.kind not in ("all_reduce", "own"):
            view(m, shape, mesh)
    except PaseError as e:
        yield f"a {m.kind} of '{t.tensor}' for {t.dst}: {e}"


def _step(t: LocalTransfer, m: LocalMove) -> Iterator[str]:
    """A sum settles the axes that it goes over, nothing else does; nothing but 'own' makes a value partial."""
    settles, begins = m.kind in ("all_reduce", "reduce_scatter"), m.kind == "own"
    moved = [i for i, (a, b) in enumerate(zip(m.before, m.after, strict=True)) if a != b]
    for i in moved:
        if (m.before[i] == "partial") != settles:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} over what is {m.before[i] or 'whole'}"
        if (m.after[i] == "partial") != begins:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} leaves what is {m.after[i] or 'whole'}"
    if len(moved) != len(m.axes):
        yield f"a {m.kind} of '{t.tensor}' for {t.dst} over {', '.join(m.axes)} changes {len(moved)} axes"
