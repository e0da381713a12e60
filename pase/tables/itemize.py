"""A strategy item by item: every collective, every second, every byte; sums to what the tables priced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pase.ir import Graph, Node
from pase.machine import CollectiveKind, CostModel, Mesh
from pase.tables.build import array_tile, charge_price, work_price
from pase.tables.charges import Charge, edge_charges, node_charges
from pase.tables.layouts import read_states, write_states
from pase.tables.work import Phase, node_work

__all__ = ["Collective", "NodeCost", "collectives", "node_costs"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a step, derived from (node, config).

    nbytes: the larger local buffer on one device, as CostModel.collective has it; times: how often in a step;
    cost: of all times, in the cost model's unit; node: where it is paid (for an edge, the reader).
    """

    kind: CollectiveKind
    tensor: str
    axes: tuple[str, ...]
    nbytes: int
    times: int
    phase: Phase
    node: str
    source: str
    cost: float


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """One node's share, in the cost model's unit."""

    compute: float
    communication: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.update


def _priced(charge: Charge, node: str, source: str, model: CostModel, mesh: Mesh) -> Collective | None:
    axes = int(np.ravel(charge.axes)[0])
    nbytes = float(np.ravel(charge.nbytes)[0])
    turns = float(np.ravel(charge.turns)[0])
    if not axes or not nbytes or not turns:
        return None
    cost = float(np.ravel(charge_price(charge, model, mesh))[0])
    return Collective(
        kind=charge.kind,
        tensor=charge.tensor,
        axes=tuple(n for i, n in enumerate(mesh.names) if axes >> i & 1),
        nbytes=round(nbytes),
        times=round(charge.times * turns),
        phase=charge.phase,
        node=node,
        source=source,
        cost=cost,
    )


def collectives(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], model: CostModel
) -> tuple[Collective, ...]:
    """Every collective of a training step, in the order of the graph.

    configs: node name -> int8 [axes].
    """
    out: list[Collective | None] = []
    incoming: dict[str, list[tuple[str, Iterator[Charge]]]] = {}
    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        op, write = src.write_of(e.tensor)
        tensor = graph.tensors[e.tensor]
        have = write_states(src, op, write, tensor, configs[e.src][None, :], mesh)
        want = read_states(dst, e.op, e.access, tensor, configs[e.dst][None, :], mesh)
        incoming.setdefault(e.dst, []).append((e.src, edge_charges(graph, e, have, want, mesh)))
    for n in graph.nodes:
        for src_name, charges in incoming.get(n.name, []):
            out += [_priced(c, n.name, src_name, model, mesh) for c in charges]
        out += [
            _priced(c, n.name, n.name, model, mesh)
            for c in node_charges(graph, n, configs[n.name][None, :], mesh)
        ]
    return tuple(c for c in out if c is not None)


def node_costs(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    model: CostModel,
    moved: tuple[Collective, ...],
    optimizer: str = "adam",
) -> dict[str, NodeCost]:
    """Per node: compute, communication (``moved``: the result of ``collectives``) and optimizer update."""
    communication: dict[str, float] = {}
    for c in moved:
        communication[c.node] = communication.get(c.node, 0.0) + c.cost
    out: dict[str, NodeCost] = {}
    for n in graph.nodes:
        parts = {"compute": 0.0, "update": 0.0}
        for w in node_work(graph, n, configs[n.name][None, :], mesh, optimizer, array_tile(model)):
            price = float(np.ravel(work_price(w, model))[0])
            parts["update" if w.phase == "update" else "compute"] += w.times * price
        out[n.name] = NodeCost(communication=communication.get(n.name, 0.0), **parts)
    return out


def split_of(node: Node, config: np.ndarray, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """dim -> the mesh axes that split it, major to minor; a copy's 'pending' axes included."""
    out: dict[str, tuple[str, ...]] = {}
    for axis, d in zip(mesh.names, config, strict=True):
        if d >= 0:
            name = node.space.dims[int(d)].name
            out[name] = (*out.get(name, ()), axis)
    return out


def config_of(node: Node, split: Mapping[str, tuple[str, ...]], mesh: Mesh) -> np.ndarray:
    """The inverse of ``split_of``; KeyError for a dim or an axis that does not exist."""
    dims = {d.name: i for i, d in enumerate(node.space)}
    axes = {a: i for i, a in enumerate(mesh.names)}
    config = np.full(len(mesh.names), -1, dtype=np.int8)
    for d, names in split.items():
        for a in names:
            config[axes[a]] = dims[d]
    return config
