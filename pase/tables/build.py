"""Graph × mesh × cost model -> cost tables, with the configs that the tables' indices mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pase.ir import Edge, Graph, Node
from pase.machine import CostModel, Mesh
from pase.tables.derive import Charge, Work, edge_charges, node_charges, node_work
from pase.tables.layouts import configs, read_states, write_states
from pase.tables.types import CostTables, EdgeTable

__all__ = ["BUCKET_BYTES", "Space", "build", "charge_cost", "charge_price", "work_cost"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """What the tables' indices mean: per node its configs, int8 [K, axes]."""

    graph: Graph
    mesh: Mesh
    configs: tuple[np.ndarray, ...]

    def index(self, strategy: Mapping[str, np.ndarray]) -> np.ndarray:
        """Config indices of a strategy (node name -> int8 [axes]); KeyError where it is not in the space."""
        out = np.zeros(len(self.configs), dtype=np.int64)
        for v, n in enumerate(self.graph.nodes):
            hit = np.flatnonzero((self.configs[v] == strategy[n.name]).all(axis=1))
            if not len(hit):
                raise KeyError(f"node '{n.name}': {strategy[n.name]} is not among its configs on mesh {self.mesh.sizes}")
            out[v] = hit[0]
        return out


BUCKET_BYTES = 25 << 20
"""Collectives of parameters travel in buckets of about this size (PyTorch DDP's default cap; XLA combines to
30 MiB): a small one pays its share of a bucket's time, not a latency of its own."""


def charge_price(charge: Charge, model: CostModel, mesh: Mesh) -> np.ndarray:
    """Cost of a charge, all times of it."""
    alone = model.collective(charge.kind, mesh, charge.axes, charge.nbytes)
    if charge.bucketed:
        full = model.collective(charge.kind, mesh, charge.axes, np.full_like(charge.nbytes, BUCKET_BYTES, dtype=float))
        alone = np.where(charge.nbytes < BUCKET_BYTES, full * (charge.nbytes / BUCKET_BYTES), alone)
    return charge.times * alone


def charge_cost(charges: Iterable[Charge], model: CostModel, mesh: Mesh) -> np.ndarray | float:
    return sum((charge_price(c, model, mesh) for c in charges), np.float64(0.0))


def work_cost(work: Iterable[Work], model: CostModel) -> np.ndarray | float:
    total: np.ndarray | float = 0.0
    for w in work:
        total = total + w.times * model.compute(w.kind, w.dtype, w.flops, w.nbytes, mnk=w.mnk)
    return total


def build(graph: Graph, mesh: Mesh, model: CostModel, optimizer: str = "adam") -> tuple[CostTables, Space]:
    """Price every config of every node and every pair of layouts of every edge.

    Equal nodes and edges of repeated layers are priced once and share their arrays.
    """
    space: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    memo: dict[object, np.ndarray] = {}
    shared: dict[object, np.ndarray] = {}
    for n in graph.nodes:
        key = _space_key(n)
        if key not in shared:
            shared[key] = configs(n, mesh)
        cfg = shared[key]
        space.append(cfg)
        node_key = _node_key(graph, n)
        if node_key not in memo:
            cost = work_cost(node_work(graph, n, cfg, mesh, optimizer), model)
            cost = cost + charge_cost(node_charges(graph, n, cfg, mesh), model, mesh)
            memo[node_key] = np.broadcast_to(np.asarray(cost, dtype=np.float64), (len(cfg),)).copy()
        costs.append(memo[node_key])
    position = {n.name: v for v, n in enumerate(graph.nodes)}
    edge_memo: dict[object, tuple[np.ndarray, np.ndarray, np.ndarray] | None] = {}
    classes: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    edges: list[EdgeTable] = []
    for e in graph.edges:
        u, v = position[e.src], position[e.dst]
        src, dst = graph.nodes[u], graph.nodes[v]
        op, write = src.write_of(e.tensor)
        tensor = graph.tensors[e.tensor]
        shape = tuple(tensor.shape)
        out_key = ("w", _space_key(src), op.dims, write.map, shape)
        if out_key not in classes:
            classes[out_key] = _classes(write_states(src, op, write, tensor, space[u], mesh))
        in_key = ("r", _space_key(dst), e.op.dims, e.access.map, shape)
        if in_key not in classes:
            classes[in_key] = _classes(read_states(dst, e.op, e.access, tensor, space[v], mesh))
        key = (out_key, in_key, tensor.dtype, tensor.needs_grad, src.kind == "parameter", e.op.differentiable, e.op.times, e.access.again)
        if key not in edge_memo:
            edge_memo[key] = _edge_table(graph, e, classes[out_key], classes[in_key], model, mesh)
        found = edge_memo[key]
        if found is not None:
            cost, src_class, dst_class = found
            edges.append(EdgeTable(src=u, dst=v, cost=cost, src_class=src_class, dst_class=dst_class))
    names = tuple(n.name for n in graph.nodes)
    tables = CostTables(node_costs=tuple(costs), edges=tuple(edges), names=names)
    return tables, Space(graph=graph, mesh=mesh, configs=tuple(space))


def _space_key(n: Node) -> object:
    windows = tuple((w.dims, w.window) for op in n.ops for a in op.reads for w in a.map.walks if w.window)
    return (n.space, windows)


def _node_key(graph: Graph, n: Node) -> object:
    """All that a node's price depends on; tensor names are left out, so that repeated layers agree."""
    order: dict[str, int] = {}

    def tensor(name: str) -> object:
        t = graph.tensors[name]
        number = order.setdefault(name, len(order))
        return number, t.shape, t.dtype, t.needs_grad, name in graph.producer, graph.read_outside(n, name)

    return (n.space,) + tuple(
        (
            op.kind, op.flops_per_point, op.over, op.differentiable, op.times, op.remat,
            tuple((tensor(a.tensor), a.map, a.sparse) for a in (*op.reads, *op.writes)), len(op.reads),
        )
        for op in n.ops
    )  # fmt: skip


def _classes(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct layouts [C, axes], and each config's class, int32 [K]."""
    rows, inverse = np.unique(states, axis=0, return_inverse=True)
    return rows, inverse.reshape(-1).astype(np.int32)


def _edge_table(
    graph: Graph, e: Edge, src: tuple[np.ndarray, np.ndarray], dst: tuple[np.ndarray, np.ndarray],
    model: CostModel, mesh: Mesh,
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:  # fmt: skip
    """None where the edge costs nothing under any pair of layouts."""
    cost = charge_cost(edge_charges(graph, e, src[0], dst[0], mesh), model, mesh)
    if not np.any(cost):
        return None
    matrix = np.broadcast_to(np.asarray(cost, dtype=np.float64), (len(src[0]), len(dst[0]))).copy()
    return matrix, src[1], dst[1]
