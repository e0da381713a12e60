"""The rows of grouped products as ranks of data parallelism have them: each sorts its own tokens by expert.

A program as a whole sorts the tokens of all examples by expert, and a grouped product multiplies each row by the
weights of its group: rows [m k], weights [g k n]. Which rows a group has is known only at run time. No framework sorts
tokens across ranks, and a price takes experts to be chosen equally often. Thus the rows are [ranks, groups, rows of a
group], and the product is one for each rank and group. An expert's rows are then a dim that may be split like its
weights, which is what sends tokens to experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import networkx as nx

from pase.errors import Infeasible
from pase.ir import Access, AccessMap, Dim, Graph, IterationSpace, Node, Op, dim_classes
from pase.ir.maps import Walk
from pase.stated.strategy import Strategy
from pase.tables.layouts import concrete_size

__all__ = ["with_own_rows"]


def with_own_rows(graph: Graph, s: Strategy) -> Graph:
    """Return the graph with the rows of each grouped product as [ranks, groups, rows of a group].

    If the rows are not divisible so, they stay as they are. Raises Infeasible if the strategy splits experts then.
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
        elif s.expert > 1:
            raise Infeasible(
                f"the {rows} rows of '{name}' are not as many for each of {groups} experts and each of {s.ranks} "
                "data-parallel ranks",
                where=str(s),
                fix="change the batch or the sequence, so that a rank's tokens are divisible by the number of experts",
            )
    at_experts = _between(graph, classes, set(found), set(apart))

    def of(n: Node) -> Node:
        row = next((d.name for d in n.space if classes[n.name, d.name] in apart), None)
        if row is None or n.name not in at_experts:
            return n
        op, (_, group) = found.get(n.name, (None, (row, None)))
        return _divided(n, row, group, s.ranks, apart[classes[n.name, row]], op)

    return replace(graph, nodes=tuple(map(of, graph.nodes)))


def _rows_and_groups(op: Op) -> tuple[str, str] | None:
    """Return the dims (rows, groups) of a grouped product; None for any other op."""
    if op.kind != "matmul" or len(op.reads) < 3:
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


def _divided(n: Node, row: str, group: str | None, ranks: int, groups: int, product: Op | None) -> Node:
    """Return the node with its rows as three dims. product: its grouped product, if it has one, and its groups."""
    sizes = {d.name: concrete_size(d.size, n.name) for d in n.space}
    names = [f"{row}_{i}" for i in range(len(sizes) + 3)]
    first, last, new = [name for name in names if name not in sizes][:3]
    parts = {first: ranks, group or new: groups, last: sizes[row] // (ranks * groups)}
    dims = [Dim(name=name, size=size) for name, size in parts.items() if size > 1]
    apart = tuple(d.name for d in dims)
    sizes |= parts

    def named(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d for name in old for d in (apart if name == row else (name,))))

    def walked(a: Access) -> Access:
        return replace(a, map=AccessMap(tuple(Walk(named(w.dims), w.window) for w in a.map.walks)))

    def of(op: Op) -> Op:
        reads, writes = (tuple(map(walked, side)) for side in (op.reads, op.writes))
        done = replace(op, reads=reads, writes=writes, over=None if op.over is None else named(op.over))
        if op is not product:
            return done
        before, now = (math.prod(sizes[d] for d in o.worked) for o in (op, done))
        return replace(done, flops_per_point=op.flops_per_point * before / now)

    kept = tuple(d for d in n.space if d.name not in (row, group))
    return replace(n, space=IterationSpace((*dims, *kept)), ops=tuple(map(of, n.ops)))
