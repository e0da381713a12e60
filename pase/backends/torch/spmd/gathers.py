"""Parameters that are gathered one message ahead of their use.

A recorded program gathers a parameter where it is read, and waits. Here, the gathers of neighbouring readers are joined
in messages of about a bucket's size. While the readers of one message compute, the next message is under way. What a
message carries follows from the local program alone, so it is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import EdgeCall
from pase.backends.torch.spmd.messages import FIRST_BYTES
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import ProgramCall
from pase.local.parts import WireView, view
from pase.local.types import LocalProgram, LocalReshardStep, local_shape

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.fx import Node as FxNode

__all__ = ["gather_messages", "gathered_ahead"]


def gather_messages(program: LocalProgram, bucket_bytes: float) -> tuple[tuple[int, ...], ...]:
    """The transfers that each message gathers, in the order in which they are read.

    They gather trained parameters as they are stored, once in a micro-batch. All others are gathered where they are
    read: in loops, in recomputed blocks, and by a pipeline's stage once for all micro-batches.
    """
    stored = {op.results[0].tensor for op in program.ops if op.op.kind == "parameter"}
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
        if nbytes >= (bucket_bytes if closed else min(FIRST_BYTES, bucket_bytes)):
            closed.append(tuple(mine))
            mine.clear()
    return (*closed, *(tuple(mine) for mine in open_.values() if mine))


def _itemsize(program: LocalProgram, number: int) -> int:
    """The bytes of an element of what a transfer gathers."""
    t = program.transfers[number]
    step, shape = t.forward[0], program.result(t.tensor).shape
    return step.nbytes // max(1, math.prod(local_shape(shape, step.after, program.mesh)))


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
        wire.meta |= {k: v for k, v in first.meta.items() if k != "val"}
        arrived.meta |= wire.meta
        for e, part in zip(edges_of, parts, strict=True):
            part.meta |= e.node.meta
            e.node.target = ProgramCall(_Arrived(e.edge), e.node.target.name)
            e.node.args = (*e.node.args, part)


@dataclass(frozen=True)
class _GatherEdge:
    """A node of a graph that gathers a parameter, and the parameter."""

    node: FxNode
    value: FxNode
    edge: EdgeCall
    number: int


def _edges(graph: Graph) -> Mapping[int, _GatherEdge]:
    """Transfer -> the edge that runs it, for edges of the program's inputs that run once."""
    import torch

    found: dict[int, list[_GatherEdge]] = {}
    for n in graph.nodes:
        edge = n.target.run if isinstance(n.target, ProgramCall) else None
        if isinstance(edge, EdgeCall) and edge.later is not None:
            value = n.args[0]
            plain = isinstance(value, torch.fx.Node) and value.op == "placeholder"
            made = [_GatherEdge(n, value, edge, edge.later.number)] if plain else []
            found.setdefault(edge.later.number, []).extend(made)
    return {number: some[0] for number, some in found.items() if len(some) == 1}


@dataclass(frozen=True)
class _Arrived:
    """An edge whose forward has been done before: its last operand is the result."""

    edge: EdgeCall

    def __call__(self, *args: Tensor) -> Tensor:
        *given, arrived = args
        return replace(self.edge, there=lambda x: arrived)(*given)


@dataclass(frozen=True)
class _GatherMessage:
    """A message. views: how each parameter is put together. sizes: the elements that a rank sends of each."""

    groups: AxisGroups
    step: LocalReshardStep
    views: Sequence[WireView]
    sizes: Sequence[int]

    @classmethod
    def of(cls, edges: Sequence[_GatherEdge], program: LocalProgram, groups: AxisGroups) -> _GatherMessage:
        transfers = [program.transfers[e.number] for e in edges]
        steps = [t.forward[0] for t in transfers]
        shapes = [program.result(t.tensor).shape for t in transfers]
        views = [view(s, shape, program.mesh) for s, shape in zip(steps, shapes, strict=True)]
        return cls(groups, steps[0], views, [math.prod(v.seen) for v in views])

    def started(self, *parameters: Tensor) -> Tensor:
        """Start it: this rank's parts -> what arrives, [ranks, elements]."""
        import torch

        with torch.no_grad():
            wire = torch._chunk_cat(list(parameters), 0, 1)
            return self.groups.started_all_gather(wire, self.step.axes)

    def received(self, wire: Tensor) -> list[Tensor]:
        """Wait for it: the parameters in the layout in which they are read."""
        import torch

        with torch.no_grad():
            wire = self.groups.received(wire)
            parts = torch.split_with_sizes_copy(wire, list(self.sizes), 1)
            return [self._placed(x, v) for x, v in zip(parts, self.views, strict=True)]

    def _placed(self, x: Tensor, v: WireView) -> Tensor:
        """[ranks, elements] -> the parameter."""
        if v.along == (None, 0):
            return self.groups.reshape(x, v.shape)
        assert v.arriving is not None
        return self.groups.rearranged(x, (*v.ways, *v.seen), v.arriving, v.shape)
