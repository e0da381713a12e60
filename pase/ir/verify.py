"""The IR's executable specification. The test suite runs every pass under it."""

from __future__ import annotations

from pase.errors import PaseError
from pase.ir.functions import Function
from pase.ir.literals import Literals, literals_text
from pase.ir.parameters import EqualPart, Iota, Parameters, Slice, parameters_text
from pase.ir.sizes import product
from pase.ir.types import Access, Graph, Node, Op

__all__ = ["verify", "verify_reads", "wrong_operands"]


def verify(graph: Graph) -> Graph:
    """Returns the graph if it is valid. Otherwise raises PaseError, which names the node and the fault.

    Names are unique. Every tensor that is read is written once, is constant, or is a carry. Every map has one walk per
    tensor dim. Sizes agree (for conv and pooling, a window times its stride may differ by the padding). No access walks
    a dim twice. Dims that an op works on exist. Gradients are handed back only to tensors that have one, by ops that do
    nothing else. Functions have all of their operands, read or literal. Parameters fit the shapes.
    A node makes the loss of a whole step.
    """
    seen: set[str] = set()
    written: set[str] = set()
    for n in graph.nodes:
        if n.name in seen:
            raise _wrong(n, "an earlier node has the same name")
        seen.add(n.name)
        if len({d.name for d in n.space}) != len(n.space.dims):
            raise _wrong(n, "two dims have the same name")
        if not n.ops:
            raise _wrong(n, "it has no ops")
        for op in n.ops:
            for access in (*op.reads, *op.writes):
                _check(graph, n, op, access)
            if what := wrong_operands(op.function, op.literals, len(op.reads), op.kind == "elementwise"):
                raise _wrong(n, f"op {op.name}: {what}")
            if op.parameters is not None and (what := _wrong_parameters(graph, op, op.parameters)):
                raise _wrong(n, f"op {op.name}: {what}")
            for d in op.over or ():
                if d not in n.space:
                    raise _wrong(n, f"op {op.name} works on dim '{d}', which the node lacks")
            for a in op.writes:
                if a.tensor in written:
                    raise _wrong(n, f"tensor {a.tensor} is written twice")
                written.add(a.tensor)
    for t in graph.outputs:
        if t not in graph.tensors:
            raise PaseError(f"output {t} is not a tensor", where=f"graph '{graph.name}'")
    if graph.facts.loss and graph.facts.loss not in written:
        raise PaseError(f"no node makes the loss {graph.facts.loss}", where=f"graph '{graph.name}'")
    return verify_reads(graph)


def verify_reads(graph: Graph) -> Graph:
    """Returns the graph if a node writes each tensor that is read, except for constants. Otherwise raises PaseError."""
    written = {a.tensor for n in graph.nodes for op in n.ops for a in op.writes}
    for n in graph.nodes:
        for _, a in n.reads:
            if a.tensor not in written and graph.tensors[a.tensor].role != "constant":
                raise _wrong(n, f"tensor {a.tensor} is read but nothing writes it")
    return graph


def _check(graph: Graph, n: Node, op: Op, a: Access) -> None:
    t = graph.tensors.get(a.tensor)
    if t is None:
        raise _wrong(n, f"op {op.name} uses tensor {a.tensor}, which does not exist")
    if len(a.map.walks) != len(t.shape):
        raise _wrong(
            n, f"op {op.name}: map '{a.map}' has {len(a.map.walks)} walks; {t.name} has {len(t.shape)} dims"
        )
    if len(set(a.map.dims)) != len(a.map.dims):
        raise _wrong(n, f"op {op.name}: map '{a.map}' walks a dim twice")
    if a.gradient != (op.kind == "gradient" and len(op.reads) == 2 and a is op.reads[1]):
        raise _wrong(
            n, f"op {op.name}: the second read of a 'gradient' op, and no other read, hands a gradient back"
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
                n, f"op {op.name}: '{w}' may be split, but its blocks do not align with those of {t.name}"
            )


def wrong_operands(function: Function, literals: Literals, reads: int, elementwise: bool) -> str | None:
    """What is wrong with an op's operands: literals that do not fit its number of reads, or operands that are missing
    or too many. None if nothing is."""
    if literals is None:
        return None
    if literals and (not elementwise or literals.count(None) != reads):
        return f"its literals {literals_text(literals)} do not fit its {reads} reads"
    if not elementwise or function.operands is None:
        return None
    (low, high), count = function.operands, len(literals) or reads
    if low <= count <= (count if high is None else high):
        return None
    wanted = f"{low}" if low == high else f"{low} or more" if high is None else f"{low} to {high}"
    return f"function '{function.name}' has {count} operands, literals included, but needs {wanted}"


def _wrong_parameters(graph: Graph, op: Op, p: Parameters) -> str | None:
    """What is wrong with an op's parameters: they have other dims than its first operand, or take what it has not."""
    made = graph.tensors[op.writes[0].tensor].shape
    shape = made if isinstance(p, Iota) else graph.tensors[op.reads[0].tensor].shape
    text = parameters_text(p)
    for name in ("start", "step", "before", "interior", "dilation"):
        value = getattr(p, name, None)
        if isinstance(value, tuple) and len(value) != len(shape):
            return f"its parameters {text} do not have {len(shape)} dims"
    if not 0 <= getattr(p, "axis", 0) < max(len(shape), 1):
        return f"its parameters {text} do not name one of {len(shape)} dims"
    if isinstance(p, Slice):
        for a, by, n, size in zip(p.start, p.step, made, shape, strict=True):
            ends = (a, a + (n - 1) * by) if isinstance(n, int) else (a,)
            if n != 0 and isinstance(size, int) and not all(0 <= at < size for at in ends):
                return f"its parameters {text} take {n} elements of a dim of {size}"
    if isinstance(p, EqualPart) and (not 0 <= p.index < p.count or made[p.axis] * p.count != shape[p.axis]):  # type: ignore[operator]
        return f"its parameters {text} do not divide a dim of {shape[p.axis]} into parts of {made[p.axis]}"
    return None


def _wrong(n: Node, what: str) -> PaseError:
    return PaseError(what, where=f"node '{n.name}'")
