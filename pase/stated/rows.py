"""The rows of grouped products as ranks of data parallelism have them: each sorts its own tokens by expert.

A program as a whole sorts the tokens of all examples by expert, and a grouped product multiplies each row by the
weights of its group: rows [m k], weights [g k n]. Which rows a group has is known only at run time. No framework sorts
tokens across ranks, and a price takes experts to be chosen equally often. Thus the rows are [ranks, groups, rows of a
group], and the product is one for each rank and group. An expert's rows are then a dim that may be split like its
weights, which is what sends tokens to experts.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pase.errors import Infeasible
from pase.ir import Access, AccessMap, Dim, Graph, IterationSpace, Node, Op, dim_classes
from pase.ir.maps import Walk
from pase.stated.strategy import Strategy
from pase.tables.layouts import concrete_size

__all__ = ["with_own_rows"]


def with_own_rows(graph: Graph, s: Strategy) -> Graph:
    """Return the graph with the rows of each grouped product as [ranks, groups, rows of a group].

    If the rows are not divisible so, they stay as they are. Raises Infeasible if the strategy splits experts then, or
    if the program's rows cannot be split.
    """
    found = {n.name: (op, dims) for n in graph.nodes for op in n.ops if (dims := _rows_and_groups(op))}
    if not found:
        return graph
    classes = dim_classes(graph)
    apart: dict[int, int] = {}
    for name, (_, (row, group)) in found.items():
        rows, groups = (concrete_size(graph.node[name].space[d].size, name) for d in (row, group))
        if rows % (s.ranks * groups) == 0:
            apart[classes[name, row]] = groups
        elif s.expert > 1 or (s.ranks > 1 and graph.node[name].space[row].kind != "parallel"):
            raise Infeasible(
                f"the {rows} rows of '{name}' are not as many for each of {groups} experts and each of {s.ranks} "
                "data-parallel ranks",
                where=str(s),
                fix="change the batch or the sequence, so that a rank's tokens are divisible by the number of experts",
            )
    at_experts = _between(graph, classes, set(found), set(apart))
    sorted_ = _sorted_with(graph, classes, set(apart), s.ranks)

    def of(n: Node) -> Node:
        own = [d.name for d in n.space if classes[n.name, d.name] in sorted_]
        if not own or n.kind == "opaque":
            return n
        groups = next((apart[c] for d in own if (c := classes[n.name, d]) in apart), 1)
        if n.name not in at_experts:
            return _divided(n, own, None, s.ranks, 1, None)
        op, (_, group) = found.get(n.name, (None, ("", None)))
        return _divided(n, own, group, s.ranks, groups, op)

    return replace(graph, nodes=tuple(map(of, graph.nodes)))


def _rows_and_groups(op: Op) -> tuple[str, str] | None:
    """Return the dims (rows, groups) of a grouped product; None for any other op."""
    if op.kind != "matmul" or op.backward:
        return None
    x, w = (set(a.map.dims) for a in op.factors)
    out = set(op.writes[0].map.dims)
    rows, groups = (x & out) - w, w - x - out
    return (rows.pop(), groups.pop()) if len(rows) == len(groups) == 1 else None


def _between(
    graph: Graph, classes: Mapping[tuple[str, str], int], grouped: set[str], rows: set[int]
) -> set[str]:
    """Return the nodes that work where the experts are: grouped products, and what of these rows lies between two of
    them or is read only there, such as each row's bias."""
    import networkx as nx

    moved: nx.DiGraph[str] = nx.DiGraph()
    moved.add_nodes_from(grouped)
    for e in graph.edges:
        if any(classes[e.dst, d] in rows for d in e.access.map.dims):
            moved.add_edge(e.src, e.dst)
    after, before = (
        set[str]().union(*(reach(moved, name) for name in grouped))
        for reach in (nx.descendants, nx.ancestors)
    )
    between = grouped | (after & before)
    readers: dict[str, set[str]] = defaultdict(set)
    for e in graph.edges:
        readers[e.src].add(e.dst)
    dispatched = grouped - after  # they read the tokens that are sent
    for n in reversed(graph.nodes):
        if n.name in moved and readers[n.name] and readers[n.name] <= between - dispatched:
            between.add(n.name)
    return between


def _sorted_with(
    graph: Graph, classes: Mapping[tuple[str, str], int], rows: set[int], ranks: int
) -> set[int]:
    """Return the classes of dims of which a rank has its own part: rows, and tokens from which or into which they are
    sorted."""
    together: list[set[int]] = []
    walked: dict[tuple[str, int], set[int]] = defaultdict(set)
    for n in graph.nodes:
        for op in n.ops:
            for a in (*op.reads, *op.writes):
                for i, walk in enumerate(a.map.walks):
                    if len(walk.dims) == 1:
                        walked[a.tensor, i].add(classes[n.name, walk.dims[0]])
            if op.kind in ("gather", "scatter") and not op.backward:
                dims = {d for a in (*op.reads, *op.writes) for d in a.map.dims}
                if op.kind == "gather":
                    dims -= set(op.reads[0].map.dims) & set(op.writes[0].map.dims)  # features of a row
                if all(concrete_size(n.space[d].size, n.name) % ranks == 0 for d in dims):
                    together.append({classes[n.name, d] for d in dims})
    out, before = set(rows), set[int]()
    while out != before:
        before = set(out)
        found = [here for here in together if here & before]
        indexed = set[int]().union(*found)
        out |= indexed | set[int]().union(*(here for here in walked.values() if here & indexed))
    return out


def _divided(
    n: Node, own: Sequence[str], group: str | None, ranks: int, groups: int, product: Op | None
) -> Node:
    """Return the node with each of its own dims as (ranks, rest), and rows of experts as (ranks, groups, rest).

    product: the node's grouped product, if it has one, and group its groups.
    """
    sizes = {d.name: concrete_size(d.size, n.name) for d in n.space}
    names = (name for i in itertools.count() if (name := f"{own[0]}_{i}") not in sizes)
    rank, at = next(names), group or next(names)
    major = [Dim(name=rank, size=ranks)] * (ranks > 1) + [Dim(name=at, size=groups)] * (groups > 1)
    dims, apart = [*major], dict[str, tuple[str, ...]]()
    for d in own:
        kind = "parallel" if groups > 1 else n.space[d].kind
        rest = (
            [Dim(name=next(names), size=size, kind=kind)]
            if (size := sizes[d] // (ranks * groups)) > 1
            else []
        )
        apart[d] = tuple(x.name for x in (*major, *rest))
        dims += rest
    sizes |= {d.name: concrete_size(d.size, n.name) for d in dims}

    def named(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d for name in old for d in apart.get(name, (name,))))

    def walked(a: Access) -> Access:
        return replace(a, map=AccessMap(tuple(Walk(named(w.dims), w.window) for w in a.map.walks)))

    def of(op: Op) -> Op:
        reads, writes = (tuple(map(walked, side)) for side in (op.reads, op.writes))
        done = replace(op, reads=reads, writes=writes, over=None if op.over is None else named(op.over))
        if op is not product:
            return done
        before, now = (math.prod(sizes[d] for d in o.worked) for o in (op, done))
        return replace(done, flops_per_point=op.flops_per_point * before / now)

    kept = tuple(d for d in n.space if d.name not in (*own, group))
    return replace(n, space=IterationSpace((*dims, *kept)), ops=tuple(map(of, n.ops)))
