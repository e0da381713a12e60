"""Which ops of a rematerialised region backward really runs again.

Backward recomputes only what it needs: the operands of products and of non-linear functions, and whatever leads to
them. A region's last matmul, whose result is only added to the residual stream, does not run twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from pase.ir.functions import DIV
from pase.ir.places import Scope
from pase.ir.types import Graph, Op, Tensor, is_floating

__all__ = ["gathering_again", "linear", "mark_recomputed", "needs"]


def needs(op: Op, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The tensors, among the op's reads and writes, that its derivative needs. For an op that runs in backward, these
    are all its reads. tensors: the graph's tensors."""
    if op.backward:
        return tuple(a.tensor for a in op.reads if tensors[a.tensor].role != "constant" and not a.gradient)
    if not op.differentiable:
        return ()
    data = tuple(a.tensor for a in op.reads if tensors[a.tensor].role != "constant")
    if op.kind in ("matmul", "conv") or op.function.needs == "factors":
        return _factors(op, tensors)
    match op.function.needs:
        case "nothing":
            return ()
        case "operands":
            return data
        case "choice":
            return tuple(t for t in data if not is_floating(tensors[t].dtype))
        case "chosen":
            return tuple(a.tensor for a in op.writes if not is_floating(tensors[a.tensor].dtype))
        case "result":
            return tuple(a.tensor for a in op.writes)
        case "both":
            return (*data, *(a.tensor for a in op.writes))


def linear(op: Op, constants: Collection[str] = ()) -> bool:
    """Whether the derivative is the same for all values of the floating-point operands.

    constants: tensors that do not depend on data; only those that the op reads matter.
    """
    match op.function.needs:
        case "nothing" | "choice":
            return True
        case "factors":
            return sum(a.tensor not in constants for a in op.reads) <= 1
        case _:
            return not op.differentiable


def _factors(op: Op, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The operands that are factors of another operand's gradient, if that other operand has a gradient. The
    denominator of a quotient divides both gradients."""
    found = []
    for i, a in enumerate(op.reads):
        of = [b for j, b in enumerate(op.reads) if j != i or (op.function is DIV and i == 1)]
        if tensors[a.tensor].role != "constant" and any(tensors[b.tensor].needs_grad for b in of):
            found.append(a.tensor)
    return tuple(found)


def _read_by_recompute(op: Op, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Like ``needs``, but in a region that runs again: there a product reads all its operands, including those whose
    other factor has no gradient. PyTorch runs all ops of a region again, and so gathers these operands."""
    data = tuple(a.tensor for a in op.reads if tensors[a.tensor].role != "constant")
    product = op.kind in ("matmul", "conv") or (op.function.needs == "factors" and len(data) > 1)
    return data if product and op.differentiable else needs(op, tensors)


def mark_recomputed(graph: Graph) -> Graph:
    """Returns the graph with ``Op.remat`` set only for the ops that backward runs again, and ``Access.again`` for their
    reads and for the reads by derivatives of the region's other ops."""
    needed: dict[tuple[Scope, ...] | None, set[str]] = defaultdict(set)
    regions = {op.region for n in graph.nodes for op in n.ops if op.remat and op.region is not None}
    # Ops whose results are kept run once, but their derivatives may need operands that have to be recomputed.
    ops = [op for n in graph.nodes for op in n.ops if op.region in regions and not op.backward]
    region = {a.tensor: op.region for op in ops for a in op.writes}
    for op in (op for n in graph.nodes for op in n.ops if op.backward and op.region is not None):
        needed[op.region].update(a.tensor for a in op.reads if not a.gradient)
    for op in ops:
        here = op.region
        if any(graph.tensors[a.tensor].needs_grad for a in op.writes):
            needed[here].update(_read_by_recompute(op, graph.tensors))
    recomputed: set[int] = set()
    for op in reversed(ops):
        here = op.region
        if op.remat and any(a.tensor in needed[here] for a in op.writes):
            recomputed.add(id(op))
            needed[here].update(a.tensor for a in op.reads if region.get(a.tensor, ()) == here)

    def marked(op: Op) -> Op:
        if op.region not in regions or op.backward:
            return op
        own = (
            {*_read_by_recompute(op, graph.tensors)}
            if any(graph.tensors[a.tensor].needs_grad for a in op.writes)
            else set()
        )
        reads = tuple(replace(a, recompute=id(op) in recomputed or a.tensor in own) for a in op.reads)
        return replace(op, reads=reads, remat=id(op) in recomputed)

    return replace(graph, nodes=tuple(replace(n, ops=tuple(map(marked, n.ops))) for n in graph.nodes))


def gathering_again(graph: Graph) -> Graph:
    """Returns the graph with ``Access.recompute`` set also for the reads of parameters outside of regions that backward
    needs: a parameter is gathered a second time for backward, instead of kept from forward on.

    A compiled step does not keep either what ops compute from parameters alone. It is computed again from the
    parameters. A program that runs call by call keeps what a call made, unless it is a view of what was gathered; of
    what it computes from parameters alone and then gathers, it gathers again what products read.
    """
    of_parameters = _of_parameters(graph)
    needed, marked = set[str](), dict[str, tuple[Op, ...]]()
    for n in reversed(graph.nodes):
        marked[n.name] = tuple(
            reversed([_gathered_again(op, graph, needed, of_parameters) for op in reversed(n.ops)])
        )
    return replace(graph, nodes=tuple(replace(n, ops=marked[n.name]) for n in graph.nodes))


def _gathered_again(op: Op, graph: Graph, needed: set[str], of_parameters: Collection[str]) -> Op:
    """An op with its reads marked. needed: what backward needs of ``of_parameters``; it is extended."""
    derived = any(graph.tensors[a.tensor].needs_grad for a in op.writes)
    own = needs(op, graph.tensors) if derived or op.backward else ()
    passes_on = op.kind in ("view", "copy") or not graph.facts.eager
    again = passes_on and any(a.tensor in needed for a in op.writes)
    reads = []
    for a in op.reads:
        wanted = a.tensor in of_parameters and (a.recompute or again or a.tensor in own)
        if wanted and graph.facts.eager and graph.producer[a.tensor].kind not in ("parameter", "copy"):
            wanted = passes_on or op.kind in ("matmul", "conv")
        if wanted:
            needed.add(a.tensor)
        # An op that runs in backward has it gathered for that already.
        outside = op.region is None and not op.backward and op.kind != "parameter"
        reads.append(replace(a, recompute=a.recompute or (wanted and outside)))
    return replace(op, reads=tuple(reads))


def _of_parameters(graph: Graph) -> frozenset[str]:
    """The parameters, and what ops compute from parameters and constants alone."""
    made: set[str] = set()
    for n in graph.nodes:
        for op in n.ops:
            read = [a.tensor for a in op.reads if graph.tensors[a.tensor].role != "constant"]
            if op.kind == "parameter" or (read and made.issuperset(read)):
                made.update(a.tensor for a in op.writes)
    return frozenset(made)
