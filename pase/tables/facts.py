"""Everything that the cost tables need from a graph, extracted once for all meshes. Equal nodes and edges of repeated
layers have equal numbers, whatever their names are."""

from __future__ import annotations

from dataclasses import dataclass

from pase.ir import Access, Graph, Node
from pase.ir.functions import CAUSAL_ATTENTION
from pase.ir.whole_step import whole_step
from pase.once import once
from pase.tables.charges import Flow, edge_flows
from pase.tables.layouts import (
    LayoutRule,
    conv_places,
    depthwise,
    merged_in_storage,
    read_rule,
    ring_of,
    within_groups,
    write_rule,
)

__all__ = ["EdgeFacts", "Facts", "facts"]


@dataclass(frozen=True, kw_only=True)
class EdgeFacts:
    """One edge. src, dst: indices into ``graph.nodes``. write, read: numbers of layout rules. flows: the number of its
    flows."""

    src: int
    dst: int
    write: int
    read: int
    flows: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """The facts of a graph.

    space, cost: a number per node. Nodes with the same ``space`` number have the same configs; nodes with the same
    ``cost`` number have the same cost for each config. rules, flows: what the numbers in ``edges`` refer to.
    """

    space: tuple[int, ...]
    cost: tuple[int, ...]
    edges: tuple[EdgeFacts, ...]
    rules: tuple[LayoutRule, ...]
    flows: tuple[tuple[Flow, ...], ...]


@once
def facts(graph: Graph) -> Facts:
    """The facts of a graph. They are kept with the graph, because a search builds tables for many meshes."""
    spaces: dict[object, int] = {}
    costs: dict[object, int] = {}
    rules: dict[LayoutRule, int] = {}
    flows: dict[tuple[Flow, ...], int] = {}
    place = {n.name: v for v, n in enumerate(graph.nodes)}
    edges = []
    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        write, read = write_rule(src, *src.write_of(e.tensor)), read_rule(dst, e.op, e.access)
        edges.append(
            EdgeFacts(
                src=place[e.src],
                dst=place[e.dst],
                write=rules.setdefault(write, len(rules)),
                read=rules.setdefault(read, len(rules)),
                flows=flows.setdefault(edge_flows(graph, e), len(flows)),
            )
        )
    return Facts(
        space=tuple(spaces.setdefault(_space_key(n), len(spaces)) for n in graph.nodes),
        cost=tuple(costs.setdefault(_cost_key(graph, n), len(costs)) for n in graph.nodes),
        edges=tuple(edges),
        rules=tuple(rules),
        flows=tuple(flows),
    )


def _space_key(n: Node) -> object:
    """Key of everything that a node's configs depend on."""
    place = {d.name: i for i, d in enumerate(n.space)}
    windows = [
        (tuple(place[d] for d in w.dims), w.window) for op in n.ops for a in op.reads for w in a.map.walks
    ]
    spaces = tuple((d.size, d.kind) for d in n.space)
    barred = (
        tuple(conv_places(n)),
        tuple(depthwise(n)),
        within_groups(n),
        tuple(merged_in_storage(n)),
        ring_of(n),
    )
    return spaces, tuple(w for w in windows if w[1]), barred


def _cost_key(graph: Graph, n: Node) -> object:
    """Key of everything that a node's price depends on."""
    place = {d.name: i for i, d in enumerate(n.space)}
    order: dict[str, int] = {}

    def stored(a: Access) -> str | None:
        """The dtype in which a parameter is stored; None for other tensors."""
        source = graph.producer.get(a.tensor)
        if source is None or source.kind != "parameter":
            return None
        return graph.tensors[source.ops[0].writes[0].tensor].dtype

    def access(a: Access) -> object:
        t = graph.tensors[a.tensor]
        known = order.setdefault(a.tensor, len(order))
        walks = tuple((tuple(place[d] for d in w.dims), w.window) for w in a.map.walks)
        return (
            known,
            walks,
            a.sparse,
            t.shape,
            t.dtype,
            t.needs_grad,
            t.role,
            a.tensor in graph.producer,
            stored(a),
            graph.read_outside(n, a.tensor),
        )

    ops = tuple(
        (
            op.kind,
            op.function is CAUSAL_ATTENTION,
            op.flops_per_point,
            None if op.over is None else tuple(place[d] for d in op.over),
            op.differentiable,
            op.times,
            op.chance,
            op.remat,
            op.backward,
            op.product_dtype,
            op.precision,
            tuple(map(access, op.reads)),
            tuple(map(access, op.writes)),
        )
        for op in n.ops
    )
    return tuple((d.size, d.kind) for d in n.space), ops, whole_step(graph).get(n.name)
