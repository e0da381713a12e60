"""What backward needs of what forward made: which tensors are kept, from where to where.

The derivative of an op needs operands of products and of non-linear functions, or their results (exp, tanh, …).
A compiler does not keep a value that it can make again within the reader's own fusion: cheap elementwise ops, casts
and views of one large operand are followed back to that operand, and that is kept. Sums of two activations are
kept as they are. A derivative rule that the user wrote needs what its backward reads of forward, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pase.ir import Graph, Node, Op, Scope
from pase.ir.blocks import turns_of
from pase.ir.functions import UNSTACK
from pase.ir.recompute import needs
from pase.ir.sizes import Size, product
from pase.ir.types import LEAF
from pase.once import once
from pase.tables.layouts import number

__all__ = ["Kept", "kept", "residual_bytes", "written_bytes"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor that backward needs.

    region: the rematerialised region that makes it again; None: kept from forward on.
    times: how many of it exist at once, in one micro-batch: one for each turn of the loops in which it is both made and
        read. In a region: of one run of the region. A stack that a loop fills is read after the loop, so there is one.
    """

    tensor: str
    region: tuple[Scope, ...] | None
    times: int


@once
def kept(graph: Graph) -> dict[str, Kept]:
    """tensor -> Kept, of all that backward needs."""
    found: dict[str, Kept] = {}
    for k in _kept(graph):
        before = found.get(k.tensor)
        if before is None or _lasting(k) > _lasting(before):
            found[k.tensor] = k
    return found


def _lasting(k: Kept) -> tuple[bool, int, int]:
    """Larger if it lives longer, or if there is more of it."""
    return k.region is None, -len(k.region or ()), k.times


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Where a tensor is made. scope: of the op that gives it its value; for a loop's carry, the body of its loop, which
    gives it another one at each turn."""

    node: Node
    op: Op
    scope: tuple[Scope, ...]


def _makers(graph: Graph) -> Iterator[tuple[str, _Made]]:
    for n in graph.nodes:
        closes = next((op for op in n.ops if op.kind == "carry" and not op.writes), None)
        for op in n.ops:
            scope = closes.scope if closes is not None and op.kind == "carry" else op.scope
            yield from ((a.tensor, _Made(node=n, op=op, scope=scope)) for a in op.writes)


def _kept(graph: Graph) -> Iterator[Kept]:
    constant = frozenset(t.name for t in graph.tensors.values() if t.role == "constant")
    maker, turns = dict(_makers(graph)), _turns(graph)

    def keep(t: str, reader: Op) -> Kept:
        made = maker[t]
        shared = _shared(made.scope, reader.scope)
        # What leaves the region that makes it is kept from forward on, as is a result that a policy keeps.
        region = _region(shared) if made.op.remat else None
        outside = turns[_loops(region or ())]
        return Kept(tensor=t, region=region, times=turns[_loops(shared)] // outside)

    for n in graph.nodes:
        for op in n.ops:
            if not op.backward and not any(graph.tensors[a.tensor].needs_grad for a in op.writes):
                continue
            for t in needs(op, graph.tensors):
                root = _root(graph, n, op, t, maker, constant)
                if root is not None:
                    yield keep(root, op)
    for n in graph.nodes:  # the regions' inputs: what is made again starts from them
        for op, a in n.reads:
            if op.region is None or a.gradient:
                continue
            root = _moved(a.tensor, maker)
            if root not in maker or maker[root].node.kind in ("parameter", "constant"):
                continue
            if maker[root].scope[: len(op.region)] != op.region:
                yield keep(root, op)


def _loops(scope: tuple[Scope, ...]) -> tuple[Scope, ...]:
    """The scopes that run more than once each time that what is around them runs."""
    return tuple(s for s in scope if s.kind not in ("remat", "branch"))


def _region(scope: tuple[Scope, ...]) -> tuple[Scope, ...] | None:
    """The innermost rematerialised region of a scope, with all that is around it."""
    inner = next((i for i in reversed(range(len(scope))) if scope[i].kind == "remat"), None)
    return None if inner is None else scope[: inner + 1]


def _shared(a: tuple[Scope, ...], b: tuple[Scope, ...]) -> tuple[Scope, ...]:
    """The scopes that both are in."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:same]


def _turns(graph: Graph) -> Mapping[tuple[Scope, ...], int]:
    """Loops, outermost first -> how often the body of the innermost one runs in a micro-batch."""
    found: dict[tuple[Scope, ...], int] = {}
    for n in graph.nodes:
        for op in () if n.kind in LEAF else n.ops:
            found[_loops(op.scope)] = number(op.times, n.name) // turns_of(graph)
    # A body that has nothing but a loop in it runs no more often than that loop's body.
    for inner in sorted(found, key=len, reverse=True):
        for i in range(len(inner)):
            found[inner[:i]] = min(found.get(inner[:i], found[inner]), found[inner])
    return found | {(): 1}


def _moved(t: str, maker: Mapping[str, _Made]) -> str:
    """The tensor of which this one is a copy, or one turn's slice."""
    while t in maker and (maker[t].op.kind == "copy" or maker[t].op.function is UNSTACK):
        t = maker[t].op.reads[0].tensor
    return t


def _root(
    graph: Graph, reader: Node, by: Op, t: str, maker: Mapping[str, _Made], constant: frozenset[str]
) -> str | None:
    """The tensor that is kept for ``t``: what it is cheaply made of in the reader's node, on the same side of a
    rematerialised region's border. by: the op that needs t. None: nothing is."""
    least = t
    while True:
        t = _moved(t, maker)
        if t not in maker or t in constant:
            return None
        n, op = maker[t].node, maker[t].op
        if op.kind == "cotangent" and graph.tensors[t].needs_grad:
            t = op.reads[0].tensor
            continue
        if op.backward or op.kind == "cotangent":  # made in backward itself
            return None
        if n.kind in ("parameter", "constant"):
            return None
        near = n is reader and op.region == by.region  # what enters a region, or leaves it, is kept as it is
        if not near or op.kind not in ("elementwise", "view", "generate") or op.function.expensive:
            return t
        size = graph.tensors[t].elements
        large = [
            a.tensor
            for a in op.reads
            if a.tensor not in constant and a.tensor in maker and _as_large(graph, a.tensor, size)
        ]
        if len(set(large)) != 1:
            if large:
                return t
            # What is made of parts that are as large together (halves that a rotation joins) is kept, as the narrowest
            # of its casts; what is made of small operands is not.
            whole = _of_parts(graph, op, size, constant)
            return min((least, t), key=lambda x: graph.tensors[x].itemsize) if whole else None
        if graph.tensors[t].itemsize < graph.tensors[least].itemsize:
            least = t
        t = large[0]


def _as_large(graph: Graph, t: str, size: Size) -> bool:
    """Is the tensor as large as its reader's result?"""
    return bool(graph.tensors[t].elements == size)


def _of_parts(graph: Graph, op: Op, size: Size, constant: frozenset[str]) -> bool:
    """Are the op's operands as large together as its result?"""
    parts = {a.tensor for a in op.reads if a.tensor not in constant}
    together = sum(number(graph.tensors[t].elements, t) for t in parts)
    return len(parts) > 1 and together >= number(size, op.name)


def residual_bytes(graph: Graph) -> int:
    """Bytes that one device keeps from forward to backward if nothing is split, in one micro-batch: ``kept``, without
    parameters and inputs, and with the rematerialised region that has the most inside."""
    regions: dict[tuple[Scope, ...] | None, int] = {}
    for k in kept(graph).values():
        t = graph.tensors[k.tensor]
        if t.role == "activation":
            regions[k.region] = regions.get(k.region, 0) + k.times * number(t.nbytes, t.name)
    return regions.pop(None, 0) + max(regions.values(), default=0)


def written_bytes(graph: Graph) -> int:
    """An upper bound on what a micro-batch can keep for backward, in bytes, if nothing is split: its inputs, all that
    its ops write in all turns of their loops, and each parameter once for each time that it is read."""
    turns, total = turns_of(graph), 0
    for n in graph.nodes:
        for op in n.ops:
            times = number(op.times, n.name) // (1 if n.kind in LEAF else turns)
            for a in () if op.kind == "parameter" else op.writes:
                t = graph.tensors[a.tensor]
                touched = (
                    t.elements if not a.sparse or not op.over else product(n.space[d].size for d in op.over)
                )
                total += times * t.itemsize * number(touched, t.name)
            total += sum(
                times * number(graph.tensors[a.tensor].nbytes, a.tensor)
                for a in op.reads
                if graph.tensors[a.tensor].role == "parameter"
            )
    return total
