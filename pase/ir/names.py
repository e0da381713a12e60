"""Readable names: dims of one meaning share a letter, and nodes are named after their parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import networkx as nx

from pase.ir.maps import AccessMap, Walk
from pase.ir.types import Access, Graph, IterationSpace, Node, Op

__all__ = ["dim_classes", "named", "view_classes"]

_LETTERS = "dhkfevcnmpqrtuwxyzagijlo"
_VERBS: dict[str, str] = {"matmul": "dot", "conv": "conv", "gather": "take"}
DimKey = tuple[str, str]


def dim_classes(graph: Graph) -> dict[DimKey, int]:
    """(node, dim) -> class. Dims that walk the same factor of one tensor are in one class.

    Classes are numbered in order of appearance. Dims that share a tensor's dim only as parts of different factorings
    are in different classes.
    """
    alike: nx.Graph[DimKey] = nx.Graph()
    alike.add_nodes_from((n.name, d.name) for n in graph.nodes for d in n.space)
    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        _, write = src.write_of(e.tensor)
        for w, r in zip(write.map.walks, e.access.map.walks, strict=True):
            made, read = (
                [d for d in walk.dims if n.space[d].kind != "ring"] for walk, n in ((w, src), (r, dst))
            )
            if len(made) == len(read) and all(
                src.space[x].size == dst.space[y].size or r.window for x, y in zip(made, read, strict=True)
            ):
                alike.add_edges_from(((e.src, x), (e.dst, y)) for x, y in zip(made, read, strict=True))
    return {key: number for number, keys in enumerate(nx.connected_components(alike)) for key in keys}


def view_classes(graph: Graph, classes: Mapping[DimKey, int]) -> dict[int, frozenset[int]]:
    """Class -> the classes that views make of its dims and whose blocks are the same, itself included.

    For example, the dim (heads features) of a projection, heads, and the factor (heads of keys) of heads: blocks of a
    dim are blocks of its major factor.
    """
    alike: nx.Graph[int] = nx.Graph()
    alike.add_nodes_from(classes.values())
    major: dict[tuple[str, int], int] = {}
    for n in graph.nodes:
        for op in n.ops:
            for a in (*op.reads, *op.writes):
                for t, walk in enumerate(a.map.walks):
                    dims = [d for d in walk.dims if n.space[d].kind != "ring"]
                    if dims:
                        first = classes[n.name, dims[0]]
                        alike.add_edge(first, major.setdefault((a.tensor, t), first))
    return {c: frozenset(same) for same in nx.connected_components(alike) for c in same}


def named(graph: Graph) -> Graph:
    """Returns the graph with letters for dims (b: the first dim of the batch, s: its second) and names for nodes."""
    classes = dim_classes(graph)
    letters = _batch_letters(graph, classes)
    used = set(letters.values())
    sharing: Counter[int] = Counter()
    for n in graph.nodes:
        if n.kind == "parameter":
            sharing.update(
                {classes[n.name, d.name] for d in n.space if d.kind not in ("replicated", "state")}
            )
    shared = [c for c in sharing if c not in letters]
    free = (c for c in _LETTERS if c not in used)
    if shared:  # the model's width: the dim that occurs in most parameters
        letters[max(shared, key=lambda c: sharing[c])] = next(free)
    for c in shared:
        if c not in letters:
            letters[c] = next(free, f"z{c}")
    spare: dict[int, str] = {}

    def letter(c: int) -> str:
        if c not in letters and c not in spare:
            spare[c] = next(free, f"z{c}")
        return letters.get(c) or spare[c]

    node_names = _node_names(graph)
    nodes = []
    for n in graph.nodes:
        new: dict[str, str] = {}
        for d in n.space:
            base = (
                d.kind
                if d.kind in ("pending", "state", "ring")
                else "l"
                if d.kind == "replicated"
                else letter(classes[n.name, d.name])
            )
            name, k = base, 2
            while name in new.values():
                name, k = f"{base}{k}", k + 1
            new[d.name] = name
        nodes.append(_renamed(n, node_names[n.name], new))
    return replace(graph, nodes=tuple(nodes))


def _batch_letters(graph: Graph, classes: dict[DimKey, int]) -> dict[int, str]:
    """b and s for the batch and sequence of the inputs of highest rank; b, y and x for images, their rows and
    columns. State that one step leaves to the next (an optimizer's, a cache) is not part of the batch."""
    letters: dict[int, str] = {}
    inputs = [n for n in graph.nodes if n.kind == "input"]
    inputs = [n for n in inputs if all(op.kind != "carry" for op in n.ops)] or inputs
    rank = max((len(n.space.dims) for n in inputs), default=0)
    for n in inputs:
        if len(n.space.dims) == rank:
            for d, letter in zip(n.space, "byx" if rank > 3 else "bs", strict=False):
                if letter not in letters.values():
                    letters.setdefault(classes[n.name, d.name], letter)
    return letters


def _renamed(n: Node, name: str, dims: dict[str, str]) -> Node:
    def access(a: Access) -> Access:
        walks = tuple(Walk(tuple(dims[d] for d in w.dims), w.window) for w in a.map.walks)
        return replace(a, map=AccessMap(walks))

    def op(o: Op) -> Op:
        over = None if o.over is None else tuple(dims[d] for d in o.over)
        return replace(o, reads=tuple(map(access, o.reads)), writes=tuple(map(access, o.writes)), over=over)

    space = IterationSpace(tuple(replace(d, name=dims[d.name]) for d in n.space))
    return replace(n, name=name, space=space, ops=tuple(map(op, n.ops)))


def _node_names(graph: Graph) -> dict[str, str]:
    """Names parameters and inputs by their path, a matmul after its parameter, and other nodes by op and function."""
    taken: Counter[str] = Counter()
    out: dict[str, str] = {}
    for n in graph.nodes:
        if n.kind in ("parameter", "input"):
            base = ("in." if n.kind == "input" else "") + (
                graph.tensors[n.ops[0].writes[0].tensor].path or n.name
            )
        else:
            base = _function(n)
            if n.kind in _VERBS and (weight := _weight(graph, n)) is not None:
                base = f"{weight}:{_VERBS[n.kind]}"
            if n.kind == "copy":
                source = graph.producer.get(n.main.reads[0].tensor)
                if source is not None and source.kind == "parameter":
                    base = f"{graph.tensors[source.ops[0].writes[0].tensor].path}:copy"
        taken[base] += 1
        out[n.name] = base if taken[base] == 1 else f"{base}~{taken[base]}"
    return out


def _weight(graph: Graph, n: Node) -> str | None:
    """The path of the parameter that the node's matmul multiplies or that its gather looks up. A bias on the way to it
    does not count."""
    inside = {a.tensor: op for op in n.ops for a in op.writes}

    def parameters(tensor: str) -> list[str] | None:
        """The parameters from which this value is computed; None if an activation contributes to it."""
        if graph.tensors[tensor].role == "constant":
            return []
        op = inside.get(tensor)
        if op is None:
            producer = graph.producer.get(tensor)
            if producer is None:
                return None
            if producer.kind == "parameter":
                return [producer.ops[0].writes[0].tensor]
            if producer.kind not in ("copy", "view"):
                return None
            op = producer.write_of(tensor)[0]
        if op.kind not in ("view", "elementwise", "copy"):
            return None
        out: list[str] = []
        for a in op.reads:
            found = parameters(a.tensor)
            if found is None:
                return None
            out += found
        return out

    reads = n.main.reads[:1] if n.kind == "gather" else n.main.reads
    for a in reversed(reads):  # in x @ w the second operand is the weight, if both depend on parameters only
        if found := parameters(a.tensor):
            return graph.tensors[max(found, key=lambda t: len(graph.tensors[t].shape))].path
    return None


_UNNAMED = re.compile(r"\.<(locals|genexpr|listcomp|setcomp|dictcomp)>")
"""Parts of a function's qualified name that nobody wrote: a comprehension goes by the function around it."""


def _function(n: Node) -> str:
    """The node's name as op@function. The function comes from a source line such as ``/a/layers.py:12:3 (norm)``."""
    ops = [n.main] if n.kind in _VERBS else n.ops
    counts = Counter(op.source.function for op in ops if op.source.function)
    where = _UNNAMED.sub("", counts.most_common(1)[0][0]) if counts else ""
    what = {"matmul": "dot", "elementwise": "map"}.get(n.kind, n.kind)
    return f"{what}@{where}" if where else what
