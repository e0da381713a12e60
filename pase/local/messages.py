"""Sends the messages of a local program, in any framework (``pase.local.arrays``): transfers of parameters that are
joined, cut and sent in a fixed order.

Messages are sent up to the one that a reader waits for. A message joins what collectives send as columns: an all-reduce
and an all-gather send one row, a reduce-scatter one row for each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pase.local.arrays import Arrays
from pase.local.parts import view
from pase.local.reshard import resharded
from pase.local.types import (
    Extents,
    LocalMessage,
    LocalProgram,
    LocalReshardStep,
    MessageChunk,
    TransferDirection,
    TransferPart,
)
from pase.pytree import Tree

__all__ = ["JOINED", "Sending", "columns_of_chunk", "messages_among"]

A = TypeVar("A")

JOINED = ("all_reduce", "reduce_scatter", "all_gather")
"""The kinds of reshard steps that can be joined and cut. Others are sent alone, as a whole."""


def messages_among(
    program: LocalProgram, way: TransferDirection, transfers: Collection[int]
) -> list[LocalMessage]:
    """The messages in one direction, without chunks of other transfers than these."""
    found = []
    for m in program.messages:
        chunks = tuple(p for p in m.chunks if p.transfer in transfers)
        if m.way == way and chunks:
            found.append(replace(m, chunks=chunks))
    return found


def columns_of_chunk(
    x: A, chunk: MessageChunk, step: LocalReshardStep, shape: Extents, arrays: Arrays[A]
) -> A:
    """What a reshard step sends of a value in a chunk, [rows, columns]. shape: of the whole tensor."""
    elements = math.prod(arrays.shape(x))
    if step.kind == "reduce_scatter":
        v = view(step, shape, arrays.mesh)
        ways = math.prod(v.ways)
        rows = arrays.rearranged(x, v.seen, v.to_front, (ways, elements // ways))
    else:
        rows = arrays.reshape(x, (1, elements))
    count = arrays.shape(rows)[1]
    begin, end = (round(b * count / step.nbytes) for b in (chunk.begin, chunk.begin + chunk.nbytes))
    return arrays.narrow(rows, 1, begin, end - begin)


def _after_sending(rows: A, step: LocalReshardStep, arrays: Arrays[A]) -> A:
    """What arrives after sending columns of reshard steps that are alike, [rows, columns]: from an all-gather, a row of
    each device."""
    count = arrays.shape(rows)[1]
    match step.kind:
        case "reduce_scatter":
            return arrays.reshape(arrays.reduce_scatter(rows, step.axes), (1, count))
        case "all_gather":
            return arrays.all_gather(arrays.reshape(rows, (count,)), step.axes)
    return arrays.all_reduce(rows, step.axes)


def _from_rows(rows: A, step: LocalReshardStep, shape: Extents, arrays: Arrays[A]) -> A:
    """The value after the reshard step, from all columns that have arrived."""
    if step.kind == "all_gather":
        v = view(step, shape, arrays.mesh)
        return arrays.from_front(arrays.reshape(rows, (arrays.shape(rows)[0], *v.seen)), v)
    return arrays.reshape(rows, step.after.local_shape(shape, arrays.mesh))


@dataclass(kw_only=True)
class Sending(Generic[A]):
    """The state of sending parts of some transfers, in one direction.

    values: part of a transfer -> its value after the reshard steps so far. done: part -> how many of its steps have
    run. messages: the messages that have not been sent. parts: (part, stage) -> the columns that have arrived, by their
    first byte.
    """

    program: LocalProgram
    arrays: Arrays[A]
    way: TransferDirection
    values: dict[TransferPart, A]
    messages: list[LocalMessage]
    done: dict[TransferPart, int] = field(default_factory=dict)
    parts: dict[tuple[TransferPart, int], dict[int, A]] = field(default_factory=dict)

    def _reshard_step(self, p: MessageChunk) -> LocalReshardStep:
        return self.program.stages(p.transfer, self.way)[p.stage]

    def _reshard(self, part: TransferPart, steps: Sequence[LocalReshardStep]) -> None:
        t = self.program.transfers[part[0]]
        combine = t.combine if self.way == "there" else "sum"
        self.values[part] = resharded(
            self.values[part], steps, self.program.whole_shape(part[0]), combine, self.arrays
        )
        self.done[part] = self.done.get(part, 0) + len(steps)

    def _freely(self, part: TransferPart) -> None:
        """Run the reshard steps that send nothing, up to the next one that does."""
        rest = self.program.reshard_steps(part[0], self.way)[self.done.get(part, 0) :]
        ahead = next((i for i, m in enumerate(rest) if m.nbytes and not m.free), len(rest))
        self._reshard(part, rest[:ahead])

    def finished(self, part: TransferPart) -> A:
        """The value where it is read, after all messages that carry any of it."""
        while any(p.part == part for m in self.messages for p in m.chunks):
            self.send()
        self._reshard(part, self.program.reshard_steps(part[0], self.way)[self.done.get(part, 0) :])
        return self.values[part]

    def send(self) -> None:
        """Send the next message."""
        message = self.messages.pop(0)
        alike: dict[object, list[MessageChunk]] = {}
        for p in message.chunks:
            self._freely(p.part)
            step = self._reshard_step(p)
            if step.kind not in JOINED and p.begin:
                continue  # the whole value was sent with its first chunk
            whole = p.nbytes == step.nbytes
            alone = step.kind not in JOINED or (whole and len(message.chunks) == 1)
            value: Tree = self.values[p.part]
            alike.setdefault(p if alone else value.dtype, []).append(p)
        for key, chunks in alike.items():
            if isinstance(key, MessageChunk):
                self._send_alone(message, key)
            else:
                self._send_columns(message, chunks)

    def run(self, message: LocalMessage, x: A, collective: Callable[[A], A]) -> A:
        """Run a collective of a message. A framework says here what it must wait for."""
        return collective(x)

    def _send_alone(self, message: LocalMessage, p: MessageChunk) -> None:
        """Send a whole tensor."""

        def collective(x: A) -> A:
            self.values[p.part] = x
            self._reshard(p.part, [self._reshard_step(p)])
            return self.values[p.part]

        self.run(message, self.values[p.part], collective)

    def _send_columns(self, message: LocalMessage, chunks: Sequence[MessageChunk]) -> None:
        """Send columns of several tensors as one collective."""
        columns = []
        for p in chunks:
            shape = self.program.whole_shape(p.transfer)
            x = self.values[p.part]
            columns.append(columns_of_chunk(x, p, self._reshard_step(p), shape, self.arrays))
        step = self._reshard_step(chunks[0])
        joined = self.arrays.concat(columns, 1)
        arrived = self.run(message, joined, lambda rows: _after_sending(rows, step, self.arrays))
        at = 0
        for p, x in zip(chunks, columns, strict=True):
            count = self.arrays.shape(x)[1]
            received = self.parts.setdefault((p.part, p.stage), {})
            received[p.begin] = self.arrays.narrow(arrived, 1, at, count)
            at += count
        for p in {(p.part, p.stage): p for p in chunks}.values():
            self._arrived(p)

    def _arrived(self, p: MessageChunk) -> None:
        """Put a value together if all of its chunks have arrived."""
        if any((q.part, q.stage) == (p.part, p.stage) for m in self.messages for q in m.chunks):
            return
        received = self.parts.pop((p.part, p.stage))
        rows = self.arrays.concat([received[b] for b in sorted(received)], 1)
        self.values[p.part] = _from_rows(
            rows, self._reshard_step(p), self.program.whole_shape(p.transfer), self.arrays
        )
        self.done[p.part] += 1
