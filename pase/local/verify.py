"""Checks a local program: every value arrives in the layout in which it is read, every partial sum and every gradient
is reduced exactly once, and every move sends whole shards, so that no device waits for data that none sends. Messages
send every byte of what they carry once, and none waits for a later one.

All devices run one program, and the values that decide a branch or the end of a loop are replicated. So all devices
reach the same moves in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from pase.errors import PaseError
from pase.local.parts import pairs, view
from pase.local.types import (
    Extents,
    Layout,
    LocalMessage,
    LocalMove,
    LocalOp,
    LocalPiece,
    LocalProgram,
    LocalTransfer,
    MoveWay,
)
from pase.machine import Mesh

__all__ = ["verify_program"]


def verify_program(program: LocalProgram) -> None:
    """Raises PaseError if the program is unsound, naming the tensor and the move."""
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
    yield from _messages(program)


def _messages(program: LocalProgram) -> Iterator[str]:
    """Messages carry every byte of what they carry once, stage after stage, and start before anything needs them."""
    sent: dict[tuple[int, MoveWay], list[tuple[int, LocalPiece]]] = {}
    for i, m in enumerate(program.messages):
        for p in m.pieces:
            if not 0 <= p.stage < len(program.stages(p.transfer, m.way)):
                yield f"message {i} carries a move {p.stage} {m.way} of transfer {p.transfer}, which sends no such one"
                return
            sent.setdefault((p.transfer, m.way), []).append((i, p))
        yield from _joinable(program, i, m)
        if m.after and (m.way == "back" or not program.can_wait(i, m.after)):
            yield f"message {i} waits for '{m.after}', which does not begin before what it or its link brings is read"
    for (number, way), pieces in sent.items():
        what, last = f"'{program.transfers[number].tensor}' {way}", -1
        for stage, move in enumerate(program.stages(number, way)):
            mine = sorted((p.begin, p.nbytes, i) for i, p in pieces if p.stage == stage)
            ends = [0, *(begin + nbytes for begin, nbytes, _ in mine)]
            if [begin for begin, *_ in mine] != ends[:-1] or ends[-1] != move.nbytes:
                yield f"messages do not carry each byte of move {stage} of {what} once"
            elif min(i for *_, i in mine) <= last:
                yield f"message {last} carries a move of {what}, and a message before or beside it the next one"
            last = max([last, *(i for *_, i in mine)])


def _joinable(program: LocalProgram, i: int, m: LocalMessage) -> Iterator[str]:
    """One collective: of one kind, over the same axes, run equally often."""
    moves = [program.stages(p.transfer, m.way)[p.stage] for p in m.pieces]
    if len({(move.kind, move.axes) for move in moves}) != 1:
        yield f"message {i} joins collectives of several kinds, or none"
    if len({op.op.loops for p in m.pieces for op in program.users(p.transfer)}) != 1:
        yield f"message {i} joins what is read in different loops"
    if len({program.runs(p.transfer, m.way) for p in m.pieces}) != 1:
        yield f"message {i} joins moves that do not run equally often"


def _made_here(
    program: LocalProgram, op: LocalOp, tensor: str, layout: Layout, constant: bool
) -> Iterator[str]:
    """A tensor from an op of the same node is read in the layout in which it is made, and is no longer partial."""
    if constant:
        return
    made = program.maker.get(tensor)
    if made is None or made.node != op.node:
        yield f"'{tensor}' is read at {op.node}, where nothing brings it"
    elif program.result(tensor).layout != layout:
        yield f"'{tensor}' is made as {program.result(tensor).layout} and read as {layout} at {op.node}"


def _way(t: LocalTransfer, moves: tuple[LocalMove, ...], start: Layout, end: Layout) -> Iterator[str]:
    """The moves form a chain from one layout to another."""
    now = start
    for m in moves:
        if m.before != now:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} starts from {m.before}, and there is {now}"
        yield from _step(t, m)
        now = m.after
    if now != end:
        yield f"'{t.tensor}' arrives at {t.dst} (or its gradient from there) as {now}, and is wanted as {end}"


def _sendable(t: LocalTransfer, m: LocalMove, shape: Extents, mesh: Mesh) -> Iterator[str]:
    """Sources and targets are well defined: the digits that distinguish two layouts nest, only whole digits move."""
    try:
        if m.kind == "permute":
            pairs(m, shape, mesh)
        elif m.kind not in ("all_reduce", "own"):
            view(m, shape, mesh)
    except PaseError as e:
        yield f"a {m.kind} of '{t.tensor}' for {t.dst}: {e}"


def _step(t: LocalTransfer, m: LocalMove) -> Iterator[str]:
    """Only a sum reduces a partial axis, namely those that it runs over; only 'own' makes a value partial."""
    settles, begins = m.kind in ("all_reduce", "reduce_scatter"), m.kind == "own"
    moved = [i for i, (a, b) in enumerate(zip(m.before, m.after, strict=True)) if a != b]
    for i in moved:
        if (m.before[i] == "partial") != settles:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} over what is {m.before[i] or 'whole'}"
        if (m.after[i] == "partial") != begins:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} leaves what is {m.after[i] or 'whole'}"
    if len(moved) != len(m.axes):
        yield f"a {m.kind} of '{t.tensor}' for {t.dst} over {', '.join(m.axes)} changes {len(moved)} axes"
