"""The strategies of the paper's Table II, layer -> dim -> split count, on our graphs."""

from __future__ import annotations

from collections.abc import Callable

from pase.ir import Node, Op
from pase.paper import Layers

Strategy = dict[str, dict[str, int]]


def product_dims(node: Node) -> tuple[str, list[str], list[str]]:
    """The (batch, out, in) dims of a conv's or fully-connected layer's product, without heights and widths."""
    op = next(op for op in node.ops if op.kind in ("conv", "matmul"))
    x, w = sorted(op.reads, key=lambda a: "b" not in a.map.dims)
    out = op.writes[0].map.dims
    free = [d for d in w.map.dims if node.space[d].kind != "window"]
    assert "b" in x.map.dims
    return "b", [d for d in free if d in out], [d for d in free if d not in out]


def convolutions(layers: Layers) -> list[Node]:
    return [n for n in layers.nodes if n.kind == "conv"]


def full(layers: Layers) -> list[Node]:
    """Products with weights, except convolutions."""
    return [
        n
        for n in layers.nodes
        if n.kind == "matmul" and any(a.tensor in layers.parameters for _, a in n.reads)
    ]


def bcn(node: Node, b: int, c: int, n: int) -> dict[str, int]:
    """Splits of batch, in-channel and out-channel. An input with several dims is split on its channel dim."""
    batch, out, into = product_dims(node)
    return {k: v for k, v in {batch: b, into[-1]: c, out[-1]: n}.items() if v > 1}


def softmax(layers: Layers, width: int, rows: dict[str, int] | None = None) -> Strategy:
    """Loss nodes with a vocabulary or class dim; the widest dim is split ``width`` ways."""
    out = {}
    for n in layers.nodes[-3:]:
        if len(n.space.dims) > 1 and any(int(d.size) >= 1000 for d in n.space):
            wide = max(n.space, key=lambda d: int(d.size)).name
            out[n.name] = {wide: width, **(rows or {})}
    return out


def alexnet(layers: Layers) -> Strategy:
    convs, fc = convolutions(layers), full(layers)
    assert (len(convs), len(fc)) == (5, 3)
    out = {c.name: bcn(c, 32, 1, 1) for c in convs[:4]} | {convs[4].name: bcn(convs[4], 16, 2, 1)}
    splits = ((8, 4), (4, 8), (8, 4))
    return out | {f.name: bcn(f, 1, c, n) for f, (c, n) in zip(fc, splits, strict=True)} | softmax(layers, 4)


def inception_v3(layers: Layers) -> Strategy:
    convs, (fc,) = convolutions(layers), full(layers)
    last = [c for c in convs if c.name.startswith("mixed7")]  # modules E
    assert (len(convs), len(last)) == (94, 18)
    out = {c.name: bcn(c, 16, 1, 2) if c in last else bcn(c, 32, 1, 1) for c in convs}
    return out | {fc.name: bcn(fc, 1, 16, 2)} | softmax(layers, 2)


def rnnlm(layers: Layers) -> Strategy:
    lookup = next(n for n in layers.nodes if n.kind == "gather")
    vocabulary = max(lookup.space, key=lambda d: int(d.size)).name
    (classifier,) = (n for n in full(layers) if n.name != "lstm")
    return {
        lookup.name: {vocabulary: 32},
        "lstm": {"l": 2, "b": 4, "d": 2, "e": 2},
        classifier.name: bcn(classifier, 1, 1, 32),
    } | softmax(layers, 32)


def transformer(layers: Layers) -> Strategy:
    out: Strategy = {}
    for n in layers.nodes:
        op: Op = n.main
        reads_table = any(a.tensor in layers.parameters for _, a in n.reads)
        if reads_table and max(int(d.size) for d in n.space) == 50_000:
            out[n.name] = {max(n.space, key=lambda d: int(d.size)).name: 16}
        elif n.kind == "matmul":
            hidden = [d.name for d in n.space if int(d.size) == 2048]
            heads = [d.name for d in n.space if int(d.size) == 8]
            batch = next(d.name for d in n.space if int(d.size) == 64 and d.name in op.writes[0].map.dims[:1])
            out[n.name] = {batch: 16, (hidden or heads)[0]: 2}
    return out | softmax(layers, 16)


STRATEGIES: dict[str, Callable[[Layers], Strategy]] = {
    "alexnet": alexnet,
    "inception_v3": inception_v3,
    "rnnlm": rnnlm,
    "transformer": transformer,
}


def data_parallel(layers: Layers, p: int) -> Strategy:
    """Splits every layer's batch dim as far as p and the batch allow."""
    size = int(next(n for n in layers.graph.nodes if n.kind == "input").space.dims[0].size)
    out = {}
    for n in layers.nodes:
        dims = [d.name for d in n.space if d.name == "b"]
        if dims:
            out[n.name] = {"b": min(p, size)}
    return out
