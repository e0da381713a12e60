"""Repeated blocks of a model as rematerialised regions, and a step in micro-batches: two rewrites of a graph.

Both leave the graph a graph: what they cost follows from ``Op.remat``, ``Op.scope`` and ``Op.times`` as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pase.ir.names import dim_classes
from pase.ir.places import Place, Scope
from pase.ir.sizes import is_one
from pase.ir.types import LEAF, Graph, Node, Op

__all__ = ["Block", "accumulated", "mixes_examples", "rematerialised", "turns_of"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Equations ``start`` … ``stop - 1`` of the list of equations whose paths begin with ``prefix``."""

    prefix: str
    start: int
    stop: int

    def holds(self, place: Place) -> bool:
        """Is the equation there one of them, or inside one?"""
        number = place.number_in(self.prefix)
        return number is not None and self.start <= number < self.stop

    @property
    def region(self) -> Scope:
        return Scope("remat", f"{self.prefix}{self.start}-{self.stop}")


def rematerialised(graph: Graph, blocks: Sequence[Block]) -> Graph:
    """The raw graph with each block a rematerialised region; ops that are in one already stay as they are."""

    def inside(op: Op) -> Op:
        block = next((b for b in blocks if b.holds(op.eqn)), None)
        if block is None or op.kind in LEAF or op.region is not None:
            return op
        around = [s for s in op.scope if s.encloses(block.prefix)]
        scope = (*around, block.region, *op.scope[len(around) :])
        return replace(op, scope=scope, remat=True)

    nodes = tuple(replace(n, ops=tuple(map(inside, n.ops))) for n in graph.nodes)
    return replace(graph, nodes=nodes)


def accumulated(graph: Graph, micro_batches: int) -> Graph:
    """The graph of one micro-batch as the graph of a step: everything but the update runs so many times."""
    if micro_batches == 1:
        return graph

    def repeated(n: Node) -> Node:
        if n.kind in ("input", "constant"):
            return n
        return replace(n, ops=tuple(replace(op, times=op.times * micro_batches) for op in n.ops))

    meta = {**graph.meta, "accumulate": str(micro_batches)}
    return replace(graph, nodes=tuple(map(repeated, graph.nodes)), meta=meta)


def turns_of(graph: Graph) -> int:
    """Micro-batches of a step."""
    return int(graph.meta.get("accumulate", "1"))


def mixes_examples(graph: Graph) -> str | None:
    """Where a value summed over the batch meets the batch again (batch norm), or two such sums one another (a mean by
    a counted weight): a step in micro-batches would then not give the same numbers. The op and its line; None: nowhere.

    graph: simplified.
    """
    classes = dim_classes(graph)
    batch = {
        classes[n.name, d]
        for n in graph.nodes
        if n.kind == "input"
        for first in n.ops[0].writes[0].map.walks[:1]
        for d in first.dims[:1]
    }
    summed: set[str] = set()
    for n in graph.nodes:
        for op in n.ops:
            if op.backward:  # gradients are summed over the batch, as ever
                continue
            own = {d for d in op.dims if classes[n.name, d] in batch}
            told = {a.tensor for a in op.reads} & summed
            if told and own:
                return f"{op.name} at {op.source or n.name}"
            if len(told) > 1 and not op.function.linear:
                return f"{op.name} at {op.source or n.name}"
            for a in op.writes:
                if told or (own - set(a.map.dims)):
                    summed.add(a.tensor)
            sequential = op.kind in ("sequential", "opaque") and own
            if sequential and any(not is_one(graph.tensors[a.tensor].elements) for a in op.reads):
                return f"{op.name} at {op.source or n.name}"
    return None
