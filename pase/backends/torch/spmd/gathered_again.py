"""Gathered parameters that autograd does not keep: backward gathers them again.

A step that keeps what it gathers holds all parameters at the end of forward; a pipeline's stage with several
micro-batches between their forward and their backward holds as many copies. Parameters that forward gathers in one
message (``gathers``) come in one message again, without those that backward does not need. Messages come in the
opposite order, each one ahead of its use, and what has been read for the last time is let go.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pase.ir import Access, Op
from pase.ir.functions import MUL
from pase.local.types import LocalOp, LocalProgram

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "AgainMark",
    "GatheredAgain",
    "GatheredTaker",
    "MessageAgain",
    "TakesGathered",
    "Way",
    "again_messages",
    "only_a_factor",
    "read_again",
]

Way: TypeAlias = "Callable[[Tensor], Tensor]"


def read_again(program: LocalProgram, number: int, inside: Callable[[LocalOp], bool]) -> bool:
    """Whether backward needs what a transfer brings, outside of recomputed blocks (``pase.ir.recompute``).

    inside: whether an op is in the stage.
    """
    reads = _reads(program, number, inside)
    return any(a.recompute and op.region is None for op, accesses in reads for a in accesses)


def only_a_factor(program: LocalProgram, number: int, inside: Callable[[LocalOp], bool]) -> bool:
    """Whether what a transfer brings is only multiplied with something else, so that its gradient does not depend on
    it."""
    reads = _reads(program, number, inside)
    return all((op.kind in ("matmul", "conv") or op.function is MUL) and len(of) == 1 for op, of in reads)


def again_messages(program: LocalProgram, messages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """What of each message of gathers (``gathers.gather_messages``) backward gathers again, in the same order."""
    found = (tuple(n for n in numbers if read_again(program, n, lambda op: True)) for numbers in messages)
    return tuple(filter(None, found))


def _reads(
    program: LocalProgram, number: int, inside: Callable[[LocalOp], bool]
) -> Iterator[tuple[Op, list[Access]]]:
    """The ops that read what a transfer brings, each with its reads of it."""
    tensor = program.original(program.transfers[number].tensor)
    for op in filter(inside, program.users(number)):
        both = zip(op.op.reads, op.operands, strict=True)
        yield op.op, [a for a, o in both if program.original(o.tensor) == tensor]


class TakesGathered(Protocol):
    """The gathered parameters of one micro-batch. See ``GatheredAgain``, and ``freed.FreedParameters``."""

    def forward(self) -> contextlib.AbstractContextManager[None]: ...

    def backward(self) -> contextlib.AbstractContextManager[None]: ...

    def add(self, made: Tensor, value: Tensor, there: Way, mark: AgainMark) -> None: ...

    def add_part(self, made: Tensor, message: MessageAgain, at: int, mark: AgainMark) -> None: ...


@dataclass(kw_only=True)
class GatheredTaker:
    """Where the edges of a walk, or of the program that was recorded from it, hand over what they gather.

    now: that of the micro-batch whose forward runs; None while none does.
    resized: is told of an array whose memory was freed, or allocated again.
    """

    now: TakesGathered | None = None
    resized: Callable[[Tensor], None] = lambda x: None

    @contextlib.contextmanager
    def giving(self, to: TakesGathered | None) -> Iterator[None]:
        """Hand over to ``to`` in this context; to nobody if it is None."""
        before, self.now = self.now, to
        try:
            yield
        finally:
            self.now = before


@dataclass(frozen=True, kw_only=True)
class AgainMark:
    """An edge whose gathered parameter backward gathers again.

    factor: whether it is only multiplied with something, so that its gradient does not depend on it.
    place: the number of the gather in a recorded program. needs: those of what is read to gather it.
    """

    taker: GatheredTaker
    factor: bool
    place: int = -1
    needs: tuple[int, ...] = ()

    def give(self, made: Tensor, value: Tensor, there: Way) -> None:
        """The edge has gathered: ``made`` is ``there(value)``."""
        if self.taker.now is not None:
            self.taker.now.add(made, value, there, self)

    def give_part(self, made: Tensor, message: MessageAgain, at: int) -> None:
        """The edge has got a part of a message."""
        if self.taker.now is not None:
            self.taker.now.add_part(made, message, at, self)


class MessageGathers(Protocol):
    """``gathers._GatherMessage``."""

    @property
    def arrays(self) -> Sequence[Sequence[int]]: ...

    @property
    def arrives_in_place(self) -> bool: ...

    def started(self, *parameters: Tensor, into: Tensor | None = None) -> Tensor: ...

    def received(self, wire: Tensor) -> list[Tensor]: ...

    def received_into(self, wire: Tensor, arrays: Sequence[Tensor]) -> None: ...


@dataclass(kw_only=True, eq=False)
class MessageAgain:
    """The parameters of a message that backward gathers again, in one micro-batch.

    values: this rank's parts. into: the arrays that hold what forward has got.
    wire: what is under way. numbers: place in the message -> number of the gather.
    """

    how: MessageGathers
    values: Sequence[Tensor]
    into: Sequence[Tensor]
    wire: Tensor | None = None
    numbers: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        if self.wire is None:
            self.wire = self.how.started(*self.values)

    def receive(self) -> list[Tensor]:
        self.start()
        wire, self.wire = self.wire, None
        assert wire is not None
        return self.how.received(wire)

    def start_into(self, arrays: Sequence[Tensor]) -> None:
        """Start it, to end in these arrays."""
        self.wire = self.how.started(*self.values, into=arrays[0] if self.how.arrives_in_place else None)

    def receive_into(self, arrays: Sequence[Tensor]) -> None:
        """Wait for it."""
        wire, self.wire = self.wire, None
        assert wire is not None
        self.how.received_into(wire, arrays)


@dataclass(kw_only=True)
class GatheredAgain:
    """The gathered parameters of one micro-batch: of a step, or of a stage.

    taker: of the walk that runs; None if backward gathers nothing again.
    gathers: each gather of the forward, in order. messages: those that were joined.
    made: their results that backward still needs, by number.
    saved: number -> how many tensors autograd has saved of it. left: how many of them backward has not read yet.
    """

    taker: GatheredTaker | None
    gathers: list[_Gather] = field(default_factory=list)
    messages: list[MessageAgain] = field(default_factory=list)
    made: dict[int, Tensor] = field(default_factory=dict)
    saved: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    _numbers: dict[int, int] = field(default_factory=dict)
    """Address of a gathered tensor's storage -> number, while forward runs and the storage lives."""
    _living: dict[int, object] = field(default_factory=dict)
    """The same addresses -> what tells when the storage is gone, so that no other is taken for it."""
    _around: tuple[Callable[[Tensor], object], Callable[[object], Tensor]] | None = None
    """The hooks of whoever runs the forward, for what is kept."""
    _of_weights: bool = False

    def add(self, made: Tensor, value: Tensor, there: Way, mark: AgainMark) -> None:
        """Forward has gathered a parameter: ``made`` is ``there(value)``."""
        self._add(made, _Gather(value=self._packed(value.detach()), there=there, factor=mark.factor))

    def add_part(self, made: Tensor, message: MessageAgain, at: int, mark: AgainMark) -> None:
        """Forward has gathered a parameter in a message. at: which of what the message brings again."""
        if message not in self.messages:
            self.messages.append(message)
        message.numbers[at] = len(self.gathers)
        self._add(made, _Gather(message=message, factor=mark.factor))

    def _add(self, made: Tensor, gather: _Gather) -> None:
        storage, number = made.untyped_storage(), len(self.gathers)
        self.gathers.append(gather)
        self._numbers[storage._cdata] = number
        self._living[storage._cdata] = weakref.ref(storage, partial(self._gone, storage._cdata))

    def _gone(self, at: int, _: object) -> None:
        self._numbers.pop(at, None)
        self._living.pop(at, None)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """While a forward runs: autograd saves no gathered parameter."""
        import torch

        if self.taker is None:
            yield
            return
        self._around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        with self.taker.giving(self), torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
            yield
        self._numbers.clear()
        self._living.clear()

    @contextlib.contextmanager
    def backward(self, *, of_weights: bool = False) -> Iterator[None]:
        """While a backward, or a part of it, runs: each parameter is gathered at most once.

        of_weights: whether it computes only gradients of weights.
        """
        self._of_weights, self.left = of_weights, Counter(self.saved)
        yield
        self.made.clear()

    def _packed(self, x: Tensor) -> object:
        number = self._numbers.get(x.untyped_storage()._cdata)
        if number is None:
            return x if self._around is None else _AsElsewhere(self._around[0](x))
        self.saved[number] += 1
        self.left[number] += 1
        return _GatheredView(self, number, x.size(), x.stride(), x.storage_offset(), x.dtype, x.device)

    def _unpacked(self, x: object) -> Tensor:
        import torch

        if isinstance(x, _AsElsewhere):
            assert self._around is not None
            return self._around[1](x.what)
        if not isinstance(x, _GatheredView):
            assert isinstance(x, torch.Tensor)
            return x
        self.left[x.number] -= 1
        if self._of_weights and self.gathers[x.number].factor:
            # PyTorch asks for all that the op saved, but reads the shape alone. Anything else would become NaN.
            return torch.full((), torch.nan, dtype=x.dtype, device=x.device).expand(x.size)
        if x.number not in self.made:
            self._gather(x.number)
        of = self.made[x.number] if self.left[x.number] > 0 else self.made.pop(x.number)
        if (of.size(), of.stride(), of.storage_offset()) == (x.size, x.stride, x.offset):
            return of
        return of.as_strided(x.size, x.stride, x.offset)

    def _gather(self, number: int) -> None:
        """Gather a parameter again, with the others of its message. The message that is needed next starts."""
        import torch

        gather = self.gathers[number]
        with torch.no_grad():
            if gather.message is None:
                self.made[number] = gather.there(self._unpacked(gather.value))
                return
            parts = gather.message.receive()
            for place, n in gather.message.numbers.items():
                if self.left[n] > 0 or n == number:
                    self.made[n] = parts[place]
            at = self.messages.index(gather.message)
            for m in reversed(self.messages[:at]):
                if any(self.left[n] > 0 for n in m.numbers.values()):
                    m.start()
                    return


@dataclass(frozen=True)
class _AsElsewhere:
    """What the hooks around made of a tensor that is kept."""

    what: object


@dataclass(frozen=True)
class _GatheredView:
    """A view of a gathered parameter, which autograd saves instead of the tensor."""

    of: GatheredAgain
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """A gather of a parameter. factor: as in ``AgainMark``.

    message: what it came in; None if it came alone. Then ``value`` is what it begins with, and ``there`` gathers it.
    """

    factor: bool
    message: MessageAgain | None = None
    value: object = None
    there: Way = lambda x: x
