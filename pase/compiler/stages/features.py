"""What a stage's cost and memory depend on, for every config: seconds by when they are paid, bytes by how long they
last.

A stage's time and bytes are sums over its nodes and edges. So are weighted sums of them, with any weights: one search
over the weighted tables is then the least that any split takes in that direction (``pase.compiler.stages.bounds``). The
seconds are those of ``pase.compiler.stages.costs``. The bytes are at most those of its account, which counts in
addition what lives for one op or one block only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from pase.compiler.stages.costs import GatheredWeights, collective_shares, products_of_weights, work_shares
from pase.compiler.stages.places import Places
from pase.ir import Edge, Graph, Node, Tensor
from pase.ir.blocks import micro_batches_of
from pase.machine import CostModel, Mesh
from pase.memory.account import held
from pase.tables import CostTables, EdgeTable
from pase.tables.build import (
    EdgeCosts,
    Space,
    array_tile,
    charge_price,
    config_space,
    edge_costs,
    work_price,
)
from pase.tables.charges import node_charges
from pase.tables.facts import facts
from pase.tables.layouts import concrete_size, forward_states, local_bytes
from pase.tables.work import Phase, node_work

__all__ = ["Feature", "FeatureTables", "direction", "feature_tables", "running", "slower_may_weigh_less"]


class Feature(IntEnum):
    """Seconds per micro-batch: forward, backward's two parts (input with recomputation): compute, and collectives that
    it waits for. Seconds per step: before (gathers), sums of gradients, after. Bytes on a device: kept throughout; of
    one micro-batch until its backward, and until its weights' gradients.
    """

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2
    FORWARD_SENT = 3
    INPUT_SENT = 4
    WEIGHT_SENT = 5
    BEFORE = 6
    SUMS = 7
    AFTER = 8
    STATIC = 9
    KEPT = 10
    WAITING = 11


_ByFeature = dict[Feature, np.ndarray]


def slower_may_weigh_less(weights: np.ndarray) -> bool:
    """Whether a way to run that takes longer may have less of a weighted sum of seconds: gathers and sums that weigh
    less where they run each time, or compute that hides more of them."""
    rises = min(weights[Feature.FORWARD_SENT], weights[Feature.AFTER]) < weights[Feature.BEFORE]
    return bool(rises or weights[Feature.WEIGHT_SENT] < weights[Feature.SUMS] or (weights < 0).any())


def direction(**weights: float) -> np.ndarray:
    """The weight of each feature by its name, float64 [features].

    >>> direction(forward=4, sums=1).nonzero()[0].tolist() == [Feature.FORWARD, Feature.SUMS]
    True
    """
    out = np.zeros(len(Feature))
    for name, weight in weights.items():
        out[Feature[name.upper()]] = weight
    return out


def running(*, forward: float = 0, input: float = 0, weight: float = 0) -> np.ndarray:
    """The direction of what actions take that run so often, compute and what it waits for; float64 [features].

    >>> bool((running(forward=2) == direction(forward=2, forward_sent=2)).all())
    True
    """
    sent = direction(forward_sent=forward, input_sent=input, weight_sent=weight)
    return sent + direction(forward=forward, input=input, weight=weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureTables:
    """nodes: per node each feature of its configs, float64 [K]; equal nodes share one dict. edges: (an edge without
    its cost, each feature of its pairs of layouts)."""

    space: Space
    nodes: tuple[_ByFeature, ...]
    edges: tuple[tuple[EdgeTable, _ByFeature], ...]

    @cached_property
    def entries(self) -> int:
        """How many numbers the tables hold, equal ones once."""
        distinct = {id(p): p for p in (*self.nodes, *(p for _, p in self.edges))}
        return sum(x.size for p in distinct.values() for x in p.values())

    @cached_property
    def stacked(self) -> dict[int, tuple[list[Feature], np.ndarray]]:
        """The parts of each node and edge by their ``id``: which features they have, and these, float64 [features,
        entries]."""
        distinct = {id(p): p for p in (*self.nodes, *(p for _, p in self.edges)) if p}
        return {i: (list(p), np.stack([x.ravel() for x in p.values()])) for i, p in distinct.items()}

    def weighted(self, weights: np.ndarray, shares: list[float]) -> CostTables:
        """The tables of a weighted sum: float64 [features], and the weight of each node with the edges into it."""
        summed: dict[int, np.ndarray] = {}
        made: dict[tuple[int, float], np.ndarray] = {}  # equal layers keep sharing their arrays

        def cost(parts: _ByFeature, like: tuple[int, ...], share: float) -> np.ndarray:
            if (id(parts), share) not in made:
                if not (share and parts):
                    made[id(parts), share] = np.zeros(like)
                    return made[id(parts), share]
                if id(parts) not in summed:
                    which, values = self.stacked[id(parts)]
                    summed[id(parts)] = (weights[which] @ values).reshape(like)
                made[id(parts), share] = share * summed[id(parts)]
            return made[id(parts), share]

        configs = self.space.configs
        return CostTables(
            node_costs=tuple(
                cost(p, (len(c),), s) for p, c, s in zip(self.nodes, configs, shares, strict=True)
            ),
            edges=tuple(
                EdgeTable(
                    src=e.src,
                    dst=e.dst,
                    cost=cost(p, e.cost.shape, shares[e.dst]),
                    src_class=e.src_class,
                    dst_class=e.dst_class,
                )
                for e, p in self.edges
                if shares[e.dst] and any(weights[f] for f in p)
            ),
            names=tuple(n.name for n in self.space.graph.nodes),
        )


def feature_tables(
    graph: Graph, places: Places, mesh: Mesh, model: CostModel, optimizer: str, weights: GatheredWeights
) -> FeatureTables:
    """For the graph of a step in micro-batches (``pase.ir.blocks.accumulated``) on the devices of one stage."""
    space = Space(graph=graph, mesh=mesh, configs=config_space(graph, mesh, model))
    stage = _StagePricing(space=space, places=places, model=model, optimizer=optimizer, weights=weights)
    return FeatureTables(space=space, nodes=tuple(stage.nodes()), edges=tuple(stage.edges()))


@dataclass(frozen=True, kw_only=True, eq=False)
class _StagePricing:
    space: Space
    places: Places
    model: CostModel
    optimizer: str
    weights: GatheredWeights

    @property
    def graph(self) -> Graph:
        return self.space.graph

    @property
    def mesh(self) -> Mesh:
        return self.space.mesh

    @cached_property
    def micro_batches(self) -> int:
        return micro_batches_of(self.graph)

    def nodes(self) -> Iterator[_ByFeature]:
        seconds: dict[int, _ByFeature] = {}
        made: dict[object, _ByFeature] = {}
        for n, cfg, like in zip(self.graph.nodes, self.space.configs, facts(self.graph).cost, strict=True):
            if like not in seconds:
                seconds[like] = self._seconds(n, cfg)
            nbytes = self._bytes(n, cfg)
            key = like, *((f, x.tobytes()) for f, x in nbytes.items())
            yield made.setdefault(key, seconds[like] | nbytes)

    def _seconds(self, n: Node, cfg: np.ndarray) -> _ByFeature:
        """A node's own work and collectives, as ``costs`` groups them."""
        out, for_weights = _ByFeature(), products_of_weights(self.graph, n)
        for w in node_work(self.graph, n, cfg, self.mesh, self.optimizer, array_tile(self.model)):
            price = np.broadcast_to(w.times * work_price(w, self.model), len(cfg))
            _add(out, price, _features(work_shares(w, for_weights, self.micro_batches)))
        for c in node_charges(self.graph, n, cfg, self.mesh):
            price = np.broadcast_to(charge_price(c, self.model, self.mesh), len(cfg))
            of_parameter = self.graph.producer[c.tensor].kind == "parameter"
            _add(out, price, self._paid(n, c.phase, c.times * c.rounds, of_parameter))
        return out

    def _paid(
        self, reader: Node, phase: Phase, times: np.ndarray | float, of_parameter: bool
    ) -> dict[Feature, np.ndarray | float]:
        """How much of a collective's seconds per step goes to each feature. reader: the node that pays for it."""
        return _features(
            collective_shares(reader, phase, times, of_parameter, self.weights, self.micro_batches)
        )

    def _bytes(self, n: Node, cfg: np.ndarray) -> _ByFeature:
        """What a node keeps, except in a region that is recomputed."""
        whole = self.weights == "once" and self.micro_batches > 1
        out = _ByFeature()
        waits = not (self.recomputes and self.places.of(n.name) == "block")
        for h in held(self.graph, n, cfg, self.mesh, self.optimizer):
            apart = (h.weights and self.weights == "once") or (h.kind == "gradients" and whole)
            if h.region is not None or apart:
                continue
            if h.kind != "activations" or h.weights or n.kind == "input":
                _add(out, h.nbytes, {Feature.STATIC: 1.0})
            else:
                _add(out, h.nbytes, {Feature.KEPT: 1.0} | ({Feature.WAITING: 1.0} if waits else {}))
        for e, share in self.reads.get(n.name, ()):
            tensor, stored = self.graph.tensors[e.tensor], self._stored(e)
            summed = stored.itemsize / tensor.itemsize if stored.needs_grad and whole else 0.0
            cast = 1.0 if tensor.dtype != stored.dtype else 0.0
            _add(out, share * self._local(e, cfg), {Feature.STATIC: summed + cast})
        return out

    @cached_property
    def recomputes(self) -> bool:
        """Whether a block computes something again: then only that waits with its weights' gradients."""
        return any(
            op.region is not None
            for n in self.graph.nodes
            if self.places.of(n.name) == "block"
            for op in n.ops
        )

    @cached_property
    def reads(self) -> dict[str, list[tuple[Edge, float]]]:
        """Where weights are kept whole through the step: node -> (read of a parameter, its share of what is counted).

        Of several readers in one part the account counts the largest, which is at least their mean.
        """
        if self.weights == "each":
            return {}
        graph, of = self.graph, self.places.of
        edges = [e for e in graph.edges if graph.node[e.src].kind == "parameter"]
        many = Counter((of(e.dst), e.src) for e in edges)
        out = defaultdict[str, list[tuple[Edge, float]]](list)
        for e in edges:
            out[e.dst].append((e, 1 / many[of(e.dst), e.src]))
        return out

    def _stored(self, e: Edge) -> Tensor:
        return self.graph.tensors[self.graph.node[e.src].ops[0].writes[0].tensor]

    def _local(self, e: Edge, cfg: np.ndarray) -> np.ndarray:
        """Bytes of a parameter as its reader has it, over all turns of its loop."""
        reader, tensor = self.graph.node[e.dst], self.graph.tensors[e.tensor]
        return (
            local_bytes(reader, tensor, e.access, cfg, self.mesh)
            * concrete_size(e.op.times, e.dst)
            / self.micro_batches
        )

    def edges(self) -> Iterator[tuple[EdgeTable, _ByFeature]]:
        """Those that have a feature. A copy of a parameter in another layout than the stored one is the edge's."""
        graph, made = self.graph, dict[object, _ByFeature]()
        share = {id(e): part for reads in self.reads.values() for e, part in reads}
        shown = edge_costs(facts(graph), self.space.configs, self.mesh, self.model)
        for edge, (e, priced) in zip(graph.edges, shown, strict=True):
            reader, cast = graph.node[edge.dst], graph.tensors[edge.tensor].dtype
            copied = id(edge) in share and cast == self._stored(edge).dtype
            times = tuple(float(concrete_size(op.times, reader.name)) for op in reader.ops)
            key = id(priced.flows), edge if copied else None, times, any(op.remat for op in reader.ops)
            if key not in made:
                parts = _ByFeature()
                for f, cost in priced.flows:
                    _add(parts, cost, self._paid(reader, f.phase, f.times, f.bucketed))
                if copied:
                    _add(parts, self._copied(edge, priced, share[id(edge)]), {Feature.STATIC: 1.0})
                made[key] = parts
            if made[key]:
                yield priced.table(e, next(iter(made[key].values()))), made[key]

    def _copied(self, edge: Edge, priced: EdgeCosts, share: float) -> np.ndarray:
        """Bytes of the copy under each pair of layouts: none where it is read as it is stored."""
        have, want = (forward_states(rows) for rows in priced.rows)
        resharded = (have[:, None] != want[None]).any(axis=-1)
        local = np.full(len(want), np.inf)
        np.minimum.at(local, priced.classes[1], self._local(edge, self.space.configs[self._at[edge.dst]]))
        local[np.isinf(local)] = 0.0  # of layouts that no config has
        return np.where(resharded, share * local[None], 0.0)

    @cached_property
    def _at(self) -> dict[str, int]:
        return {n.name: v for v, n in enumerate(self.graph.nodes)}


def _features(shares: Mapping[str, np.ndarray | float]) -> dict[Feature, np.ndarray | float]:
    """Shares by field of ``PartCost``, by feature: recomputation precedes the input's part of backward."""
    return {Feature[name.replace("recompute", "input").upper()]: x for name, x in shares.items()}


def _add(parts: _ByFeature, value: np.ndarray, shares: Mapping[Feature, np.ndarray | float]) -> None:
    """Add the value to each feature by its share; a feature that is nowhere is left out."""
    for f, share in shares.items():
        if np.any(share) and np.any(value):
            parts[f] = parts.get(f, 0.0) + share * value
