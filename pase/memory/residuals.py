"""What backward needs of what forward made: which tensors are kept, from where to where.

The derivative of an op needs operands of products and of non-linear functions, or their results (exp, tanh, …).
A compiler does not keep a value that it can make again within the reader's own fusion: cheap elementwise ops, casts
and views of one large operand are followed back to that operand, and that is kept. Sums of two activations are
kept as they are. A derivative rule that the user wrote needs what its backward reads of forward, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pase.ir import Graph, Node, Op, Scope
from pase.ir.recompute import needs
from pase.ir.sizes import Size
from pase.once import once
from pase.tables.layouts import number

__all__ = ["Kept", "kept"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor that backward needs. region: of the rematerialised region that makes it again; None: kept from
    forward on. times: how many of it there are (one per turn of a loop around it)."""

    tensor: str
    region: tuple[Scope, ...] | None
    times: Size


@once
def kept(graph: Graph) -> dict[str, Kept]:
    """tensor -> Kept, of all that backward needs."""
    return {k.tensor: k for k in _kept(graph)}


def _kept(graph: Graph) -> Iterator[Kept]:
    constant = frozenset(t.name for t in graph.tensors.values() if t.role == "constant")
    maker = {a.tensor: (n, op) for n in graph.nodes for op in n.ops for a in op.writes}
    seen: set[tuple[str, bool]] = set()
    for n in graph.nodes:
        for op in n.ops:
            if not op.backward and not any(graph.tensors[a.tensor].needs_grad for a in op.writes):
                continue
            for t in needs(op, graph.tensors):
                root = _root(graph, n, op, t, maker, constant)
                if root is None:
                    continue
                made = maker[root][1]
                own, reader = made.region, op.region
                # What a region reads from outside is kept from forward on, as is what its last ops need, and a result
                # that a policy keeps.
                inside = own is not None and own == reader and made.remat
                if (root, inside) in seen or (root, False) in seen:
                    continue
                seen.add((root, inside))
                yield Kept(tensor=root, region=own if inside else None, times=made.times)
    for n in graph.nodes:  # the region's inputs: what is made again starts from them
        for op, a in n.reads:
            region = op.region
            if region is None or a.tensor not in maker or (a.tensor, False) in seen:
                continue
            source = maker[a.tensor]
            if source[0].kind in ("parameter", "constant", "copy") or source[1].region == region:
                continue
            seen.add((a.tensor, False))
            yield Kept(tensor=a.tensor, region=None, times=source[1].times)


def _root(
    graph: Graph, reader: Node, by: Op, t: str, maker: dict[str, tuple[Node, Op]], constant: frozenset[str]
) -> str | None:
    """The tensor that is kept for ``t``: what it is cheaply made of in the reader's node, on the same side of a
    rematerialised region's border. by: the op that needs t. None: nothing is."""
    least = t
    while True:
        if t not in maker or t in constant:
            return None
        n, op = maker[t]
        if op.kind == "copy" or (op.kind == "cotangent" and graph.tensors[t].needs_grad):
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
