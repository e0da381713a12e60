"""Which tensor of a model's graph is sent to experts, and how often it has each token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.compiler.stages.places import Places, places_of
from pase.errors import Infeasible
from pase.ir import Access, Graph, Node
from pase.ir.blocks import Block, micro_batches_of
from pase.machine import Machine
from pase.plan.throughput import step_work
from pase.tables.layouts import concrete_size

__all__ = ["parts_places", "sent_to_experts", "token_copies"]


def token_copies(graph: Graph, written_out: Sequence[Block], machine: Machine) -> float:
    """Return how often each token occurs among those that are sent to experts: once for each expert that takes it.

    It is 1 if the graph has no experts, or if it does not tell its tokens (no look-up of an embedding).
    """
    tokens = step_work(graph, machine).tokens
    found = sent_to_experts(graph, parts_places(graph, written_out))
    if found is None or tokens is None:
        return 1.0
    node, sent = found
    op = next(op for op in node.ops if sent in op.reads)
    width = math.prod(
        concrete_size(node.space[d].size, node.name) for d in set(sent.map.dims) - set(op.writes[0].map.dims)
    )
    elements = concrete_size(graph.tensors[sent.tensor].elements, sent.tensor)
    return max(elements / (width * tokens / micro_batches_of(graph)), 1.0)


def sent_to_experts(graph: Graph, places: Places) -> tuple[Node, Access] | None:
    """Return the first product of the block with a separate weight for each part of its operand, as experts have.

    The result is its node and the operand that is not the weight, or None if there is no such product.
    """
    stored = {a.tensor for n in graph.nodes if n.kind == "parameter" for op in n.ops for a in op.writes}
    for n in graph.nodes:
        for op in n.ops:
            weights = [a for a in op.reads if a.tensor in stored]
            if op.kind != "matmul" or len(weights) != 1 or places.of(n.name) != "block":
                continue
            others = [a for a in op.reads if a.tensor not in stored]
            kept = set(weights[0].map.dims) & set(op.writes[0].map.dims)
            for a in others:
                if kept & set(a.map.dims):
                    return n, a
    return None


def parts_places(graph: Graph, written_out: Sequence[Block]) -> Places:
    """Return where each node is: before, in or after the loop over layers, or the written-out blocks."""
    try:
        return places_of(graph, written_out)
    except Infeasible as e:
        raise Infeasible(
            "it has no equal blocks, which the price of a stated strategy needs: no loop over layers, and no three "
            "equal layers written out one after the other",
            where=f"'{graph.name}'",
        ) from e
