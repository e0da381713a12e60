"""Gathered parameters whose memory is free from the last reader in forward to the first in backward.

Autograd keeps them as it keeps any tensor. Their memory is freed when forward has read them. Before the derivative of a
reader runs, they are gathered again into the same arrays, as FSDP2 does. Nothing replaces what autograd saves: hooks on
saved tensors (``gathered_again``) run Python for each tensor of a step. But what reads a parameter must be known
beforehand, so this is for recorded programs that run op by op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import EdgeCall
from pase.backends.torch.spmd.gathered_again import AgainMark, GatheredTaker, MessageAgain
from pase.backends.torch.spmd.gathers import ArrivedEdge
from pase.backends.torch.spmd.record import ProgramCall
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.fx import Node as FxNode

__all__ = ["FreedParameters", "freed_after_reading"]


@dataclass(kw_only=True, eq=False)
class _FreedArrays:
    """What one message brings, or one gather alone.

    arrays: what backward gathers it into again; none any more when that has been done. sizes: their bytes.
    unread: for each, how many of its parameters forward still reads.
    started: whether it is under way. wanted: whether a derivative reads it.
    needs: places of parameters that are read to gather it.
    """

    arrays: list[Tensor]
    begin: Callable[[Sequence[Tensor]], None]
    finish: Callable[[Sequence[Tensor]], None]
    early: bool
    unread: list[int]
    sizes: list[int]
    needs: Sequence[int] = ()
    started: bool = False
    wanted: bool = False


@dataclass(kw_only=True)
class FreedParameters:
    """The gathered parameters of one micro-batch, by their places in the program.

    taker: of the program that runs.
    messages: what was gathered in messages, in order.
    """

    taker: GatheredTaker
    messages: list[_FreedArrays] = field(default_factory=list)
    _at: dict[int, tuple[_FreedArrays, int]] = field(default_factory=dict)
    """Place -> what brings it, and which array has it."""
    _of: dict[int, _FreedArrays] = field(default_factory=dict)
    """Identity of a message -> what it brings."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """While a forward runs."""
        with self.taker.giving(self):
            yield
        self._of.clear()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """While a backward runs: nothing has to be done."""
        yield

    def add(self, made: Tensor, value: Tensor, there: Callable[[Tensor], Tensor], mark: AgainMark) -> None:
        """Forward has gathered a parameter alone: ``made`` is ``there(value)``."""
        array, value = made.detach(), value.detach()

        def finish(arrays: Sequence[Tensor]) -> None:
            arrays[0].copy_(there(value))

        alone = _FreedArrays(
            arrays=[array],
            begin=lambda arrays: None,
            finish=finish,
            early=False,
            unread=[1],
            sizes=[array.untyped_storage().nbytes()],
            needs=mark.needs,
        )
        self._at[mark.place] = alone, 0

    def add_part(self, made: Tensor, message: MessageAgain, at: int, mark: AgainMark) -> None:
        """Forward has got a parameter in a message. at: which of what the message brings again."""
        if id(message) not in self._of:
            arrays, message.into = list(message.into), ()
            self._of[id(message)] = brought = _FreedArrays(
                arrays=arrays,
                begin=message.start_into,
                finish=message.receive_into,
                early=message.how.arrives_in_place,
                unread=[len(some) for some in message.how.arrays],
                sizes=[x.untyped_storage().nbytes() for x in arrays],
            )
            self.messages.append(brought)
        brought = self._of[id(message)]
        which = next(i for i, some in enumerate(message.how.arrays) if at in some)
        self._at[mark.place] = brought, which

    def read(self, places: Sequence[int], made: Tree) -> None:
        """An op has read the parameters at these places, and made this. They are there again before its derivative."""
        import torch

        for x in made if isinstance(made, (tuple, list)) else (made,):
            if not isinstance(x, torch.Tensor):
                continue
            for place in places:
                self._keep_if_view(place, x)
            if x.grad_fn is not None:
                for place in places:
                    self._at[place][0].wanted = True
                x.grad_fn.register_prehook(partial(self._before_derivative, places))

    def _keep_if_view(self, place: int, x: Tensor) -> None:
        """An op that copied when the program was recorded may give a view of what has other strides. What reads that
        is not known, so the array stays."""
        brought, which = self._at[place]
        if x.untyped_storage()._cdata == brought.arrays[which].untyped_storage()._cdata:
            brought.unread[which] += 1

    def free(self, places: Sequence[int]) -> None:
        """Forward has read the parameters at these places for the last time."""
        for place in places:
            brought, which = self._at[place]
            brought.unread[which] -= 1
            if not brought.unread[which]:
                self._resize(brought.arrays[which], 0)

    def _before_derivative(self, places: Sequence[int], *_: object) -> None:
        import torch

        with torch.no_grad():
            for place in places:
                self._fill(self._at[place][0])

    def _fill(self, brought: _FreedArrays) -> None:
        """Gather again what is not there. The message that is needed next starts."""
        import torch

        if not brought.arrays:
            return
        for place in brought.needs:
            self._fill(self._at[place][0])
        self._start(brought)
        with torch.autograd._unsafe_preserve_version_counter(tuple(brought.arrays)):
            if not brought.early:
                self._allocate(brought)
            brought.finish(brought.arrays)
        brought.arrays.clear()
        if brought in self.messages:
            for m in reversed(self.messages[: self.messages.index(brought)]):
                if m.arrays and m.wanted:
                    self._start(m)
                    return

    def _start(self, brought: _FreedArrays) -> None:
        import torch

        if brought.started:
            return
        brought.started = True
        with torch.autograd._unsafe_preserve_version_counter(tuple(brought.arrays)):
            if brought.early:
                self._allocate(brought)
            brought.begin(brought.arrays)

    def _allocate(self, brought: _FreedArrays) -> None:
        for x, nbytes in zip(brought.arrays, brought.sizes, strict=True):
            if x.untyped_storage().nbytes() != nbytes:
                self._resize(x, nbytes)

    def _resize(self, x: Tensor, nbytes: int) -> None:
        x.untyped_storage().resize_(nbytes)
        self.taker.resized(x)


@dataclass(frozen=True)
class _ReadCall:
    """Says that an op has read parameters."""

    taker: GatheredTaker
    places: tuple[int, ...]

    def __call__(self, made: Tree) -> None:
        if isinstance(self.taker.now, FreedParameters):
            self.taker.now.read(self.places, made)


@dataclass(frozen=True)
class _FreeCall:
    """Says that forward has read parameters for the last time."""

    taker: GatheredTaker
    places: tuple[int, ...]

    def __call__(self) -> None:
        if isinstance(self.taker.now, FreedParameters):
            self.taker.now.free(self.places)


def freed_after_reading(graph: Graph) -> None:
    """Say in a graph what reads the parameters that backward gathers again, and where forward has read them all."""
    gathers = [(n, mark) for n in graph.nodes if (mark := _mark(n)) is not None]
    if not gathers:
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    taker = gathers[0][1].taker
    views_of: dict[FxNode, list[int]] = {}
    read: dict[FxNode, list[int]] = {}
    last: dict[FxNode, list[int]] = {}
    for place, (n, mark) in enumerate(gathers):
        needs = tuple(views_of.get(n.args[0], ()))
        n.target = ProgramCall(_placed(n.target.run, replace(mark, place=place, needs=needs)), n.target.name)
        views, readers = _views_and_readers(n)
        for v in views:
            views_of.setdefault(v, []).append(place)
        for r in readers:
            read.setdefault(r, []).append(place)
        if not any(r.op == "output" or "val" not in r.meta for r in readers):
            last.setdefault(max((*views, *readers), key=order.__getitem__), []).append(place)
    said = {n: n for n in (*read, *last)}
    for n, places in read.items():
        if n.op != "output":
            with graph.inserting_after(n):
                said[n] = graph.call_function(ProgramCall(_ReadCall(taker, tuple(places)), "read"), (n,))
                said[n].meta |= {k: v for k, v in n.meta.items() if k != "val"}
    for n, places in last.items():
        with graph.inserting_after(said[n]):
            freed = graph.call_function(ProgramCall(_FreeCall(taker, tuple(places)), "freed"))
            freed.meta |= {k: v for k, v in n.meta.items() if k != "val"}


def _mark(n: FxNode) -> AgainMark | None:
    """The mark of a node that gathers what backward gathers again."""
    run = n.target.run if isinstance(n.target, ProgramCall) else None
    if isinstance(run, ArrivedEdge):
        return None if run.again is None else run.edge.again
    return run.again if isinstance(run, EdgeCall) else None


def _placed(run: EdgeCall | ArrivedEdge, mark: AgainMark) -> EdgeCall | ArrivedEdge:
    if isinstance(run, ArrivedEdge):
        return replace(run, edge=replace(run.edge, again=mark))
    return replace(run, again=mark)


def _views_and_readers(n: FxNode) -> tuple[list[FxNode], list[FxNode]]:
    """(the node and the views of it, all else that reads them). What makes several tensors is a reader, too."""
    mine, views = _storages(n), [n]
    readers: dict[FxNode, None] = {}
    for v in views:
        for user in v.users:
            if user in views or user in readers:
                continue
            if mine & _storages(user):
                views.append(user)
            if not mine & _storages(user) or not _is_one_tensor(user):
                readers[user] = None
    return views, list(readers)


def _storages(n: FxNode) -> set[int]:
    import torch

    val = n.meta.get("val")
    every = val if isinstance(val, (tuple, list)) else (val,)
    return {x.untyped_storage()._cdata for x in every if isinstance(x, torch.Tensor)}


def _is_one_tensor(n: FxNode) -> bool:
    import torch

    return isinstance(n.meta.get("val"), torch.Tensor)
