"""The number formats in which products run: float32 with all bits or fewer, and eight or four bits."""

from __future__ import annotations

from dataclasses import replace

from pase.ir.remarks import Remark
from pase.ir.types import Graph, Node, Op, itemsize
from pase.once import once

__all__ = [
    "FP4",
    "FP8",
    "HIGH",
    "HIGHEST",
    "STATED",
    "gradient_dtype",
    "in_fp8",
    "operand_bytes",
    "product_dtype",
    "rate_dtype",
    "rate_words",
    "stored_dtype",
    "weight_products",
]

FP8 = "float8_e4m3fn"
FP4 = "float4_e2m1fn"
HIGH, HIGHEST = STATED = "float32_high", "float32_highest"
"""The rates of float32 products with a stated precision. They are no dtypes of tensors, but keys beside these in
[device.peak_flops] and [device.products.rate] of a machine file. "float32" is the rate without a stated precision."""
_REMARK = (
    "products with weights, except the last, are priced in {name}, including the traffic of scaling; the program "
    "itself must request {name}: plan.jax runs the products as they are written"
)


def operand_bytes(dtype: str) -> float:
    """Bytes per element of the operands of a product, by the dtype of its rate.

    >>> operand_bytes(FP8), operand_bytes(FP4), operand_bytes(HIGHEST)
    (1.0, 0.5, 4.0)
    """
    return 0.5 if dtype == FP4 else float(itemsize(stored_dtype(dtype)))


def stored_dtype(rate: str) -> str:
    """The dtype of a product's operands in memory, by the name of its rate."""
    return "float32" if rate in STATED else rate


def rate_words(rate: str) -> str:
    """The name of a product's rate, as it is shown to people."""
    return {HIGHEST: "float32, all bits", HIGH: "float32, in several passes"}.get(rate, rate)


def product_dtype(graph: Graph, op: Op) -> str:
    """The dtype in which a product runs: that to which its operands are cast, or else the wider one of theirs."""
    return op.product_dtype or max((graph.tensors[a.tensor].dtype for a in op.factors), key=itemsize)


def gradient_dtype(graph: Graph, op: Op) -> str:
    """The dtype in which a product's gradients are computed from the gradient of its result, which has the result's
    dtype. If the result is wider than the operands, so are the products in backward."""
    own, result = product_dtype(graph, op), graph.tensors[op.writes[0].tensor].dtype
    return own if op.product_dtype else max(own, result, key=itemsize)


def rate_dtype(op: Op, dtype: str) -> str:
    """The name of a machine's rate for a product in this dtype: the dtype, but for float32 with a stated precision
    ``HIGH`` or ``HIGHEST``."""
    stated = dtype == "float32" and op.product_dtype is None and op.precision is not None
    return f"{dtype}_{op.precision}" if stated else dtype


def weight_products(graph: Graph, node: Node) -> bool:
    """Whether the node is a product with a parameter."""
    kinds = {graph.producer[a.tensor].kind for _, a in node.reads if a.tensor in graph.producer}
    return node.kind in ("matmul", "conv") and "parameter" in kinds


@once
def in_fp8(graph: Graph, dtype: str = FP8) -> Graph:
    """Returns the simplified graph with its products with weights in low precision, except the last ones.

    Products that lead to no further such product, such as those that make logits, keep their precision (torchtitan's
    filter of "output"; Transformer Engine's recipes). The model's weights, its gradients and the values between
    products keep their dtypes.

    dtype: FP8 or FP4.
    """
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
        facts=replace(graph.facts, precision=name),
        remarks=(*graph.remarks, Remark("assumed", _REMARK.format(name=name))),
    )


def _behind(graph: Graph, names: set[str]) -> set[str]:
    """The nodes from which a path of one or more edges leads to one of these. A carry leads back into its loop."""
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
