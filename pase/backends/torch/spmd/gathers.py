"""Parameters that are gathered one message ahead of their use.

A recorded program gathers a parameter where it is read, and waits. Here, the gathers of neighbouring readers are joined
in messages of about a bucket's size. While the readers of one message compute, the next message is under way. What a
message carries follows from the local program alone, so it is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pase.backends.torch.spmd.collectives import EdgeCall
from pase.backends.torch.spmd.gathered_again import MessageAgain, read_again
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import ProgramCall
from pase.local.parts import WireView, view
from pase.local.types import Extents, LocalOp, LocalProgram, LocalReshardStep
from pase.machine import FIRST_BUCKET_BYTES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.fx import Node as FxNode

__all__ = ["ArrivedEdge", "gather_messages", "gathered_ahead"]


def gather_messages(program: LocalProgram, bucket_bytes: float) -> tuple[tuple[int, ...], ...]:
    """The transfers that each message gathers, in the order in which they are read.

    They gather trained parameters as they are stored, or with dims of size 1 besides (the weight of a norm), once in a
    micro-batch. All others are gathered where they are read: in loops, in recomputed blocks, and by a pipeline's stage
    once for all micro-batches.
    """
    stored = {op.results[0].tensor for op in program.ops if op.op.kind == "parameter"}
    stored |= {op.results[0].tensor for op in program.ops if _same_but_for_ones(op, stored, program)}
    begins = {id(op): i for i, op in enumerate(program.ops)}
    read: dict[int, int] = {}
    for number, t in enumerate(program.transfers):
        users = list(program.users(number))
        once = not t.hoisted and not any(op.op.scope for op in users)
        alone = len(t.forward) == len(program.stages(number, "there")) == 1
        if (
            t.tensor in stored
            and users
            and t.backward
            and once
            and alone
            and t.forward[0].kind == "all_gather"
        ):
            read[number] = min(begins[id(op)] for op in users)
    open_: dict[object, list[int]] = {}
    closed: list[tuple[int, ...]] = []
    for number in sorted(read, key=lambda n: (read[n], n)):
        step = program.transfers[number].forward[0]
        mine = open_.setdefault((step.axes, _itemsize(program, number)), [])
        mine.append(number)
        nbytes = sum(program.transfers[n].forward[0].nbytes for n in mine)
        if nbytes >= (bucket_bytes if closed else min(FIRST_BUCKET_BYTES, bucket_bytes)):
            closed.append(tuple(mine))
            mine.clear()
    return (*closed, *(tuple(mine) for mine in open_.values() if mine))


def _same_but_for_ones(op: LocalOp, stored: Collection[str], program: LocalProgram) -> bool:
    """Whether an op is a view of a parameter that only adds or removes dims of size 1."""
    if op.op.kind != "view" or len(op.operands) != 1 or len(op.results) != 1:
        return False
    read = op.operands[0]
    if read.tensor not in stored or read.transfer is not None or op.op.scope:
        return False
    return _longer(program.result(read.tensor).shape) == _longer(op.results[0].shape)


def _longer(shape: Sequence[int]) -> list[int]:
    """The sizes of the dims that are longer than 1."""
    return [n for n in shape if n > 1]


def _itemsize(program: LocalProgram, number: int) -> int:
    """The bytes of an element of what a transfer gathers."""
    t = program.transfers[number]
    step, shape = t.forward[0], program.result(t.tensor).shape
    return step.nbytes // max(1, math.prod(step.after.local_shape(shape, program.mesh)))


def gathered_ahead(
    graph: Graph, program: LocalProgram, groups: AxisGroups, messages: Sequence[Sequence[int]]
) -> None:
    """Gather parameters ahead, in a graph whose edges of these transfers gather them. messages: see
    ``gather_messages``."""
    import operator

    place = {n: i for i, n in enumerate(graph.nodes)}
    edges = _edges(graph)
    carried = [
        sorted((edges[number] for number in some if number in edges), key=lambda e: place[e.node])
        for some in messages
    ]
    carried = sorted(filter(None, carried), key=lambda m: place[m[0].node])
    if not carried:
        return
    before = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for edges_of in carried:
        message = _GatherMessage.of(edges_of, program, groups)
        with graph.inserting_before(before):
            wire = graph.call_function(
                ProgramCall(message.started, "gather"), tuple(e.value for e in edges_of)
            )
        first = edges_of[0].node
        with graph.inserting_before(first):
            before = arrived = graph.call_function(ProgramCall(message.received, "gathered"), (wire,))
            parts = [graph.call_function(operator.getitem, (arrived, i)) for i in range(len(edges_of))]
            again, token = [e for e in edges_of if e.edge.again is not None], None
            if again:
                how = _GatherMessage.of(again, program, groups)
                begun = _BegunAgain(how, message.places_of(how, [edges_of.index(e) for e in again]))
                values = tuple(e.value for e in again)
                token = graph.call_function(ProgramCall(begun, "gathered_again"), (arrived, *values))
                token.meta |= {k: v for k, v in first.meta.items() if k != "val"}
        wire.meta |= {k: v for k, v in first.meta.items() if k != "val"}
        arrived.meta |= wire.meta
        for e, part in zip(edges_of, parts, strict=True):
            part.meta |= e.node.meta
            at = again.index(e) if e in again else None
            e.node.target = ProgramCall(ArrivedEdge(e.edge, at), e.node.target.name)
            given = (e.node.args[0] if e.carried else e.value, *e.node.args[1:], part)
            e.node.args = given if at is None else (*given, token)
            if message.shapes[e.number] != tuple(e.node.meta["val"].shape):
                _shaped_after(graph, e.node, message.shapes[e.number])
    graph.eliminate_dead_code(lambda n: not (_reshaped(n) is not None and not n.users))


def _shaped_after(graph: Graph, n: FxNode, shape: tuple[int, ...]) -> None:
    """Give a node another shape, and its readers the one that they had."""
    had, users = n.meta["val"], list(n.users)
    n.meta["val"] = had.reshape(shape)
    others = []
    for user in users:
        if _reshaped(user) is None:
            others.append(user)
        elif tuple(user.meta["val"].shape) == shape:
            user.replace_all_uses_with(n)
    if others:
        with graph.inserting_after(n):
            again = graph.call_method("reshape", (n, tuple(had.shape)))
        again.meta |= n.meta | {"val": had}
        for user in others:
            user.replace_input_with(n, again)


@dataclass(frozen=True)
class _GatherEdge:
    """A node of a graph that gathers a parameter or a view of it, and the parameter."""

    node: FxNode
    value: FxNode
    edge: EdgeCall
    number: int

    @property
    def carried(self) -> bool:
        """Whether the gradient goes to a carrier, which has the shape of what the edge reads."""
        return len(self.node.args) > 1


def _edges(graph: Graph) -> Mapping[int, _GatherEdge]:
    """Transfer -> the edge that runs it, for edges of the program's inputs that run once."""
    import torch

    found: dict[int, list[_GatherEdge]] = {}
    for n in graph.nodes:
        edge = n.target.run if isinstance(n.target, ProgramCall) else None
        if isinstance(edge, EdgeCall) and edge.later is not None:
            value = n.args[0]
            while isinstance(value, torch.fx.Node) and (under := _reshaped(value)) is not None:
                value = under
            plain = isinstance(value, torch.fx.Node) and value.op == "placeholder"
            made = [_GatherEdge(n, value, edge, edge.later.number)] if plain else []
            found.setdefault(edge.later.number, []).extend(made)
    return {number: some[0] for number, some in found.items() if len(some) == 1}


def _reshaped(n: FxNode) -> FxNode | None:
    """The tensor that a node reshapes; None if it does something else."""
    import torch

    if n.op != "call_method" or n.target != "reshape":
        return None
    base = n.args[0]
    return base if isinstance(base, torch.fx.Node) else None


def _arriving(program: LocalProgram, tensor: str, v: WireView) -> tuple[int, ...]:
    """The shape of a gathered parameter, if what is gathered is a view of it with other dims of size 1."""
    op = program.maker[tensor]
    if op.op.kind == "parameter":
        return v.shape
    long = (n for n, whole in zip(v.shape, program.result(tensor).shape, strict=True) if whole > 1)
    return tuple(next(long) if n > 1 else 1 for n in program.result(op.operands[0].tensor).shape)


@dataclass(frozen=True)
class ArrivedEdge:
    """An edge whose forward has been done before: its last operand is the result.

    again: its place in the message in which backward gathers again, which is one more operand; None if it does not.
    """

    edge: EdgeCall
    again: int | None

    def __call__(self, *args: Tensor | MessageAgain) -> Tensor:
        message: Any = None
        given: list[Any]
        if self.again is None:
            *given, arrived = args
        else:
            *given, arrived, message = args
        made = self._made(given, arrived)
        if self.again is not None and self.edge.again is not None:
            self.edge.again.give_part(made, message, self.again)
        return made

    def _made(self, given: Sequence[Tensor], arrived: Tensor) -> Tensor:
        shape = given[-1].shape  # the plan's reshard steps may give that of a view of the parameter

        def back(g: Tensor) -> Tensor:
            assert self.edge.back is not None
            made = self.edge.back(g)
            return made if made.shape == shape else made.reshape(shape)

        return replace(self.edge, there=lambda x: arrived, back=back, again=None)(*given)


@dataclass(frozen=True)
class _BegunAgain:
    """Begins a message that backward sends again. arrays: the places of its arrays among what has arrived."""

    how: _GatherMessage
    arrays: Sequence[int]

    def __call__(self, arrived: Sequence[Tensor], *values: Tensor) -> MessageAgain:
        return MessageAgain(how=self.how, values=values, into=[arrived[i] for i in self.arrays])


@dataclass(frozen=True)
class _GatherMessage:
    """A message. views: how each parameter is put together. shapes: transfer -> the parameter's shape when it has
    arrived. sizes: the elements that a rank sends of each. alone: the places of the parameters that are taken out of
    the message one by one. alike: those of parameters that are taken out together, by one op each. What is alone comes
    first in the message."""

    groups: AxisGroups
    step: LocalReshardStep
    views: Sequence[WireView]
    shapes: Mapping[int, tuple[int, ...]]
    sizes: Sequence[int]
    alone: Sequence[int]
    alike: Sequence[Sequence[int]]

    @classmethod
    def of(cls, edges: Sequence[_GatherEdge], program: LocalProgram, groups: AxisGroups) -> _GatherMessage:
        transfers = [program.transfers[e.number] for e in edges]
        steps = [t.forward[0] for t in transfers]
        shapes = [program.result(t.tensor).shape for t in transfers]
        views = [view(s, shape, program.mesh) for s, shape in zip(steps, shapes, strict=True)]
        arrived = {
            e.number: v.shape if e.carried else _arriving(program, t.tensor, v)
            for e, t, v in zip(edges, transfers, views, strict=True)
        }
        alike: dict[object, list[int]] = {}
        for i, (e, v) in enumerate(zip(edges, views, strict=True)):
            # They share an array, which backward keeps for any of them: so all are read alike.
            read = _operands_of(e.node), read_again(program, e.number, lambda op: True)
            alike.setdefault((v, arrived[e.number], read), []).append(i)
        together = [some for some in alike.values() if _fewer_together(views[some[0]], len(some))]
        alone = [i for i in range(len(edges)) if not any(i in some for some in together)]
        if together and len(alone) == 1:
            together, alone = [alone, *together], []
        sizes = [math.prod(v.seen) for v in views]
        return cls(groups, steps[0], views, arrived, sizes, alone, together)

    @property
    def arrays(self) -> Sequence[Sequence[int]]:
        """The places of the parameters that each array holds."""
        return *([i] for i in self.alone), *self.alike

    @property
    def arrives_in_place(self) -> bool:
        """Whether what arrives is the array of the only parameter."""
        return len(self.alone) == 1 and not self.alike

    def places_of(self, again: _GatherMessage, edges: Sequence[int]) -> Sequence[int]:
        """The places in what ``received`` returns of the arrays that a message with some of the edges fills again."""
        holds = {i: n for n, some in enumerate(self.arrays) for i in some}
        return [len(self.shapes) + holds[edges[some[0]]] for some in again.arrays]

    def started(self, *parameters: Tensor, into: Tensor | None = None) -> Tensor:
        """Start it: this rank's parts -> what arrives, [ranks, elements]. into: where it is to arrive."""
        import torch

        order = (*self.alone, *(i for some in self.alike for i in some))
        with torch.no_grad():
            wire = torch._chunk_cat([parameters[i] for i in order], 0, 1)
            return self.groups.started_all_gather(wire, self.step.axes, into)

    def received(self, wire: Tensor) -> list[Tensor]:
        """Wait for it: the parameters in the layout in which they are read, then their arrays."""
        import torch

        shapes = list(self.shapes.values())
        placed: dict[int, Tensor] = {}
        with torch.no_grad():
            wire = self.groups.received(wire)
            if self.arrives_in_place:
                return [self.groups.reshape(wire, shapes[0]), wire]
            arrays: list[Tensor] = []
            if sizes := [self.sizes[i] for i in self.alone]:
                front = self.groups.narrow(wire, 1, 0, sum(sizes))
                arrays += torch.split_with_sizes_copy(front, sizes, 1)
            arrays += (torch.as_strided_copy(wire, *how) for how in self._copies(wire))
            for some, x in zip(self.arrays, arrays, strict=True):
                shape = shapes[some[0]]
                several = len(some) > 1
                y = self.groups.reshape(x, (len(some), *shape) if several else shape)
                placed |= zip(some, y.unbind() if several else [y], strict=True)
            return [*(placed[i] for i in range(len(shapes))), *arrays]

    def received_into(self, wire: Tensor, arrays: Sequence[Tensor]) -> None:
        """Wait for it, and put it into arrays that hold as much as those of ``received``."""
        import torch

        with torch.no_grad():
            wire = self.groups.received(wire)
            if self.arrives_in_place:
                return
            sizes = [self.sizes[i] for i in self.alone]
            alone, alike = arrays[: len(sizes)], arrays[len(sizes) :]
            if sizes:
                rows = [self.groups.reshape(x, (len(wire), n)) for x, n in zip(alone, sizes, strict=True)]
                front = self.groups.narrow(wire, 1, 0, sum(sizes))
                torch.split_with_sizes_copy(front, sizes, 1, out=rows)
            for x, (dims, by, at) in zip(alike, self._copies(wire), strict=True):
                torch.as_strided_copy(wire, dims, by, at, out=self.groups.reshape(x, dims))

    def _copies(self, wire: Tensor) -> Iterator[tuple[Extents, Extents, int]]:
        """How the parameters that are taken out together lie in the message: (sizes, strides, offset) of each array."""
        first = wire.storage_offset() + sum(self.sizes[i] for i in self.alone)
        for some in self.alike:
            v, n = self.views[some[0]], self.sizes[some[0]]
            assert v.arriving is not None
            dims = (*v.ways, *v.seen)
            by = (*_strides(v.ways, wire.stride(0)), *_strides(v.seen, 1))
            several = len(some) > 1
            yield (
                (*([len(some)] * several), *(dims[i] for i in v.arriving)),
                (*([n] * several), *(by[i] for i in v.arriving)),
                first,
            )
            first += n * len(some)


def _operands_of(n: FxNode) -> frozenset[tuple[str, str]]:
    """The ops that read a node, each with the operands as which it reads it."""
    return frozenset(
        (str(u.target), str(name))
        for u in n.users
        for name, x in (*enumerate(u.args), *u.kwargs.items())
        if x is n
    )


def _fewer_together(v: WireView, count: int) -> bool:
    """Whether it takes fewer ops to take parameters out of a message by one copy. One that arrives as it is needs only
    a view of a part of the message."""
    one_by_one = count if v.along == (None, 0) else math.inf
    return one_by_one > (3 if count > 1 else 2)


def _strides(sizes: Extents, last: int) -> Iterator[int]:
    """The strides of dims that lie one after another in memory. last: that of the last dim."""
    yield from (last * math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
