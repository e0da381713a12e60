"""Two rewrites of a graph: repeated blocks become rematerialised regions, and a step is divided into micro-batches.

Both return an ordinary graph. Its cost follows from ``Op.remat``, ``Op.scope`` and ``Op.times``, as for any graph.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pase.ir.facts import Hoisted
from pase.ir.places import Place, Scope
from pase.ir.types import LEAF, Graph, Node, Op

__all__ = [
    "Block",
    "Hoisted",
    "RecomputeKind",
    "accumulated",
    "attention_cores",
    "gathering_again_text",
    "hoisted_of",
    "hoisted_text",
    "holders",
    "kept_results",
    "micro_batches_of",
    "recompute_text",
    "rematerialised",
]


RecomputeKind = Literal["all", "light", "attention"]
"""What backward recomputes of a block. all: everything. light: everything except the results of products with weights
and of fused attention, which are kept. attention: the attention, which is then the whole block."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A run of equations: ``start`` to ``stop - 1`` in the list of equations whose paths begin with ``prefix``.

    recompute: what backward recomputes of the block.
    """

    prefix: str
    start: int
    stop: int
    recompute: RecomputeKind = "all"

    @property
    def region(self) -> Scope:
        return Scope("remat", f"{self.prefix}{self.start}-{self.stop}")


_PARTS = {"all": "{}", "light": "light work of {}", "attention": "attention of {}"}


def recompute_text(blocks: Sequence[Block]) -> list[str]:
    """Describes what is recomputed, one part per kind.

    >>> recompute_text([Block(prefix="3.", start=0, stop=9, recompute="light")])
    ['light work of 1 block recomputed']
    """
    many = Counter(b.recompute for b in blocks)
    return [f"{_PARTS[how].format(f'{n} block' + 's' * (n != 1))} recomputed" for how, n in many.items()]


def rematerialised(graph: Graph, blocks: Sequence[Block]) -> Graph:
    """Returns the raw graph with each block as a rematerialised region. Ops that are already in one do not change."""
    stay, held_by, derived = kept_results(graph, blocks), holders(blocks), _weights(graph)

    def inside(op: Op) -> Op:
        found = held_by(op.eqn)
        if not found or op.kind in LEAF or op.region is not None:
            return op
        block = blocks[found[0]]
        around = [s for s in op.scope if s.encloses(block.prefix)]
        scope = (*around, block.region, *op.scope[len(around) :])
        return replace(op, scope=scope, remat=not (op.eqn in stay and _expensive(op, derived)))

    nodes = tuple(replace(n, ops=tuple(map(inside, n.ops))) for n in graph.nodes)
    return replace(graph, nodes=nodes)


def kept_results(graph: Graph, blocks: Sequence[Block]) -> frozenset[Place]:
    """The equations whose results are kept, in blocks of which only light work is recomputed. graph: the raw graph.

    An equation may be several ops, such as a product with its bias. It is kept if it computes exactly one expensive
    result and whatever else it computes from that is linear in it, because backward then needs none of its internal
    values.
    """
    light = [b for b in blocks if b.recompute == "light"]
    if not light:
        return frozenset()
    derived, held_by = _weights(graph), holders(light)
    ops = [op for n in graph.nodes for op in n.ops]
    many = Counter(op.eqn for op in ops if _expensive(op, derived))
    other = {op.eqn for op in ops if op.eqn in many and not _expensive(op, derived) and not _hands_on(op)}
    return frozenset(eqn for eqn, n in many.items() if n == 1 and eqn not in other and held_by(eqn))


def _hands_on(op: Op) -> bool:
    """Whether the op is light and its derivative needs none of its operands."""
    by_number = op.function.needs == "factors" and len(op.reads) == 1
    return op.kind in ("elementwise", "view", "copy") and (op.function.linear or by_number)


def holders(blocks: Sequence[Block]) -> Callable[[Place], list[int]]:
    """Returns f(place): the indices of the blocks that contain the equation at this place, in order.

    It is fast enough to call for every op of a deep model.
    """
    numbered: dict[str, dict[int, list[int]]] = {}
    for i, b in enumerate(blocks):
        here = numbered.setdefault(b.prefix, {})
        for number in range(b.start, b.stop):
            here.setdefault(number, []).append(i)

    def of(place: Place) -> list[int]:
        steps = ((numbered[prefix], number) for prefix, number in place.steps() if prefix in numbered)
        return sorted(i for here, number in steps for i in here.get(number, ()))

    return of


def _expensive(op: Op, weights: Collection[str]) -> bool:
    """Whether the op is expensive for the bytes that it makes: a product with a weight, or a fused attention."""
    return op.kind == "attention" or (
        op.kind in ("matmul", "conv") and any(a.tensor in weights for a in op.reads)
    )


def attention_cores(graph: Graph, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The attention in each block, from its scores to its result, as blocks. graph: the raw graph.

    This is the fused op or, if attention is written out, the products without a weight and everything between them.
    """
    weights = _weights(graph)
    ops = [op for n in graph.nodes for op in n.ops]
    cores = [op for op in ops if op.kind == "attention"] or [
        op for op in ops if op.kind == "matmul" and not _expensive(op, weights)
    ]
    held_by = holders(blocks)
    inside: list[list[Place]] = [[] for _ in blocks]
    for op in cores:
        for i in held_by(op.eqn):
            inside[i].append(op.eqn)
    return tuple(core for places in inside if (core := _around(places)) is not None)


def _around(places: Sequence[Place]) -> Block | None:
    """The shortest run of equations of one list that contains all these places; None if there is no such run."""
    paths = [path for p in places if (path := p.numbers()) is not None]
    if not paths or len(paths) < len(places):
        return None
    depth = next(
        i for i in itertools.count() if len({p[: i + 1] for p in paths}) > 1 or i + 1 == len(paths[0])
    )
    prefix = "".join(f"{number}." for number in paths[0][:depth])
    numbers = [p[depth] for p in paths]
    return Block(prefix=prefix, start=min(numbers), stop=max(numbers) + 1, recompute="attention")


def _weights(graph: Graph) -> set[str]:
    """The parameters, and the tensors that views and elementwise ops compute from parameters only."""
    made: set[str] = set()
    for n in graph.nodes:
        for op in n.ops:
            read = [a.tensor for a in op.reads if graph.tensors[a.tensor].role != "constant"]
            light = op.kind in ("view", "copy", "elementwise") and read and made.issuperset(read)
            if n.kind == "parameter" or light:
                made.update(a.tensor for a in op.writes)
    return made


def accumulated(graph: Graph, micro_batches: int, hoisted: Hoisted = "none") -> Graph:
    """Returns the graph of a step, given the graph of one micro-batch: all but the update runs once per micro-batch.

    hoisted: which collectives of parameters run only once per step (``pase.tables.charges.edge_flows``).
    """
    if hoisted != "none":
        graph = replace(graph, facts=replace(graph.facts, hoisted=hoisted))
    if micro_batches == 1:
        return graph

    def repeated(n: Node) -> Node:
        if n.kind in ("input", "constant"):
            return n
        return replace(n, ops=tuple(replace(op, times=op.times * micro_batches) for op in n.ops))

    facts = replace(graph.facts, micro_batches=micro_batches)
    return replace(graph, nodes=tuple(map(repeated, graph.nodes)), facts=facts)


def micro_batches_of(graph: Graph) -> int:
    """The number of micro-batches per step."""
    return graph.facts.micro_batches


def hoisted_of(graph: Graph) -> Hoisted:
    """Which collectives of parameters run only once per step."""
    return graph.facts.hoisted


_HOISTED: Mapping[Hoisted, tuple[str, ...]] = {
    "none": (),
    "gathers": ("parameters gathered once per step",),
    "all": ("parameters gathered and gradients reduced once per step",),
}


def hoisted_text(hoisted: Hoisted) -> list[str]:
    """Describes what is sent once per step: one part, or nothing."""
    return list(_HOISTED[hoisted])


def gathering_again_text(again: bool) -> list[str]:
    """Describes that backward gathers parameters again: one part, or nothing."""
    return ["parameters gathered again for backward"] if again else []
