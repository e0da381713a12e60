"""Products with weights in eight or four bits: which they are, and the graph in which they run so."""

from __future__ import annotations

from dataclasses import replace

from pase.ir.remarks import Remark
from pase.ir.types import Graph, Node
from pase.once import once

__all__ = ["FP4", "FP8", "in_fp8", "operand_bytes", "weight_products"]

FP8 = "float8_e4m3fn"
FP4 = "float4_e2m1fn"
_REMARK = (
    "products with weights, all but the last, are priced in {name} with what scaling moves: the program has to ask for "
    "it; plan.jax runs them as they are written"
)


def operand_bytes(dtype: str) -> float:
    """Bytes of an element of what a product in eight or four bits reads.

    >>> operand_bytes(FP8), operand_bytes(FP4)
    (1.0, 0.5)
    """
    return {FP8: 1.0, FP4: 0.5}[dtype]


def weight_products(graph: Graph, node: Node) -> bool:
    """Is the node a product with a parameter?"""
    kinds = {graph.producer[a.tensor].kind for _, a in node.reads if a.tensor in graph.producer}
    return node.kind in ("matmul", "conv") and "parameter" in kinds


@once
def in_fp8(graph: Graph, dtype: str = FP8) -> Graph:
    """The simplified graph with its products with weights in fp8, all but the last: those that lead to no further one,
    as the products that make logits do, stay as they are (torchtitan's filter of "output"; Transformer Engine's
    recipes). The model's weights, gradients and what lies between products keep their types. dtype: FP8, or FP4."""
    name = {FP8: "fp8", FP4: "nvfp4"}[dtype]
    mine = {n.name for n in graph.nodes if n.kind == "matmul" and weight_products(graph, n)}
    after = _behind(graph, mine)
    chosen = mine & after

    def turned(n: Node) -> Node:
        ops = (replace(op, product_dtype=dtype) if op.kind == "matmul" else op for op in n.ops)
        return replace(n, ops=tuple(ops)) if n.name in chosen else n

    return replace(
        graph,
        nodes=tuple(map(turned, graph.nodes)),
        meta={**graph.meta, "precision": name},
        remarks=(*graph.remarks, Remark("assumed", _REMARK.format(name=name))),
    )


def _behind(graph: Graph, names: set[str]) -> set[str]:
    """The nodes from which one of these is reached by an edge or more; a loop's carry leads back into it."""
    sources: dict[str, list[str]] = {}
    for e in graph.edges:
        sources.setdefault(e.dst, []).append(e.src)
    found: set[str] = set()
    waiting = [s for name in names for s in sources.get(name, ())]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sources.get(name, ())
    return found
