"""Checks a local program: every value arrives in the layout in which it is read, every partial sum and every gradient
is reduced exactly once, and every move sends whole shards, so that no device waits for data that none sends. An op that
is not linear has its operands' values where its derivative is taken. Messages send every byte of what they carry once,
and none waits for a later one; for gradients that are applied in later steps, once for each update, and before it.

All devices run one program, and the values that decide a branch or the end of a loop are replicated. So all devices
reach the same moves in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from pase.errors import PaseError
from pase.ir.recompute import linear
from pase.local.exchange import exchange, nests
from pase.local.lower import between
from pase.local.types import (
    Extents,
    Layout,
    LocalMessage,
    LocalOp,
    LocalProgram,
    LocalReshardStep,
    LocalTransfer,
    MessageChunk,
    TransferDirection,
    TransferPart,
)
from pase.machine import Mesh
from pase.schedule.plan import check_updates

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
    yield from _derivatives(program)
    try:
        check_updates(program.updates, program.period, "its schedule")
    except PaseError as e:
        yield str(e)
        return
    yield from _messages(program)


def _derivatives(program: LocalProgram) -> Iterator[str]:
    """Ops that are not linear read no summands, and the derivative of none is taken at zeros.

    A derivative is taken at the values that the op reads, unless the gradient of its result is split further: then at
    the carriers of a parameter (``Carrier``), and of what ops of the parameter's node make of it.
    """
    carried: set[str] = set()
    zeros: set[str] = set()
    for op in program.ops:
        where = f"'{op.op.name}' at {op.op.source}"
        curved = not linear(op.op, [o.tensor for o in op.operands if o.constant])
        for o in op.operands:
            if curved and "partial" in o.layout:
                yield f"{where} reads summands of '{o.tensor}', and it is not linear"
        inside = [o for o in op.operands if o.transfer is None and not o.constant]
        for r in op.results:
            if _split(r.layout) == _split(r.gradient) and not any(o.tensor in carried for o in inside):
                continue
            carried.add(r.tensor)
            if op.op.kind == "parameter":
                if r.gradient_carrier == "zeros":
                    zeros.add(r.tensor)
                elif not all(m.free for m in between(r.layout, r.gradient, program.mesh)):
                    yield (
                        f"the gradient of '{r.tensor}' is kept as {r.gradient}, and that part of the value lies on "
                        f"other devices, which hold it as {r.layout}"
                    )
                continue
            if alone := [o.tensor for o in op.operands if o.tensor not in carried]:
                yield f"{where} has a gradient in another layout than its result, and nothing has '{alone[0]}' there"
            if at_zeros := [o.tensor for o in inside if o.tensor in zeros]:
                zeros.add(r.tensor)
                if curved:
                    yield (
                        f"{where} is not linear, and its derivative would be taken at zeros instead of the value of "
                        f"'{at_zeros[0]}'"
                    )


def _split(layout: Layout) -> Layout:
    """The axes that split it; summands have the shape of the sum."""
    return tuple(s if isinstance(s, tuple) else None for s in layout)


def _messages(program: LocalProgram) -> Iterator[str]:
    """Messages carry every byte of what they carry once for each update, stage after stage, and start before anything
    needs them."""
    sent: dict[tuple[TransferPart, TransferDirection, int], list[tuple[int, MessageChunk]]] = {}
    for i, m in enumerate(program.messages):
        yield from _in_time(program, i, m)
        for p in m.chunks:
            if not 0 <= p.stage < len(program.stages(p.transfer, m.way)):
                yield f"message {i} carries a move {p.stage} {m.way} of transfer {p.transfer}, which sends no such one"
                return
            sent.setdefault((p.part, m.way, m.update), []).append((i, p))
        yield from _joinable(program, i, m)
        if m.after and (m.way == "back" or not program.can_wait(i, m.after)):
            yield f"message {i} waits for '{m.after}', which does not begin before what it or its link brings is read"
    waiting = {(part, u) for part, way, u in sent if way == "back"} if program.delayed else set()
    yield from _every_update(program, waiting)
    for ((number, iteration), way, update), chunks in sent.items():
        what, last = f"'{program.transfers[number].tensor}' {way}", (0, -1)
        what += f" of turn {iteration}" * (iteration is not None) + f" for update {update}" * program.delayed
        for stage, step in enumerate(program.stages(number, way)):
            mine = sorted((p.begin, p.nbytes, i) for i, p in chunks if p.stage == stage)
            ends = [0, *(begin + nbytes for begin, nbytes, _ in mine)]
            if [begin for begin, *_ in mine] != ends[:-1] or ends[-1] != step.nbytes:
                yield f"messages do not carry each byte of move {stage} of {what} once"
            when = [(program.messages[i].late, i) for *_, i in mine]
            if when and min(when) <= last:
                yield f"message {last[1]} carries a move of {what}, and a message before or beside it the next one"
            last = max([last, *when])


def _in_time(program: LocalProgram, i: int, m: LocalMessage) -> Iterator[str]:
    """It belongs to an update, and is sent before the forward that follows it."""
    if not 0 <= m.update < len(program.updates):
        yield f"message {i} is for update {m.update}, and there are {len(program.updates)}"
    elif m.late > program.updates[m.update].at - program.updates[m.update].last + 1:
        yield f"message {i} is sent after update {m.update} is applied, whose gradients it carries"
    if m.way == "there" and (m.update or m.late):
        yield f"message {i} is no gradient's, so it cannot be late or of update {m.update}"
    if program.delayed and m.after:
        yield f"message {i} waits for '{m.after}', where messages are sent outside of the step's computation"


def _every_update(program: LocalProgram, sent: set[tuple[TransferPart, int]]) -> Iterator[str]:
    """What waits for later steps does so in every update, of every turn of its loop."""
    waiting = {number for (number, _), _ in sent}
    for number in sorted(waiting):
        runs = round(program.runs(number, "back"))
        iterations: list[int | None] = [None] if runs == 1 else [*range(runs)]
        wanted = {((number, iteration), u) for iteration in iterations for u in range(len(program.updates))}
        if wanted != {(part, u) for part, u in sent if part[0] == number}:
            what = program.transfers[number].tensor
            yield f"messages do not carry '{what}' in every update, each turn of its loop once"


def _joinable(program: LocalProgram, i: int, m: LocalMessage) -> Iterator[str]:
    """One collective: of one kind, over the same axes, run equally often."""
    steps = [program.stages(p.transfer, m.way)[p.stage] for p in m.chunks]
    if len({(step.kind, step.axes) for step in steps}) != 1:
        yield f"message {i} joins collectives of several kinds, or none"
    if program.delayed:  # what waits for a later step is there at its end, from all loops
        return
    if len({op.op.loops for p in m.chunks for op in program.users(p.transfer)}) != 1:
        yield f"message {i} joins what is read in different loops"
    if len({program.runs(p.transfer, m.way) for p in m.chunks}) != 1:
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


def _way(t: LocalTransfer, steps: tuple[LocalReshardStep, ...], start: Layout, end: Layout) -> Iterator[str]:
    """The moves form a chain from one layout to another."""
    now = start
    for m in steps:
        if m.before != now:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} starts from {m.before}, and there is {now}"
        yield from _step(t, m)
        now = m.after
    if now != end:
        yield f"'{t.tensor}' arrives at {t.dst} (or its gradient from there) as {now}, and is wanted as {end}"


def _sendable(t: LocalTransfer, m: LocalReshardStep, shape: Extents, mesh: Mesh) -> Iterator[str]:
    """Sources and targets are well defined: only whole digits move, or every device sends as much as it receives."""
    try:
        if m.kind not in ("all_reduce", "own") and not nests(m, shape, mesh):
            exchange(m, shape, mesh)
    except PaseError as e:
        yield f"a {m.kind} of '{t.tensor}' for {t.dst}: {e}"


def _step(t: LocalTransfer, m: LocalReshardStep) -> Iterator[str]:
    """Only a sum reduces a partial axis, namely those that it runs over; only 'own' makes a value partial."""
    reduces, begins = m.kind in ("all_reduce", "reduce_scatter"), m.kind == "own"
    changed = [i for i, (a, b) in enumerate(zip(m.before, m.after, strict=True)) if a != b]
    for i in changed:
        if (m.before[i] == "partial") != reduces:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} over what is {m.before[i] or 'whole'}"
        if (m.after[i] == "partial") != begins:
            yield f"a {m.kind} of '{t.tensor}' for {t.dst} leaves what is {m.after[i] or 'whole'}"
    if len(changed) != len(m.axes):
        yield f"a {m.kind} of '{t.tensor}' for {t.dst} over {', '.join(m.axes)} changes {len(changed)} axes"
