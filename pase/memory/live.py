"""Memory of a program that is not trained, in addition to its parameters and inputs: the tensors still to be read.

Nothing is kept for backward. A tensor lives from where it is made to its last read, and a tensor that a loop reads from
outside lives as long as the loop runs. A value that is written in place (a cache, a loop's carry, a threaded input)
shares one array with its previous value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pase.ir import Graph, Node, Op, Scope
from pase.ir.types import LEAF
from pase.machine import Mesh
from pase.once import once
from pase.tables.layouts import local_bytes, written_and_read

__all__ = ["Lives", "is_trained", "live_bytes", "lives"]


@dataclass(frozen=True, kw_only=True)
class Lives:
    """The arrays of a graph. Leaves live throughout and have no array here. Nor do values that are written over them.

    members: per array, the tensors that it holds, one after the other.
    first, last: per array, the indices in ``graph.nodes`` between which it is alive.
    array: tensor -> the index of its array.
    """

    members: tuple[tuple[str, ...], ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    array: Mapping[str, int]


@once
def is_trained(graph: Graph) -> bool:
    """Whether anything in the graph has a gradient."""
    return any(t.needs_grad for t in graph.tensors.values())


def _in_place(n: Node, op: Op) -> bool:
    """Whether the op overwrites its first operand."""
    return op.kind == "carry" or (bool(op.writes) and op.writes[0].sparse and op.reads[0].sparse)


@once
def lives(graph: Graph) -> Lives:
    """Returns the arrays of a graph."""
    import networkx as nx

    place = {n.name: i for i, n in enumerate(graph.nodes)}
    same: nx.Graph[str] = nx.Graph()
    leaves: set[str] = set()
    for n in graph.nodes:
        own = n.ops[0].writes[0].tensor if n.ops[0].writes else None
        for op in n.ops:
            same.add_nodes_from(a.tensor for a in op.writes if graph.read_outside(n, a.tensor))
            if op.kind in LEAF:
                leaves.update(a.tensor for a in op.writes)
            elif op.reads and _in_place(n, op):
                over = op.writes[0].tensor if op.writes else own
                if over is not None:
                    same.add_edge(over, op.reads[0].tensor)
    readers: dict[str, list[Node]] = {}
    for n in graph.nodes:
        for _, a in n.reads:
            readers.setdefault(a.tensor, []).append(n)
    ends = _loop_ends(graph)
    members: list[tuple[str, ...]] = []
    first: list[int] = []
    last: list[int] = []
    array: dict[str, int] = {}
    for group in nx.connected_components(same):
        if group & leaves or not any(t in graph.producer for t in group):
            continue
        made = sorted((t for t in group if t in graph.producer), key=lambda t: place[graph.producer[t].name])
        start = place[graph.producer[made[0]].name]
        stop = max(
            (ends(place[n.name], graph.producer[t]) for t in made for n in readers.get(t, ())), default=start
        )
        if any(t in graph.outputs for t in made):
            stop = len(graph.nodes) - 1
        array.update(dict.fromkeys(made, len(members)))
        members.append(tuple(made))
        first.append(start)
        last.append(max(start, stop))
    return Lives(members=tuple(members), first=tuple(first), last=tuple(last), array=array)


def _loop_ends(graph: Graph) -> Callable[[int, Node], int]:
    """Returns f(index of a reader, producer): the last index at which the value must be alive for this reader."""
    end: dict[Scope, int] = {}
    for i, n in enumerate(graph.nodes):
        for s in n.main.loops:
            if s.kind == "loop":
                end[s] = i

    def at(reader: int, producer: Node) -> int:
        outer = set(producer.main.loops)
        around = [end[s] for s in graph.nodes[reader].main.loops if s in end and s not in outer]
        return max([reader, *around])

    return at


def live_bytes(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> float:
    """Returns the peak bytes on one device, without leaves.

    It counts the live arrays, and the copies that a node reads in another layout than they were made in.

    configs: node name -> int8 [axes].
    """
    known = lives(graph)
    at = np.zeros(len(graph.nodes) + 1)

    def local(n: Node, tensor: str) -> float:
        access = n.write_of(tensor)[1]
        return float(local_bytes(n, graph.tensors[tensor], access, configs[n.name][None, :], mesh)[0])

    for group, start, stop in zip(known.members, known.first, known.last, strict=True):
        held = max(local(graph.producer[t], t) for t in group)
        at[start] += held
        at[stop + 1] -= held
    there = np.cumsum(at)[:-1]
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    for e in graph.edges:
        if e.access.sparse or e.op.kind in ("carry", "output"):
            continue
        dst, tensor = graph.node[e.dst], graph.tensors[e.tensor]
        written, read = written_and_read(graph, dst, e.op, e.access, configs, mesh)
        if (written != read).any():
            there[place[e.dst]] += float(local_bytes(dst, tensor, e.access, configs[e.dst][None, :], mesh)[0])
    return float(there.max(initial=0.0))
