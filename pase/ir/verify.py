"""The IR's executable specification. Every pass of the test suite runs under it."""

from __future__ import annotations

from pase.errors import PaseError
from pase.ir.sizes import product
from pase.ir.types import Access, Graph, Node, Op

__all__ = ["verify"]


def verify(graph: Graph) -> Graph:
    """Return the graph, or raise PaseError that names the node and what is wrong with it.

    Names are unique; every tensor read is written once, is constant, or is a carry; every map has one walk per
    tensor dim; sizes agree (a window times its stride, for conv and pooling, may differ by its padding);
    no access walks a dim twice; dims that an op works on exist; gradients are handed back to tensors that have one,
    by ops that do nothing else.
    """
    seen: set[str] = set()
    written: set[str] = set()
    for n in graph.nodes:
        if n.name in seen:
            raise _wrong(n, "its name is taken by an earlier node")
        seen.add(n.name)
        if len({d.name for d in n.space}) != len(n.space.dims):
            raise _wrong(n, "two dims have one name")
        if not n.ops:
            raise _wrong(n, "it has no ops")
        for op in n.ops:
            for access in (*op.reads, *op.writes):
                _check(graph, n, op, access)
            for d in op.over or ():
                if d not in n.space:
                    raise _wrong(n, f"op {op.name} works on dim '{d}', which the node lacks")
            for a in op.writes:
                if a.tensor in written:
                    raise _wrong(n, f"tensor {a.tensor} is written twice")
                written.add(a.tensor)
    for n in graph.nodes:
        for _, a in n.reads:
            if a.tensor not in written and graph.tensors[a.tensor].role != "constant":
                raise _wrong(n, f"tensor {a.tensor} is read but nothing writes it")
    for t in graph.outputs:
        if t not in graph.tensors:
            raise PaseError(f"graph '{graph.name}': output {t} is not a tensor")
    return graph


def _check(graph: Graph, n: Node, op: Op, a: Access) -> None:
    t = graph.tensors.get(a.tensor)
    if t is None:
        raise _wrong(n, f"op {op.name} names tensor {a.tensor}, which does not exist")
    if len(a.map.walks) != len(t.shape):
        raise _wrong(
            n, f"op {op.name}: map '{a.map}' has {len(a.map.walks)} walks; {t.name} has {len(t.shape)} dims"
        )
    if len(set(a.map.dims)) != len(a.map.dims):
        raise _wrong(n, f"op {op.name}: map '{a.map}' walks a dim twice")
    if a.gradient != (op.kind == "gradient" and len(op.reads) == 2 and a is op.reads[1]):
        raise _wrong(
            n, f"op {op.name}: the second read of a 'gradient' op hands a gradient back, and no other"
        )
    if a.gradient and not (t.needs_grad and op.differentiable):
        raise _wrong(n, f"op {op.name} hands a gradient back to {t.name}, which has none")
    for w, size in zip(a.map.walks, t.shape, strict=True):
        for d in w.dims:
            if d not in n.space:
                raise _wrong(n, f"op {op.name}: map '{a.map}' walks '{d}', which the node lacks")
        extent = product(n.space[d].size for d in w.dims)
        if w.window is None and extent != size:
            raise _wrong(n, f"op {op.name}: '{w}' walks {extent} elements of a dim of {size} of {t.name}")
        if (
            w.window is not None
            and any(n.space[d].kind == "parallel" for d in w.dims)
            and extent * w.window.stride != size
        ):
            raise _wrong(
                n, f"op {op.name}: '{w}' may be split, but its blocks do not sit over those of {t.name}"
            )


def _wrong(n: Node, what: str) -> PaseError:
    return PaseError(f"node '{n.name}': {what}")
