"""A model without equal blocks as a chain of units, between the cut points of its graph.

A cut point is a place that few activations cross: they are made before it and read after it. What is computed from
parameters alone, or from the batch alone, does not count, because every stage that needs it computes it. In a loop over
layers (a loop that takes its parameters from stacks), every iteration is a unit. Everything else in a loop, a branch or
a rematerialised region stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pase.ir.blocks import Block, holders
from pase.ir.sizes import Size
from pase.ir.types import Graph, Node, Op

__all__ = ["UnitChain", "chain_of", "loops_over_layers", "op_work"]

_PARTS = 32
"""Cuts are at least 1/32 of the model's work apart, except the cuts between the iterations of a loop over layers."""
_STORED = ("parameter", "input", "constant")


@dataclass(frozen=True, kw_only=True)
class UnitChain:
    """A model as a chain of units.

    units: the number of units.
    of: node -> its units as [first, end); more than one for nodes inside a loop over layers. It has only the nodes that
        work on activations. A node may contain ops of several regions or blocks; this is the unit of the first of them.
    crossing: for each place between two units, (node, tensor) of the activations that cross it, with or without
        gradients. The first place is after unit 0.
    loops: path of a loop over layers -> its units.
    at: path of an equation -> its unit. Unlike ``of``, ``at`` and ``crossing`` are exact for each equation. Regions and
        blocks are never cut.
    """

    units: int
    of: Mapping[str, tuple[int, int]]
    crossing: tuple[tuple[tuple[str, str], ...], ...]
    loops: Mapping[str, tuple[int, int]]
    at: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class _UnitNodes:
    """Nodes that stay together.

    key: the path of the scope around them, or the name of the block or of the single node.
    trip_count: the trip count of a loop over layers, else 1.
    """

    names: list[str]
    key: str
    trip_count: int
    work: float


def loops_over_layers(graph: Graph) -> dict[str, tuple[str, int]]:
    """Each outermost loop that reads stacked parameters, one slice per iteration: path of its scope -> (the loop's own
    path, its trip count)."""
    out: dict[str, tuple[str, int]] = {}
    sliced = [(graph.node[e.src], e.op) for e in graph.edges] + [(n, op) for n in graph.nodes for op in n.ops]
    for n, op in sliced:
        if n.kind == "parameter" and op.eqn.part == "x" and op.scope[:1] and op.scope[0].kind == "loop":
            trip_count = round(_number(op.times) / _number(n.ops[0].times))
            out[op.scope[0].path] = op.eqn.path, trip_count
    return dict(sorted(out.items()))


def op_work(n: Node) -> float:
    """Approximate FLOPs of a node's forward, used to balance units."""
    return sum(_number(op.times) * _points(n, op) * op.flops_per_point for op in n.ops)


def _points(n: Node, op: Op) -> float:
    return math.prod(_number(n.space[d].size) for d in op.worked)


def _number(size: Size) -> float:
    return float(size)


@dataclass(frozen=True)
class _UnitFlow:
    """An activation that one node makes and another reads.

    made, read: the groups (loop, region, block or node) of the op that makes it and of the op that reads it.
    in_loop: whether the reader is inside a scope.
    """

    node: str
    tensor: str
    made: str
    read: str
    in_loop: bool


def chain_of(graph: Graph, blocks: Sequence[Block] = ()) -> UnitChain:
    """Returns the chain of units of a graph.

    graph: the simplified graph of a step in micro-batches, or of one micro-batch; both give the same units.
    blocks: written-out blocks. No cut falls inside one, because a block may be recomputed as a whole.
    """
    return _ChainFinder(graph, blocks).chain()


class _ChainFinder:
    """Finds the units of a graph."""

    def __init__(self, graph: Graph, blocks: Sequence[Block]) -> None:
        self.graph, self.layers = graph, loops_over_layers(graph)
        self.held_by = holders(blocks)

    @cached_property
    def active(self) -> frozenset[str]:
        """The nodes that work on activations: their results depend on both parameters and the batch."""
        parameters, batch = set[str](), set[str]()
        reads = dict[str, set[str]]()
        for e in self.graph.edges:
            reads.setdefault(e.dst, set()).add(e.src)
        for _ in range(2):  # the second pass follows loop carries
            for n in self.graph.nodes:
                read = reads.get(n.name, set())
                if n.kind == "parameter" or read & parameters:
                    parameters.add(n.name)
                if n.kind == "input" or read & batch:
                    batch.add(n.name)
        both = parameters & batch
        return frozenset(n.name for n in self.graph.nodes if n.name in both and n.kind not in _STORED)

    def chain(self) -> UnitChain:
        groups = self._ordered(self._groups())
        cuts = self._cuts(groups)
        of, loops, at, unit = dict[str, tuple[int, int]](), dict[str, tuple[int, int]](), dict[str, int](), 0
        place = dict[str, tuple[int, int]]()
        for i, g in enumerate(groups):
            place[g.key] = unit, unit + g.trip_count
            if g.key in self.layers:
                loops[self.layers[g.key][0]] = place[g.key]
            unit += g.trip_count if i in cuts else g.trip_count - 1
        for name, key in self.keys.items():
            of[name] = place[key]
            for op in self.graph.node[name].ops:
                at.setdefault(op.eqn.path, place[self._key_of(name, op)][0])
        units = unit + 1
        crossing = tuple(self._crossing(place, c) for c in range(1, units))
        return UnitChain(units=units, of=of, crossing=crossing, loops=loops, at=at)

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """Node that works on activations -> the loop, region or block that contains it, or else its own name."""
        return {
            n.name: self._around(n) or f"node {n.name}" for n in self.graph.nodes if n.name in self.active
        }

    @cached_property
    def _held(self) -> frozenset[str]:
        return frozenset(self.keys.values())

    def _key_of(self, name: str, op: Op) -> str:
        """The group of an op of this node. The ops of one node may be in several regions or blocks."""
        own = self._region(op)
        return own if own in self._held else self.keys[name]

    @cached_property
    def flows(self) -> tuple[_UnitFlow, ...]:
        """The activations that flow to ops of other nodes, or of other regions of the same node."""
        out = list[_UnitFlow]()
        for n in self.graph.nodes:
            made = {a.tensor: op for op in n.ops for a in op.writes} if n.name in self.keys else {}
            if len({self._key_of(n.name, op) for op in made.values()}) > 1:
                for op in n.ops:
                    for t in {a.tensor for a in op.reads if a.tensor in made}:
                        ends = self._key_of(n.name, made[t]), self._key_of(n.name, op)
                        if ends[0] != ends[1]:
                            out.append(_UnitFlow(n.name, t, *ends, bool(op.scope)))
        for e in self.graph.edges:
            if e.src in self.keys and e.dst in self.keys:
                maker = next(
                    (op for op in self.graph.node[e.src].ops if any(a.tensor == e.tensor for a in op.writes)),
                    None,
                )
                src = self.keys[e.src] if maker is None else self._key_of(e.src, maker)
                out.append(_UnitFlow(e.src, e.tensor, src, self._key_of(e.dst, e.op), bool(e.op.scope)))
        return tuple(out)

    def _groups(self) -> list[_UnitNodes]:
        """The groups of nodes that work on activations, in program order. A loop or a region is one group."""
        found = dict[str, list[str]]()
        for name, key in self.keys.items():
            found.setdefault(key, []).append(name)
        return [
            _UnitNodes(
                names=names,
                key=key,
                trip_count=self.layers[key][1] if key in self.layers else 1,
                work=sum(op_work(self.graph.node[n]) for n in names),
            )
            for key, names in found.items()
        ]

    def _around(self, n: Node) -> str:
        scopes = [s for op in n.ops for s in op.scope[:1] if s.kind != "program"]
        return scopes[0].path if scopes else self._block(n.main)

    def _region(self, op: Op) -> str:
        return next((s.path for s in op.scope[:1] if s.kind != "program"), "") or self._block(op)

    def _block(self, op: Op) -> str:
        held = self.held_by(op.eqn)
        return f"block {held[0]}" if held else ""

    def _ordered(self, groups: Sequence[_UnitNodes]) -> list[_UnitNodes]:
        """Orders the groups so that each directly follows what only it needs, with the longest path first. If two
        branches meet, the one with more work is finished before the other begins, and small groups stay next to their
        reader."""
        number = {g.key: i for i, g in enumerate(groups)}
        before: list[set[int]] = [set() for _ in groups]
        for f in self.flows:
            if f.made != f.read:
                before[number[f.read]].add(number[f.made])
        total = [0.0] * len(groups)
        for i in _postorder(before, [sorted(b) for b in before]):
            total[i] = groups[i].work + max((total[j] for j in before[i]), default=0.0)
        first = [sorted(b, key=lambda j: (-total[j], j)) for b in before]
        return [groups[i] for i in _postorder(before, first)]

    def _cuts(self, groups: Sequence[_UnitNodes]) -> set[int]:
        """The groups after which the chain is cut. It is cut on both sides of each loop over layers, and otherwise
        where the fewest activations cross (then the fewest bytes), with a minimum of work between cuts."""
        place = {g.key: (i, i + 1) for i, g in enumerate(groups)}
        ends = [0.0]
        for g in groups:
            ends.append(ends[-1] + g.work)
        least = ends[-1] / _PARTS
        cuts = {
            i
            for i in range(len(groups) - 1)
            if groups[i].key in self.layers or groups[i + 1].key in self.layers
        }

        def width(i: int) -> tuple[int, float, int]:
            tensors = {t for _, t in self._crossing(place, i + 1)}
            return len(tensors), float(sum(self.graph.tensors[t].nbytes for t in tensors)), i

        taken = [ends[0], ends[-1], *(ends[i + 1] for i in cuts)]
        for i in sorted(set(range(len(groups) - 1)) - cuts, key=width):
            if min(abs(ends[i + 1] - t) for t in taken) >= least:
                cuts.add(i)
                taken.append(ends[i + 1])
        return cuts

    def _crossing(self, place: Mapping[str, tuple[int, int]], cut: int) -> tuple[tuple[str, str], ...]:
        """The activations that are made before ``cut`` and read after it. Between a loop's iterations, its carry."""
        out = dict[tuple[str, str], None]()
        for f in self.flows:
            first, end = place[f.read]
            end = (
                end if f.in_loop else first + 1
            )  # a loop's initial values are read only in its first iteration
            alone = place[f.made] == place[f.read] and self.graph.node[f.node].kind != "carry"
            if place[f.made][0] < cut < end and not alone:
                out[f.node, f.tensor] = None
        return tuple(out)


def _postorder(before: Sequence[set[int]], order: Sequence[Sequence[int]]) -> list[int]:
    """Orders the numbers so that each follows those that it needs (``before``), each as late as possible."""
    out, seen = list[int](), set[int]()
    needed = set[int]().union(*before) if before else set()
    for root in [i for i in range(len(before)) if i not in needed]:
        stack = [(root, iter(order[root]))]
        seen.add(root)
        while stack:
            at, rest = stack[-1]
            nxt = next((j for j in rest if j not in seen), None)
            if nxt is None:
                stack.pop()
                out.append(at)
            else:
                seen.add(nxt)
                stack.append((nxt, iter(order[nxt])))
    return out
