"""What a rematerialised region really runs again.

Backward recomputes only what it needs: the operands of products and of non-linear functions, and whatever
leads to them. A region's last matmul, whose result is merely added to the residual, is not run twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from pase.ir.types import Graph, Op

__all__ = ["mark_recomputed", "needs"]

_LINEAR = frozenset(
    (
        *(
            "add",
            "sub",
            "neg",
            "add_any",
            "convert_element_type",
            "copy",
            "copy_p",
            "reduce_sum",
            "reduce_precision",
        ),
        *("real", "imag", "conj", "sharding_constraint", "optimization_barrier", "stop_gradient", "cumsum"),
    )
)


def needs(op: Op, constant: frozenset[str]) -> tuple[str, ...]:
    """Inputs whose values the op's own derivative needs."""
    data = tuple(a.tensor for a in op.reads if a.tensor not in constant)
    if not op.differentiable or op.name in _LINEAR or op.kind in ("view", "copy", "carry", "output"):
        return ()
    if op.kind == "gather" or op.kind == "scatter":
        return data[1:2]  # the indices
    if op.name in ("mul", "div", "select_n") and len(data) == 1:
        return ()  # times a constant
    if op.name == "select_n":
        return data[:1]
    return data


def mark_recomputed(graph: Graph) -> Graph:
    """The same graph, with ``Op.remat`` left only on ops that backward runs again, and ``Access.again`` on what
    they, or the derivatives of the region's other ops, read."""
    constant = frozenset(t.name for t in graph.tensors.values() if t.role == "constant")
    needed: dict[str, set[str]] = defaultdict(set)
    ops = [op for n in graph.nodes for op in n.ops if op.remat]
    region = {a.tensor: _region(op) for op in ops for a in op.writes}
    for op in ops:
        here = _region(op)
        if any(graph.tensors[a.tensor].needs_grad for a in op.writes):
            needed[here].update(needs(op, constant))
    again: set[int] = set()
    for op in reversed(ops):
        here = _region(op)
        if any(a.tensor in needed[here] for a in op.writes):
            again.add(id(op))
            needed[here].update(a.tensor for a in op.reads if region.get(a.tensor) == here)

    def marked(op: Op) -> Op:
        if not op.remat:
            return op
        reads = tuple(replace(a, again=a.tensor in needed[_region(op)]) for a in op.reads)
        return replace(op, reads=reads, remat=id(op) in again)

    return replace(graph, nodes=tuple(replace(n, ops=tuple(map(marked, n.ops))) for n in graph.nodes))


def _region(op: Op) -> str:
    """The innermost rematerialised region."""
    return next((s for s in reversed(op.scope) if s.startswith("remat")), "")
