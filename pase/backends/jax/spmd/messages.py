"""Sends the messages of a local program in JAX: transfers of parameters that are joined, cut and sent in a fixed order.

In each body (the model, a loop's iteration, a recomputed region), the gradients of all parameters meet in one function
with its own derivative, which sends them message by message. Forward, messages are sent up to the one that a reader
waits for. A message starts from the result of the message before it on its link. So the compiler can neither reorder
nor combine messages, but it can overlap them with compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.spmd.collectives import after, from_wire, on_wire, sent, there_and_back
from pase.backends.jax.spmd.values import DeviceValue, NotManual
from pase.errors import PaseError
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

if TYPE_CHECKING:
    from jax import Array

__all__ = ["JOINED", "BodyMessages", "Sending"]

JOINED = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(kw_only=True)
class Sending:
    """The state of sending parts of some transfers, in one direction.

    values: part of a transfer -> its value after the reshard steps so far. done: part -> how many of its steps have
    run. messages: the messages that have not been sent. begun: node -> a value that it reads. last: (link, how often
    its messages run) -> the result of its last message. parts: (part, stage) -> the columns that have arrived, by their
    first byte.
    """

    program: LocalProgram
    way: TransferDirection
    values: dict[TransferPart, Array]
    messages: list[LocalMessage]
    begun: Mapping[str, Array] = field(default_factory=dict)
    done: dict[TransferPart, int] = field(default_factory=dict)
    last: dict[tuple[str, float], Array] = field(default_factory=dict)
    parts: dict[tuple[TransferPart, int], dict[int, Array]] = field(default_factory=dict)

    def shape(self, part: TransferPart) -> Extents:
        """The shape of the whole tensor."""
        return self.program.result(self.program.transfers[part[0]].tensor).shape

    def _reshard_step(self, p: MessageChunk) -> LocalReshardStep:
        return self.program.stages(p.transfer, self.way)[p.stage]

    def _reshard(self, part: TransferPart, steps: Sequence[LocalReshardStep]) -> None:
        t = self.program.transfers[part[0]]
        combine = t.combine if self.way == "there" else "sum"
        devices, shape = JaxArrays(self.program.mesh), self.shape(part)
        self.values[part] = resharded(self.values[part], steps, shape, combine, devices)
        self.done[part] = self.done.get(part, 0) + len(steps)

    def _freely(self, part: TransferPart) -> None:
        """Run the reshard steps that send nothing, up to the next one that does."""
        rest = self.program.reshard_steps(part[0], self.way)[self.done.get(part, 0) :]
        ahead = next((i for i, m in enumerate(rest) if m.nbytes and not m.free), len(rest))
        self._reshard(part, rest[:ahead])

    def finished(self, part: TransferPart) -> Array:
        """The value where it is read, after all messages that carry any of it."""
        while any(p.part == part for m in self.messages for p in m.chunks):
            self.send()
        self._reshard(part, self.program.reshard_steps(part[0], self.way)[self.done.get(part, 0) :])
        return self.values[part]

    def send(self) -> None:
        """Send the next message."""
        import jax

        message = self.messages.pop(0)
        names = ", ".join(dict.fromkeys(self.program.transfers[p.transfer].tensor for p in message.chunks))
        try:
            with jax.named_scope(f"message {message.way} of {names}"):
                self._send(message)
        except NotManual:
            raise
        except PaseError as e:
            raise NotManual(f"it cannot be sent manually: {e}", where=f"the message with '{names}'") from None

    def _send(self, message: LocalMessage) -> None:
        alike: dict[object, list[MessageChunk]] = {}
        for p in message.chunks:
            self._freely(p.part)
            step = self._reshard_step(p)
            if step.kind not in JOINED and p.begin:
                continue  # the whole value was sent with its first chunk
            whole = p.nbytes == step.nbytes
            alone = step.kind not in JOINED or (whole and len(message.chunks) == 1)
            alike.setdefault(p if alone else self.values[p.part].dtype, []).append(p)
        for key, chunks in alike.items():
            self._one(message, chunks, alone=isinstance(key, MessageChunk))

    def _one(self, message: LocalMessage, chunks: Sequence[MessageChunk], alone: bool) -> None:
        """Run one collective, of a whole tensor (alone) or of columns of several."""
        import jax.numpy as jnp

        mesh, first, step = self.program.mesh, chunks[0].part, self._reshard_step(chunks[0])
        if alone:
            self.values[first] = self._late(self.values[first], message)
            self._reshard(first, [step])
            self.last[self._queue(message)] = self.values[first]
            return
        columns, spans = [], []
        for p in chunks:
            step = self._reshard_step(p)
            rows = on_wire(self.values[p.part], step, self.shape(p.part), mesh)
            begin, end = (round(b * rows.shape[1] / step.nbytes) for b in (p.begin, p.begin + p.nbytes))
            columns.append(rows[:, begin:end])
            spans.append(end - begin)
        arrived = sent(self._late(jnp.concatenate(columns, axis=1), message), step)
        self.last[self._queue(message)] = arrived
        at = 0
        for p, span in zip(chunks, spans, strict=True):
            self.parts.setdefault((p.part, p.stage), {})[p.begin] = arrived[:, at : at + span]
            at += span
        for p in {(p.part, p.stage): p for p in chunks}.values():
            self._arrived(p)

    def _queue(self, message: LocalMessage) -> tuple[str, float]:
        """The queue that a message is in. Messages of a queue are sent one after another.

        Messages that run differently often have different queues: a message that waits for one that backward runs again
        would run again, too.
        """
        if self.program.delayed:
            return message.link, 0.0
        return message.link, self.program.runs(message.chunks[0].transfer, message.way)

    def _late(self, x: Array, message: LocalMessage) -> Array:
        """x, made to wait until the link is free and the node that the message waits for has begun."""
        for earlier in (self.last.get(self._queue(message)), self.begun.get(message.after)):
            x = x if earlier is None else after(x, earlier)
        return x

    def _arrived(self, p: MessageChunk) -> None:
        """Assemble a chunk's value if all of its chunks have arrived."""
        import jax.numpy as jnp

        if any((q.part, q.stage) == (p.part, p.stage) for m in self.messages for q in m.chunks):
            return
        held = self.parts.pop((p.part, p.stage))
        rows = jnp.concatenate([held[b] for b in sorted(held)], axis=1)
        self.values[p.part] = from_wire(rows, self._reshard_step(p), self.shape(p.part), self.program.mesh)
        self.done[p.part] += 1


@dataclass(kw_only=True)
class BodyMessages:
    """The messages of one body.

    given: number of a transfer -> the value that it starts from, for all transfers that messages carry in this body.
    begun: node -> a value that it reads, for the nodes that have run so far.
    """

    program: LocalProgram
    given: Mapping[int, DeviceValue]
    begun: Mapping[str, Array]

    def arrived(self, transfer: int) -> Array:
        """The value of a transfer as it is read; messages take its gradient back."""
        value = self._there.finished((transfer, None))
        if transfer not in self._gradients:
            return value
        return there_and_back(value, self._gradients[transfer], lambda x: x, lambda g: g)

    @cached_property
    def _there(self) -> Sending:
        import jax

        start: dict[TransferPart, Array] = {
            (k, None): jax.lax.stop_gradient(h.array) for k, h in self.given.items()
        }
        return Sending(
            program=self.program, way="there", values=start, messages=self._mine("there"), begun=self.begun
        )

    def _mine(self, way: TransferDirection) -> list[LocalMessage]:
        """The messages in one direction, without chunks of transfers that are not in this body."""
        found = []
        for m in self.program.messages:
            chunks = tuple(p for p in m.chunks if p.transfer in self.given)
            if m.way == way and chunks:
                found.append(LocalMessage(way=way, link=m.link, chunks=chunks, after=m.after))
        return found

    @cached_property
    def _gradients(self) -> dict[int, Array]:
        """Transfer -> zeros that receive the gradient of its readers; their derivative sends the messages back."""
        import jax
        import jax.numpy as jnp

        trained = {
            k: h.array if h.gradient_carrier is None else h.gradient_carrier
            for k, h in self.given.items()
            if self.program.transfers[k].backward is not None
        }

        def zeros(xs: Mapping[int, Array]) -> dict[int, Array]:
            return {k: jnp.zeros(self._left(k), x.dtype) for k, x in xs.items()}

        def back(_: None, gradients: dict[int, Array]) -> tuple[dict[int, Array]]:
            sending = Sending(
                program=self.program,
                way="back",
                values={(k, None): g for k, g in gradients.items()},
                messages=self._mine("back"),
            )
            return ({k: sending.finished((k, None)) for k in gradients},)

        joined = jax.custom_vjp(zeros)
        joined.defvjp(lambda xs: (zeros(xs), None), back)
        return joined(trained)  # type: ignore[no-any-return]

    def _left(self, transfer: int) -> Extents:
        """The local shape in which the gradient leaves its readers."""
        reader = self.program.readers[transfer][0]
        operand = next(o for o in reader.operands if o.transfer == transfer)
        return operand.gradient.local_shape(operand.shape, self.program.mesh)
