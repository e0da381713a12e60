"""Checks that a local program is sound.

- Every value arrives in the layout in which it is read.
- Every partial sum and every gradient is reduced exactly once.
- Every reshard step sends whole shards, so that no device waits for data that no device sends.
- The derivative of an op that is not linear is taken at the values of its operands.
- Messages send every byte of what they carry exactly once, and none waits for a later one. Gradients that are applied
  in later steps are sent once for each update, before it is applied.

All devices run one program, and the values that decide a branch or the end of a loop are replicated. So all devices
reach the same reshard steps in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from pase.errors import PaseError
from pase.ir.recompute import linear
from pase.local.exchange import exchange, nests
from pase.local.lower import between
from pase.local.types import (
    Extents,
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
from pase.tables.axis_layout import AxisLayout

__all__ = ["verify_program"]


def verify_program(program: LocalProgram) -> None:
    """Raises PaseError if the program is unsound. The error names the tensor and the reshard step, or the message."""
    for problem in _problems(program):
        raise PaseError(problem, where=f"local program of '{program.name}'")


def _problems(program: LocalProgram) -> Iterator[str]:
    """What is unsound about the program, as sentences."""
    read_layout: dict[int, AxisLayout] = {}
    gradient_layout: dict[int, AxisLayout] = {}
    for op in program.ops:
        for o in op.operands:
            if o.transfer is None:
                yield from _made_here(program, op, o.tensor, o.layout, o.constant)
            elif read_layout.setdefault(o.transfer, o.layout) != o.layout:
                yield f"{op.node} reads '{o.tensor}' in two layouts, but one transfer brings it"
            elif gradient_layout.setdefault(o.transfer, o.gradient) != o.gradient:
                yield f"gradients of '{o.tensor}' leave {op.node} in two layouts, but one transfer takes them back"
    for k, t in enumerate(program.transfers):
        if k not in read_layout:
            yield f"no op reads '{t.tensor}' after its transfer to {t.dst}"
            continue
        made = program.result(t.tensor)
        for m in (*t.forward, *(t.backward or ())):
            yield from _sendable(t, m, made.shape, program.mesh)
        # A transfer that never runs forward must have no forward steps.
        yield from _chain(t, t.forward, made.layout, read_layout[k] if t.runs[0] else made.layout)
        if t.backward is not None:
            yield from _chain(t, t.backward, gradient_layout[k], made.gradient)
    yield from _derivatives(program)
    try:
        check_updates(program.updates, program.period, "its schedule")
    except PaseError as e:
        yield str(e)
        return
    yield from _messages(program)


def _derivatives(program: LocalProgram) -> Iterator[str]:
    """Checks that no op that is not linear reads summands, or has its derivative taken at zeros.

    A derivative is taken at the values that the op reads, unless the gradient of its result is split further than the
    result. Then it is taken at the gradient carriers of a parameter (``GradientCarrier``) and of the values that ops of
    the parameter's node make of it.
    """
    carried: set[str] = set()  # tensors whose gradient is taken at a gradient carrier
    zeros: set[str] = set()  # those of them whose carrier holds zeros instead of the value
    for op in program.ops:
        where = f"'{op.op.name}' at {op.op.source}"
        nonlinear = not linear(op.op, [o.tensor for o in op.operands if o.constant])
        for o in op.operands:
            if nonlinear and "partial" in o.layout:
                yield f"{where} is not linear, but reads partial values of '{o.tensor}'"
        made_here = [o for o in op.operands if o.transfer is None and not o.constant]
        for r in op.results:
            if r.layout.summed == r.gradient.summed and not any(o.tensor in carried for o in made_here):
                continue
            carried.add(r.tensor)
            if op.op.kind == "parameter":
                if r.gradient_carrier == "zeros":
                    zeros.add(r.tensor)
                elif not all(m.free for m in between(r.layout, r.gradient, program.mesh)):
                    yield (
                        f"the gradient of '{r.tensor}' is kept as {r.gradient}, but that part of the value lies on "
                        f"other devices: the value is kept as {r.layout}"
                    )
                continue
            if not_carried := [o.tensor for o in op.operands if o.tensor not in carried]:
                yield (
                    f"the gradient of {where} has another layout than its result, and no device has '{not_carried[0]}' "
                    f"in that layout"
                )
            if at_zeros := [o.tensor for o in made_here if o.tensor in zeros]:
                zeros.add(r.tensor)
                if nonlinear:
                    yield (
                        f"{where} is not linear, and its derivative would be taken at zeros instead of the value of "
                        f"'{at_zeros[0]}'"
                    )


def _messages(program: LocalProgram) -> Iterator[str]:
    """Checks that messages carry every byte exactly once for each update, one reshard step of a transfer after the
    other, and that each message starts before anything needs what it brings.

    A message's ``way`` is "there" (forward) or "back" (gradients). A chunk's ``stage`` is the number of a reshard step.
    """
    sent: dict[tuple[TransferPart, TransferDirection, int], list[tuple[int, MessageChunk]]] = {}
    for i, m in enumerate(program.messages):
        yield from _in_time(program, i, m)
        for p in m.chunks:
            if not 0 <= p.stage < len(program.stages(p.transfer, m.way)):
                yield f"message {i} ({m.way}) carries step {p.stage} of transfer {p.transfer}, which does not exist"
                return
            sent.setdefault((p.part, m.way, m.update), []).append((i, p))
        yield from _joinable(program, i, m)
        if m.after and (m.way == "back" or not program.can_wait(i, m.after)):
            yield (
                f"message {i} waits for '{m.after}', which begins too late: this message or a later one on its link is "
                f"needed before"
            )
    delayed_parts = {(part, u) for part, way, u in sent if way == "back"} if program.delayed else set()
    yield from _every_update(program, delayed_parts)
    for ((number, iteration), way, update), chunks in sent.items():
        what, last = f"'{program.transfers[number].tensor}' ({way})", (0, -1)
        what += (
            f" of iteration {iteration}" * (iteration is not None) + f" for update {update}" * program.delayed
        )
        for stage, step in enumerate(program.stages(number, way)):
            mine = sorted((p.begin, p.nbytes, i) for i, p in chunks if p.stage == stage)
            ends = [0, *(begin + nbytes for begin, nbytes, _ in mine)]
            if [begin for begin, *_ in mine] != ends[:-1] or ends[-1] != step.nbytes:
                yield f"messages do not carry each byte of step {stage} of {what} exactly once"
            when = [(program.messages[i].late, i) for *_, i in mine]
            if when and min(when) <= last:
                yield f"message {last[1]} carries a step of {what}, but no later message carries the next step"
            last = max([last, *when])


def _in_time(program: LocalProgram, i: int, m: LocalMessage) -> Iterator[str]:
    """Checks that a message belongs to an update, and is sent before that update is applied.

    ``late``, ``at`` and ``last`` count training steps (see ``LocalMessage`` and ``Update``).
    """
    if not 0 <= m.update < len(program.updates):
        yield f"message {i} is for update {m.update}, but there are only {len(program.updates)} updates"
    elif m.late > program.updates[m.update].at - program.updates[m.update].last + 1:
        yield f"message {i} is sent after update {m.update} is applied, whose gradients it carries"
    if m.way == "there" and (m.update or m.late):
        yield f"message {i} carries no gradient, so it cannot be late or belong to update {m.update}"
    if program.delayed and m.after:
        yield f"message {i} waits for '{m.after}', but messages are sent outside of the step's computation"


def _every_update(program: LocalProgram, sent: set[tuple[TransferPart, int]]) -> Iterator[str]:
    """Checks that a gradient that waits for later training steps is sent for every update and every iteration of its
    loop. sent: the gradients that messages carry, each with the number of an update."""
    transfers = {number for (number, _), _ in sent}
    for number in sorted(transfers):
        runs = round(program.runs(number, "back"))
        iterations: list[int | None] = [None] if runs == 1 else [*range(runs)]
        wanted = {((number, iteration), u) for iteration in iterations for u in range(len(program.updates))}
        if wanted != {(part, u) for part, u in sent if part[0] == number}:
            what = program.transfers[number].tensor
            yield f"messages do not carry '{what}' exactly once for every update and iteration of its loop"


def _joinable(program: LocalProgram, i: int, m: LocalMessage) -> Iterator[str]:
    """Checks that a message is one collective: all of one kind, over the same axes, run equally often."""
    steps = [program.stages(p.transfer, m.way)[p.stage] for p in m.chunks]
    if len({(step.kind, step.axes) for step in steps}) != 1:
        yield f"message {i} joins collectives of different kinds or axes, or is empty"
    if program.delayed:  # gradients of all loops wait until the end of the step, so they may be joined
        return
    if len({op.op.loops for p in m.chunks for op in program.users(p.transfer)}) != 1:
        yield f"message {i} joins transfers that are read in different loops"
    if len({program.runs(p.transfer, m.way) for p in m.chunks}) != 1:
        yield f"message {i} joins reshard steps that do not run equally often"


def _made_here(
    program: LocalProgram, op: LocalOp, tensor: str, layout: AxisLayout, constant: bool
) -> Iterator[str]:
    """Checks that a tensor from an op of the same node is read in the layout in which it is made."""
    if constant:
        return
    made = program.maker.get(tensor)
    if made is None or made.node != op.node:
        yield f"{op.node} reads '{tensor}', but neither an op of this node nor a transfer provides it"
    elif program.result(tensor).layout != layout:
        yield f"'{tensor}' is made as {program.result(tensor).layout}, but {op.node} reads it as {layout}"


def _chain(
    t: LocalTransfer, steps: tuple[LocalReshardStep, ...], start: AxisLayout, end: AxisLayout
) -> Iterator[str]:
    """Checks that the reshard steps of a transfer form a chain from one layout to another.

    t: the transfer. steps: its forward steps, or those of its gradient.
    """
    now = start
    for m in steps:
        if m.before != now:
            yield f"{m.kind} of '{t.tensor}' for {t.dst} starts from {m.before}, but the layout there is {now}"
        yield from _step(t, m)
        now = m.after
    if now != end:
        yield f"'{t.tensor}' arrives at {t.dst} (or its gradient from there) as {now}, but must arrive as {end}"


def _sendable(t: LocalTransfer, m: LocalReshardStep, shape: Extents, mesh: Mesh) -> Iterator[str]:
    """Checks that a reshard step says which device sends what to which: it sends only whole digits, or every device
    sends as much as it receives. All-reduces, and steps that make a value partial, need no such check."""
    try:
        if m.kind not in ("all_reduce", "own") and not nests(m, shape, mesh):
            exchange(m, shape, mesh)
    except PaseError as e:
        yield f"{m.kind} of '{t.tensor}' for {t.dst} over {', '.join(m.axes)}: {e.what}"


def _step(t: LocalTransfer, m: LocalReshardStep) -> Iterator[str]:
    """Checks the axes that a reshard step changes: only sums reduce partial axes, and they reduce all axes that they
    run over; only 'own' makes a value partial."""
    reduces, makes_partial = m.kind in ("all_reduce", "reduce_scatter"), m.kind == "own"
    changed = [i for i, (a, b) in enumerate(zip(m.before, m.after, strict=True)) if a != b]
    for i in changed:
        if (m.before[i] == "partial") != reduces:
            yield f"{m.kind} of '{t.tensor}' for {t.dst} starts from an axis that is {m.before[i] or 'replicated'}"
        if (m.after[i] == "partial") != makes_partial:
            yield f"{m.kind} of '{t.tensor}' for {t.dst} ends with an axis that is {m.after[i] or 'replicated'}"
    if len(changed) != len(m.axes):
        yield f"{m.kind} of '{t.tensor}' for {t.dst} over {', '.join(m.axes)} changes {len(changed)} axes"
