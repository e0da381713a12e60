"""The place of each node of a model in a chain of equal blocks: before the blocks, in one of them, or after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import Infeasible
from pase.ir import Graph, Node, Place
from pase.ir.blocks import holders, micro_batches_of
from pase.machine import CostModel, mesh_from
from pase.tables.charges import is_of_parameter
from pase.tables.layouts import concrete_size

if TYPE_CHECKING:
    from pase.ir.blocks import Block

__all__ = ["Places", "StagePart", "ends_sum_s", "outermost_loops", "places_of", "send_s"]

StagePart = str
"""A part of a model. Equal blocks: "first", "block" or "last". Unequal units: the part of each (``chain_places``)."""
_STORED = ("parameter", "input", "constant")  # graphs list these first, no matter which nodes read them


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of a model's nodes.

    parts: node -> its place. A parameter that several parts read (a tied embedding) is in each of them, and so is the
    copy node through which they read it.
    blocks: the number of equal blocks, which a loop runs or which are written out.
    crossing: (node, tensor) of what one block passes to the next, with or without a gradient.
    numbers: node -> the written-out blocks that it is in or that read it, from 0; empty for blocks of a loop.
    """

    parts: Mapping[str, tuple[StagePart, ...]]
    blocks: int
    crossing: tuple[tuple[str, str], ...]
    numbers: Mapping[str, set[int]]
    sizes: Mapping[StagePart, int] = field(default_factory=dict)
    """The number of equal units in each part, over which its costs are divided."""
    copies: frozenset[str] = frozenset()
    """The copy nodes of parameters."""

    def of(self, node: str) -> StagePart:
        """Return the part that pays for a node: the first, if there are several."""
        return self.parts[node][0]

    def stages_of(self, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return node -> the stages that have it, for nodes that not all stages have.

        cuts: the number of blocks of each stage.
        """
        of_block = [k for k, many in enumerate(cuts) for _ in range(many)]
        every = range(self.blocks)
        out = {}
        for name, parts in self.parts.items():
            inside = (of_block[b] for b in self.numbers.get(name, every)) if "block" in parts else ()
            ends = {"first": 0, "last": len(cuts) - 1}
            found = {*inside, *(ends[p] for p in parts if p != "block")}
            if len(found) < len(cuts):
                out[name] = tuple(sorted(found))
        return out

    @cached_property
    def in_one_stage(self) -> Places:
        """The same places if one stage has all parts. Nodes that several parts read are then there once."""
        return replace(self, parts={name: parts[:1] for name, parts in self.parts.items()})

    @property
    def tied(self) -> tuple[str, ...]:
        """The parameters that both the first and the last stage read."""
        ends = (n for n, parts in self.parts.items() if {"first", "last"} <= set(parts))
        return tuple(n for n in ends if n not in self.copies)


def send_s(model: CostModel, ranks: int, inner: int, nbytes: float) -> float:
    """Return the seconds to send a device's bytes to the next of ``ranks``, each of ``inner`` devices, over the
    outermost links."""
    mesh = mesh_from(f"stage={ranks},inner={inner}", ranks * inner)
    return float(model.collective("permute", mesh, 1, nbytes))


def ends_sum_s(model: CostModel, ranks: int, inner: int, nbytes: float) -> float:
    """Return the seconds to sum the gradients of tied parameters over the first and the last rank.

    nbytes: a device's bytes of them.
    """
    if not nbytes:
        return 0.0
    rest = max(ranks * inner // 2, 1)  # of an odd number of devices, the one in the middle does not take part
    mesh = mesh_from(f"ends=2,rest={rest}", 2 * rest)
    return float(model.collective("all_reduce", mesh, 1, nbytes))


def places_of(graph: Graph, written_out: Sequence[Block] = ()) -> Places:
    """Find the blocks: the loop with the highest trip count, or else written-out blocks of equations
    (``pase.frontends.jax.blocks.blocks_of``).

    Raises Infeasible if the model has neither, or several such loops.
    """
    micro_batches = micro_batches_of(graph)
    times = {
        n.name: max(int(concrete_size(op.times, n.name)) for op in n.ops)
        // (1 if n.kind in ("input", "constant") else micro_batches)
        for n in graph.nodes
    }
    blocks = max(times.values(), default=1)
    numbers: dict[str, set[int]] = {}
    if blocks > 1:
        loops = outermost_loops(n for n in graph.nodes if times[n.name] == blocks)
        if len(loops) > 1:
            raise Infeasible(
                f"it has {len(loops)} loops of {blocks} iterations, and stages are cut from a single loop over layers",
                where=f"'{graph.name}'",
                fix="leave out pipeline (--pipeline)",
            )
        inside = {name for name, many in times.items() if many > 1}
        at = [i for i, n in enumerate(graph.nodes) if times[n.name] == blocks and n.kind not in _STORED]
        crossing = tuple(
            (n.name, a.tensor)
            for n in graph.nodes
            if n.kind == "carry" and times[n.name] == blocks
            for op in n.ops
            for a in op.writes
        )
    else:
        blocks = len(written_out)
        if blocks < 2:
            raise Infeasible(
                "it has no equal blocks to cut it between: no loop over layers, and no equal layers in a row",
                where=f"'{graph.name}'",
                fix="leave out pipeline (--pipeline)",
            )
        held_by = holders(written_out)
        inside = {
            n.name
            for n in graph.nodes
            if n.kind not in (*_STORED, "output") and any(held_by(op.eqn) for op in n.ops)
        }
        at = [i for i, n in enumerate(graph.nodes) if n.name in inside]
        numbers = {name: {min(i for op in graph.node[name].ops for i in held_by(op.eqn))} for name in inside}
        crossing = _handed_on(graph, blocks // 2, held_by)
    parts: dict[str, tuple[StagePart, ...]] = {}
    for i, n in enumerate(graph.nodes):
        parts[n.name] = ("block",) if n.name in inside else ("first",) if i < at[0] else ("last",)
    copies = {
        n.name
        for n in graph.nodes
        if n.kind == "copy" and n.name not in inside and is_of_parameter(graph, n.ops[0].writes[0].tensor)
    }
    order: tuple[StagePart, ...] = ("first", "block", "last")
    readers: dict[str, list[str]] = {n.name: [] for n in graph.nodes}
    for e in graph.edges:
        readers[e.src].append(e.dst)
    for n in reversed(graph.nodes):  # a copy's readers come after it
        if n.kind in _STORED or n.name in copies:
            found = {p for r in readers[n.name] for p in parts[r]}
            parts[n.name] = tuple(p for p in order if p in found) or ("first",)
            for r in readers[n.name]:
                if r in numbers:
                    numbers.setdefault(n.name, set()).update(numbers[r])
    sizes = {"first": 1, "block": blocks, "last": 1}
    return Places(
        parts=parts, blocks=blocks, crossing=crossing, numbers=numbers, sizes=sizes, copies=frozenset(copies)
    )


def outermost_loops(nodes: Iterable[Node]) -> set[str]:
    """Return the paths of the loops around these nodes' ops that are in no other loop."""
    scopes = (op.scope for n in nodes for op in n.ops)
    around = (next((s.path for s in scope if s.kind == "loop"), None) for scope in scopes)
    return {path for path in around if path is not None}


def _handed_on(
    graph: Graph, middle: int, held_by: Callable[[Place], list[int]]
) -> tuple[tuple[str, str], ...]:
    """Return what is made before the middle block and read in or after it.

    This goes op by op, because a node may have ops of two blocks.
    """
    made, read = dict[str, tuple[str, int]](), dict[str, int]()
    for n in graph.nodes:
        for op in n.ops:
            for block in held_by(op.eqn):
                made.update({a.tensor: (n.name, block) for a in op.writes})
                read.update({a.tensor: max(block, read.get(a.tensor, 0)) for a in op.reads})
    return tuple(
        (name, tensor) for tensor, (name, block) in made.items() if block < middle <= read.get(tensor, -1)
    )
