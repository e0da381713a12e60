"""Writes a local program as text, for people to read, and reads an equal program back (``program_from_text``).

    local program mlp on data=2 model=4
    copy t9 of t3
    node up
      move 0 t1 of params.up for up sum forward 1.0 1.0
        there all_gather data [data:0/2] [] 1024
        back reduce_scatter data [+data] [data:0/2] 1024
      matmul dot_general t2[b d], t1[d h] -> t3[b h] | flops=2.0
        read t2[4:data/2 16]
        read t1[16 8:model/4] gradient=[+data model:1/4] by=0
        make t3[4:data/2 8:model/4]
        send all_reduce data 512 t3 forward 1

Each op has a line in the form of ``pase.ir.text``. The lines below it list what one device reads, makes and sends for
the op (``joined``: how partial results are reduced, if not by a sum). A tensor is written with its local sizes. Each
size is followed by the axes that split the dim (``a/4``: into four blocks in total); ``+a`` marks a tensor that is
partial over an axis. A layout without sizes gives the dim and the blocks of each axis. ``zeros``: the gradient of this
parameter is taken at zeros instead of the parameter's value.

``move`` is a transfer. It is written before the first op that reads it, with its reshard steps there and back
(``stays``: no gradient comes back; ``once``: it is hoisted out of the loop over micro-batches). The two numbers are how
often a training step runs it forward and backward.

Under a schedule, messages are at the end, in the order in which each link sends them:

    message back network of 0.0[0+512] 3.0[0+1024]
    message there network after up of 5.0[512+512]

A chunk is TRANSFER.STAGE[FIRST BYTE+BYTES]. ``after``: the message does not start before that node has begun.
``pase.local.text_messages`` describes messages whose gradients are applied in later steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pase.errors import PaseError
from pase.ir.blocks import Hoisted
from pase.ir.text import MAX_CHARACTERS, MAX_LINE, TextLine, op_text, read_op, word_text
from pase.local.text_messages import message_text, read_message, read_updates, updates_text
from pase.local.types import (
    Combine,
    Extents,
    LocalMessage,
    LocalOp,
    LocalOperand,
    LocalProgram,
    LocalReshardKind,
    LocalReshardStep,
    LocalResult,
    LocalTensor,
    LocalTransfer,
    NodeCollective,
)
from pase.machine import CollectiveKind, Mesh
from pase.schedule.plan import Update
from pase.tables.axis_layout import AxisLayout, AxisState, Digit
from pase.tables.work import Phase

__all__ = ["program_from_text", "program_text"]

_AXIS = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}(?![\w.])", re.ASCII)
_TIMES = re.compile(r"\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?", re.ASCII)
_MAX_AXES = 32


def program_text(program: LocalProgram) -> str:
    """The program as text, in the order of the graph. PaseError if the name of an axis cannot be written."""
    mesh = program.mesh
    for name in mesh.names:
        if not _AXIS.fullmatch(name):
            raise PaseError(
                f"the axis name '{name}' cannot be written as text",
                where=f"local program of '{program.name}'",
                fix="use a name of at most 64 ASCII letters, digits and underscores that starts with no digit",
            )
    axes = " ".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.sizes, strict=True))
    out = [f"local program {word_text(program.name)} on {axes}"]
    out += [f"once {program.hoisted}"] if program.hoisted != "none" else []
    out += [updates_text(program)] if program.delayed else []
    out += [f"copy {word_text(t)} of {word_text(of)}" for t, of in program.originals.items()]
    return "\n".join([*out, *_Writer(mesh).lines(program)]) + "\n"


@dataclass(frozen=True)
class _Writer:
    mesh: Mesh

    def lines(self, program: LocalProgram) -> Iterator[str]:
        last, told = "", set()
        for op in program.ops:
            if op.node != last:
                last = op.node
                yield f"node {word_text(op.node)}"
            for o in op.operands:
                if o.transfer is not None and o.transfer not in told:
                    told.add(o.transfer)
                    yield from self.transfer(o.transfer, program.transfers[o.transfer])
            yield from self.op(op)
        for k, t in enumerate(program.transfers):
            if k not in told:
                yield from self.transfer(k, t)
        yield from map(message_text, program.messages)

    def transfer(self, number: int, t: LocalTransfer) -> Iterator[str]:
        names = f"{word_text(t.tensor)} of {word_text(t.src)} for {word_text(t.dst)}"
        stays = " stays" * (t.backward is None) + " once" * t.hoisted
        yield f"  move {number} {names} {t.combine} {t.phase} {t.runs[0]!r} {t.runs[1]!r}{stays}"
        for way, steps in (("there", t.forward), ("back", t.backward or ())):
            for m in steps:
                layouts = f"{self.layout(m.before)} {self.layout(m.after)}"
                yield f"    {way} {m.kind} {' '.join(m.axes)} {layouts} {m.nbytes}"

    def op(self, op: LocalOp) -> Iterator[str]:
        yield f"  {op_text(op.op)}"
        if op.combine != "sum":
            yield f"    joined {op.combine}"
        for o in op.operands:
            line = f"    read {self.tensor(o)}" + self.gradient(o)
            line += "" if o.transfer is None else f" by={o.transfer}"
            yield line + self.axes("summed", o.summed) + self.axes("halo", o.halo) + " constant" * o.constant
        for r in op.results:
            line = f"    make {self.tensor(r)}" + self.gradient(r) + self.axes("summed", r.summed)
            yield line + " zeros" * (r.gradient_carrier == "zeros")
        for s in op.sent:
            yield f"    send {s.kind} {' '.join(s.axes)} {s.nbytes} {word_text(s.tensor)} {s.phase} {s.times}"

    def gradient(self, value: LocalOperand | LocalResult) -> str:
        return "" if value.gradient == value.layout else f" gradient={self.layout(value.gradient)}"

    def axes(self, key: str, axes: Sequence[str]) -> str:
        return f" {key}=({' '.join(axes)})" if axes else ""

    def tensor(self, value: LocalTensor) -> str:
        parts = value.layout.local_shape(value.shape, self.mesh)
        sizes = [f"{n}{self.split(value.layout, dim)}" for dim, n in enumerate(parts)]
        return f"{word_text(value.tensor)}[{' '.join([*sizes, *self.partial(value.layout)])}]"

    def split(self, layout: AxisLayout, dim: int) -> str:
        return "".join(f":{self.mesh.names[axis]}/{blocks}" for blocks, axis in layout.along(dim))

    def partial(self, layout: AxisLayout) -> list[str]:
        return [f"+{name}" for name in layout.partial_axes(self.mesh)]

    def layout(self, layout: AxisLayout) -> str:
        split = [f"{self.mesh.names[axis]}:{d.dim}/{d.blocks}" for axis, d in layout.digits]
        return f"[{' '.join([*self.partial(layout), *split])}]"


def program_from_text(text: str) -> LocalProgram:
    """The program from the text that ``program_text`` writes. PaseError names the line and column of an error.

    Only the syntax is checked here; ``verify_program`` checks whether the program is sound.
    """
    if len(text) > MAX_CHARACTERS:
        raise PaseError(
            f"it has {len(text)} characters; at most {MAX_CHARACTERS} are read", where="local program text"
        )
    reader: _Reader | None = None
    for number, raw in enumerate(text.split("\n"), start=1):
        line = TextLine(raw, number, of="local program text")
        if line.at_end() or raw.lstrip().startswith("#"):
            continue
        if len(raw) > MAX_LINE:
            line.fail(f"the line has {len(raw)} characters; at most {MAX_LINE} are read")
        if reader is None:
            reader = _begun(line)
        else:
            reader.read(line)
        line.end()
    if reader is None:
        raise PaseError(
            "the text is empty",
            where="local program text line 1, column 1",
            fix="begin it with 'local program NAME on AXIS=SIZE'",
        )
    return reader.program()


def _begun(line: TextLine) -> _Reader:
    for word in ("local", "program"):
        line.expect(word)
    name = line.word("the program's name")
    line.expect("on")
    sizes: dict[str, int] = {}
    while not line.at_end():
        at = line.position
        axis = line.match(_AXIS)
        if axis is None or axis in sizes or len(sizes) == _MAX_AXES:
            line.fail(f"expected a new axis, of at most {_MAX_AXES}, found {line.next_shown()}", at)
        line.expect("=")
        at = line.position
        sizes[axis] = _number(line, "its size")
        if sizes[axis] < 1:
            line.fail("an axis must have at least one device", at)
    return _Reader(name=name, mesh=Mesh(names=tuple(sizes), sizes=tuple(sizes.values())))


def _number(line: TextLine, what: str) -> int:
    found = line.match(_NUMBER)
    if found is None:
        line.fail(f"expected {what}, found {line.next_shown()}")
    return int(found)


@dataclass(kw_only=True)
class _OpRead:
    """An op whose lines are being read."""

    head: LocalOp
    operands: list[LocalOperand] = field(default_factory=list)
    results: list[LocalResult] = field(default_factory=list)
    sent: list[NodeCollective] = field(default_factory=list)

    def whole(self) -> LocalOp:
        return replace(
            self.head, operands=tuple(self.operands), results=tuple(self.results), sent=tuple(self.sent)
        )


@dataclass(kw_only=True)
class _TransferRead:
    """A transfer whose lines are being read."""

    head: LocalTransfer
    there: list[LocalReshardStep] = field(default_factory=list)
    back: list[LocalReshardStep] = field(default_factory=list)

    def whole(self) -> LocalTransfer:
        back = None if self.head.backward is None else tuple(self.back)
        return replace(self.head, forward=tuple(self.there), backward=back)


@dataclass(kw_only=True)
class _Reader:
    """What has been read so far. Indented lines belong to the last op or transfer."""

    name: str
    mesh: Mesh
    originals: dict[str, str] = field(default_factory=dict)
    hoisted: Hoisted = "none"
    node: str | None = None
    ops: list[_OpRead] = field(default_factory=list)
    transfers: dict[int, _TransferRead] = field(default_factory=dict)
    last: _OpRead | _TransferRead | None = None
    messages: list[LocalMessage] = field(default_factory=list)
    period: int = 1
    updates: tuple[Update, ...] = (Update(),)
    asked: list[tuple[TextLine, int]] = field(default_factory=list)
    """(line, number) for each reference to a transfer by its number."""

    def program(self) -> LocalProgram:
        for line, number in self.asked:
            if number not in self.transfers:
                line.fail(f"there is no 'move {number}'", 0)
        numbers = range(len(self.transfers))
        if missing := sorted(set(numbers) - set(self.transfers)):
            raise PaseError(
                f"there is no 'move {missing[0]}'",
                where="local program text",
                fix="number moves consecutively, from 0",
            )
        return LocalProgram(
            name=self.name,
            mesh=self.mesh,
            ops=tuple(op.whole() for op in self.ops),
            transfers=tuple(self.transfers[k].whole() for k in numbers),
            originals=self.originals,
            hoisted=self.hoisted,
            messages=tuple(self.messages),
            period=self.period,
            updates=self.updates,
        )

    def read(self, line: TextLine) -> None:
        depth = len(line.text) - len(line.text.lstrip(" "))
        known: Mapping[str, Callable[[TextLine], None]]
        if depth == 0:
            known = {"copy": self._copy, "node": self._node, "once": self._hoisted, "message": self._message}
            known["updates"] = self._updates
        elif depth == 2:
            at = line.position
            if line.match(re.compile(r"move(?= )")):
                return self._transfer(line)
            line.position = at
            return self._op(line)
        else:
            of_op = {"joined": self._joined, "read": self._operand, "make": self._result, "send": self._sent}
            of_move = {"there": self._there, "back": self._back}
            known = of_op if isinstance(self.last, _OpRead) else of_move if self.last is not None else {}
        at = line.position
        word = line.match(_AXIS) or ""
        if word not in known:
            expected = ", ".join(known) or "a node before it"
            line.fail(f"expected {expected}, found '{line.text[at:][:20]}'", at)
        known[word](line)
        return None

    def _copy(self, line: TextLine) -> None:
        name = line.word("a tensor")
        line.expect("of")
        self.originals[name] = line.word("the tensor that it is a copy of")

    def _hoisted(self, line: TextLine) -> None:
        self.hoisted = line.choice(Hoisted, "something that can be hoisted")

    def _node(self, line: TextLine) -> None:
        self.node, self.last = line.word("the node's name"), None

    def _message(self, line: TextLine) -> None:
        self.messages.append(read_message(line))
        self.asked += [(line, p.transfer) for p in self.messages[-1].chunks]

    def _updates(self, line: TextLine) -> None:
        self.period, self.updates = read_updates(line)

    def _transfer(self, line: TextLine) -> None:
        at = line.position
        number = _number(line, "the move's number")
        if number in self.transfers:
            line.fail(f"'move {number}' is given twice", at)
        tensor = line.word("a tensor")
        line.expect("of")
        src = line.word("a node")
        line.expect("for")
        dst = line.word("a node")
        combine, phase = line.choice(Combine, "a reduction"), line.choice(Phase, "a phase")
        runs = (self._times(line), self._times(line))
        head = LocalTransfer(
            tensor=tensor,
            src=src,
            dst=dst,
            combine=combine,
            forward=(),
            backward=None if line.accept("stays") else (),
            phase=phase,
            runs=runs,
            hoisted=line.accept("once"),
        )
        self.last = self.transfers[number] = _TransferRead(head=head)

    def _times(self, line: TextLine) -> float:
        found = line.match(_TIMES)
        if found is None:
            line.fail(f"expected how often it runs, found {line.next_shown()}")
        return float(found)

    def _there(self, line: TextLine) -> None:
        assert isinstance(self.last, _TransferRead)
        self.last.there.append(self._reshard_step(line))

    def _back(self, line: TextLine) -> None:
        assert isinstance(self.last, _TransferRead)
        if self.last.head.backward is None:
            line.fail("a move that 'stays' has no steps back", 0)
        self.last.back.append(self._reshard_step(line))

    def _reshard_step(self, line: TextLine) -> LocalReshardStep:
        kind, axes = (
            line.choice(LocalReshardKind, "a reshard step"),
            self._axes(line, lambda: line.accept("[")),
        )
        line.position -= 1
        before, after = self._layout(line), self._layout(line)
        return LocalReshardStep(
            kind=kind, axes=axes, before=before, after=after, nbytes=_number(line, "its bytes")
        )

    def _op(self, line: TextLine) -> None:
        if self.node is None:
            line.fail("an op is before the first node", 0)
        head = LocalOp(node=self.node, op=read_op(line), operands=(), results=(), combine="sum")
        self.last = _OpRead(head=head)
        self.ops.append(self.last)

    def _joined(self, line: TextLine) -> None:
        assert isinstance(self.last, _OpRead)
        self.last.head = replace(self.last.head, combine=line.choice(Combine, "a reduction"))

    def _operand(self, line: TextLine) -> None:
        assert isinstance(self.last, _OpRead)
        tensor, shape, layout = self._tensor(line)
        gradient = self._gradient(line, layout)
        transfer = None
        if line.accept("by="):
            transfer = _number(line, "a move's number")
            self.asked.append((line, transfer))
        summed, halo = self._named(line, "summed"), self._named(line, "halo")
        self.last.operands.append(
            LocalOperand(
                tensor=tensor,
                shape=shape,
                layout=layout,
                gradient=gradient,
                transfer=transfer,
                constant=line.accept("constant"),
                summed=summed,
                halo=halo,
            )
        )

    def _result(self, line: TextLine) -> None:
        assert isinstance(self.last, _OpRead)
        tensor, shape, layout = self._tensor(line)
        gradient, summed = self._gradient(line, layout), self._named(line, "summed")
        made = LocalResult(
            tensor=tensor,
            shape=shape,
            layout=layout,
            gradient=gradient,
            summed=summed,
            gradient_carrier="zeros" if line.accept("zeros") else "value",
        )
        self.last.results.append(made)

    def _sent(self, line: TextLine) -> None:
        assert isinstance(self.last, _OpRead)
        kind = line.choice(CollectiveKind, "a collective")
        axes = self._axes(line, lambda: line.at_end() or line.text[line.position].isdigit())
        nbytes, tensor = _number(line, "its bytes"), line.word("a tensor")
        phase = line.choice(Phase, "a phase")
        sent = NodeCollective(
            kind=kind, axes=axes, nbytes=nbytes, tensor=tensor, phase=phase, times=_number(line, "how often")
        )
        self.last.sent.append(sent)

    def _gradient(self, line: TextLine, layout: AxisLayout) -> AxisLayout:
        return self._layout(line) if line.accept("gradient=") else layout

    def _named(self, line: TextLine, key: str) -> tuple[str, ...]:
        return self._axes(line, lambda: line.accept(")")) if line.accept(f"{key}=(") else ()

    def _axis(self, line: TextLine) -> int:
        at = line.position
        name = line.match(_AXIS)
        if name not in self.mesh.names:
            line.position = at
            line.fail(f"expected an axis of {', '.join(self.mesh.names)}, found {line.next_shown()}")
        return self.mesh.names.index(name)

    def _axes(self, line: TextLine, ended: Callable[[], bool]) -> tuple[str, ...]:
        out: list[str] = []
        while not ended():
            out.append(self.mesh.names[self._axis(line)])
        return tuple(out)

    def _held(self, line: TextLine, states: list[AxisState], axis: int, state: AxisState) -> None:
        if states[axis] is not None:
            line.fail(f"axis {self.mesh.names[axis]} is given twice")
        states[axis] = state

    def _blocks(self, line: TextLine) -> int:
        line.expect("/")
        at = line.position
        if (blocks := _number(line, "a number of blocks")) < 1:
            line.fail("a dim must have at least one block", at)
        return blocks

    def _layout(self, line: TextLine) -> AxisLayout:
        states: list[AxisState] = [None] * len(self.mesh.names)
        for _ in self._split_entries(line, states):
            axis = self._axis(line)
            line.expect(":")
            dim = line.match(re.compile(r"\d{1,3}(?=/)"))
            if dim is None:
                line.fail(f"expected a dim's number, found {line.next_shown()}")
            self._held(line, states, axis, Digit(int(dim), self._blocks(line)))
        return AxisLayout(states)

    def _split_entries(self, line: TextLine, states: list[AxisState]) -> Iterator[None]:
        """Yields once for each entry in brackets that the caller must read. Entries of partial axes are read here."""
        line.expect("[")
        while not line.accept("]"):
            if line.accept("+"):
                self._held(line, states, self._axis(line), "partial")
            else:
                yield

    def _tensor(self, line: TextLine) -> tuple[str, Extents, AxisLayout]:
        """A tensor's name, its whole shape and its layout, from its local sizes."""
        name = line.word("a tensor")
        shape: list[int] = []
        states: list[AxisState] = [None] * len(self.mesh.names)
        for _ in self._split_entries(line, states):
            found = line.match(re.compile(r"\d{1,18}"))
            if found is None:
                line.fail(f"expected a size, +axis or ']', found {line.next_shown()}")
            size = int(found)
            while line.text[line.position : line.position + 1] == ":":
                line.position += 1
                axis = self._axis(line)
                self._held(line, states, axis, Digit(len(shape), self._blocks(line)))
                size *= self.mesh.sizes[axis]
            shape.append(size)
        return name, tuple(shape), AxisLayout(states)
