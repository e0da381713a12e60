"""Itemizes a strategy: every collective and every piece of local work. The items sum to the price in the cost
tables."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pase.files.codec import NotNegative
from pase.ir import Edge, Graph, Node
from pase.machine import CollectiveKind, CostModel, Mesh
from pase.tables.build import charge_price, habits, work_price
from pase.tables.charges import Charge, edge_charges, node_charges
from pase.tables.facts import facts
from pase.tables.work import Phase, Work, WorkKind, node_work

__all__ = [
    "Collective",
    "KnownCharges",
    "LocalWork",
    "NodeCost",
    "collectives",
    "largest_buffer",
    "local_work",
    "node_costs",
]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a step, derived from (node, config).

    nbytes: the larger local buffer on one device, as in CostModel.collective. times: how often in a step.
    cost: of all runs, in the cost model's unit. node: the node that pays for it (for an edge, the reader).
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
    """The cost of one node, in the cost model's unit."""

    compute: float
    communication: float
    update: float

    @property
    def total(self) -> float:
        """The sum of the three parts."""
        return self.compute + self.communication + self.update


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """A piece of a node's work on one device, for one run. It runs ``times`` times in a step.

    flops: a multiply-add counts as two. nbytes: bytes read and written. mnk: local extents of a product. cost: of all
    runs, in the cost model's unit. late: the fraction of a forward's runs that recomputation executes in backward.
    """

    phase: Phase
    kind: WorkKind
    dtype: str
    flops: NotNegative
    nbytes: NotNegative
    times: NotNegative
    cost: NotNegative
    mnk: tuple[float, float, float] | None = None
    late: NotNegative = 0.0


def _moving(charges: Iterable[Charge]) -> Iterator[tuple[Charge, int, float, float]]:
    """Charges of one config that send something: (charge, bit set of axes, bytes, rounds)."""
    for charge in charges:
        axes = int(np.ravel(charge.axes)[0])
        nbytes = float(np.ravel(charge.nbytes)[0])
        rounds = float(np.ravel(charge.rounds)[0])
        if axes and nbytes and rounds:
            yield charge, axes, nbytes, rounds


def _priced(charges: Iterable[Charge], model: CostModel, mesh: Mesh) -> tuple[Collective, ...]:
    """Charges of one config as collectives, without their nodes."""
    return tuple(
        Collective(
            kind=charge.kind,
            tensor=charge.tensor,
            axes=tuple(n for i, n in enumerate(mesh.names) if axes >> i & 1),
            nbytes=round(nbytes),
            times=round(charge.times * rounds),
            phase=charge.phase,
            node="",
            source="",
            cost=float(np.ravel(charge_price(charge, model, mesh))[0]),
        )
        for charge, axes, nbytes, rounds in _moving(charges)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownCharges:
    """Cache of priced collectives of edges and nodes, for one graph, mesh and cost model. Equal charges share a key."""

    edges: dict[object, tuple[Collective, ...]] = field(default_factory=dict)
    nodes: dict[object, tuple[Node, tuple[Collective, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class _ChosenConfigs:
    """The chosen configs of a graph's nodes. It finds nodes and edges with equal charges, which are those of repeated
    layers with equal configs."""

    graph: Graph
    mesh: Mesh
    chosen: list[np.ndarray]
    marks: list[bytes]

    @classmethod
    def of(cls, graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> _ChosenConfigs:
        chosen = [configs[n.name] for n in graph.nodes]
        return cls(graph=graph, mesh=mesh, chosen=chosen, marks=[c.tobytes() for c in chosen])

    def edges(self) -> Iterator[tuple[Edge, int, object]]:
        """Yields (edge, index of its reader, key that is equal for equal charges)."""
        for e, f in zip(self.graph.edges, facts(self.graph).edges, strict=True):
            yield e, f.dst, (f.flows, f.write, f.read, self.marks[f.src], self.marks[f.dst])

    def nodes(self) -> Iterator[tuple[Node, object]]:
        """Yields (node, key that is equal for equal charges)."""
        for n, number, mark in zip(self.graph.nodes, facts(self.graph).cost, self.marks, strict=True):
            yield n, (number, mark)

    def along(self, i: int) -> Iterator[Charge]:
        """Charges of the graph's i-th edge."""
        known = facts(self.graph)
        f = known.edges[i]
        have = known.rules[f.write].states(self.chosen[f.src][None, :], self.mesh)
        want = known.rules[f.read].states(self.chosen[f.dst][None, :], self.mesh)
        return edge_charges(self.graph, self.graph.edges[i], have, want, self.mesh)

    def inside(self, v: int) -> Iterator[Charge]:
        """Charges of the graph's v-th node."""
        return node_charges(self.graph, self.graph.nodes[v], self.chosen[v][None, :], self.mesh)


def collectives(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    model: CostModel,
    only: Container[str] | None = None,
    known: KnownCharges | None = None,
) -> tuple[Collective, ...]:
    """Every collective of a training step, in the order of the graph.

    configs: node name -> int8 [axes]. only: if given, the nodes to itemize, with the edges into them. known: a cache
    that may be reused for other configs. Equal nodes and edges of repeated layers are priced once per config.
    """
    strategy = _ChosenConfigs.of(graph, mesh, configs)
    known = KnownCharges() if known is None else known
    of_edge, of_node = known.edges, known.nodes
    out: list[list[Collective]] = [[] for _ in graph.nodes]
    for i, (e, reader, like) in enumerate(strategy.edges()):
        if only is not None and e.dst not in only:
            continue
        if like not in of_edge:
            of_edge[like] = _priced(strategy.along(i), model, mesh)
        out[reader] += [replace(c, tensor=e.tensor, node=e.dst, source=e.src) for c in of_edge[like]]
    for v, (n, like) in enumerate(strategy.nodes()):
        if only is not None and n.name not in only:
            continue
        if like not in of_node:
            of_node[like] = n, _priced(strategy.inside(v), model, mesh)
        first, mine = of_node[like]
        named = dict(zip(first.tensors, n.tensors, strict=True)) if mine else {}
        out[v] += [replace(c, tensor=named[c.tensor], node=n.name, source=n.name) for c in mine]
    return tuple(c for own in out for c in own)


def largest_buffer(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> float:
    """Bytes of the largest local buffer of a strategy's collectives. Needs no cost model."""
    strategy = _ChosenConfigs.of(graph, mesh, configs)
    edges = {like: i for i, (_, _, like) in enumerate(strategy.edges())}
    nodes = {like: v for v, (_, like) in enumerate(strategy.nodes())}
    charges = itertools.chain(map(strategy.along, edges.values()), map(strategy.inside, nodes.values()))
    every = itertools.chain.from_iterable(charges)
    return max((nbytes for _, _, nbytes, _ in _moving(every)), default=0.0)


def local_work(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], model: CostModel, optimizer: str = "adam"
) -> dict[str, tuple[LocalWork, ...]]:
    """The work of one device for each node in a step. configs: node name -> int8 [axes]."""
    made: dict[object, tuple[LocalWork, ...]] = {}  # equal nodes of repeated layers share the same work
    out: dict[str, tuple[LocalWork, ...]] = {}
    for n, number in zip(graph.nodes, facts(graph).cost, strict=True):
        at = (number, configs[n.name].tobytes())
        if at not in made:
            works = node_work(graph, n, configs[n.name][None, :], mesh, optimizer, habits(model))
            made[at] = tuple(_worked(w, model) for w in works)
        out[n.name] = made[at]
    return out


def _worked(w: Work, model: CostModel) -> LocalWork:
    """A piece of work of one config, as an item."""

    def one(x: np.ndarray) -> float:
        return float(np.ravel(x)[0])

    return LocalWork(
        phase=w.phase,
        kind=w.kind,
        dtype=w.dtype,
        flops=one(w.flops),
        nbytes=one(w.nbytes),
        times=w.times,
        cost=w.times * one(work_price(w, model)),
        mnk=None if w.mnk is None else (one(w.mnk[0]), one(w.mnk[1]), one(w.mnk[2])),
        late=w.late,
    )


def node_costs(
    work: Mapping[str, tuple[LocalWork, ...]], sent: tuple[Collective, ...]
) -> dict[str, NodeCost]:
    """Compute, communication and optimizer update per node. work: from ``local_work``. sent: from ``collectives``."""
    communication: dict[str, float] = {}
    for c in sent:
        communication[c.node] = communication.get(c.node, 0.0) + c.cost
    out: dict[str, NodeCost] = {}
    for name, works in work.items():
        parts = {"compute": 0.0, "update": 0.0}
        for w in works:
            parts["update" if w.phase == "update" else "compute"] += w.cost
        out[name] = NodeCost(communication=communication.get(name, 0.0), **parts)
    return out


def split_of(node: Node, config: np.ndarray, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Dim -> the mesh axes that split it, major to minor, including the axes of a copy's 'pending' dim."""
    out: dict[str, tuple[str, ...]] = {}
    for axis, d in zip(mesh.names, config, strict=True):
        if d >= 0:
            name = node.space.dims[int(d)].name
            out[name] = (*out.get(name, ()), axis)
    return out


def config_of(node: Node, split: Mapping[str, tuple[str, ...]], mesh: Mesh) -> np.ndarray:
    """The inverse of ``split_of``. KeyError if a dim or an axis does not exist."""
    dims = {d.name: i for i, d in enumerate(node.space)}
    axes = {a: i for i, a in enumerate(mesh.names)}
    config = np.full(len(mesh.names), -1, dtype=np.int8)
    for d, names in split.items():
        for a in names:
            config[axes[a]] = dims[d]
    return config
