"""The features of a stage, for every config: seconds by when they are paid, and bytes by how long they are held.

A stage's time and bytes are sums over its nodes and edges. So are weighted sums of them, with any weights. One search
over the weighted tables therefore gives the least that any split takes in that direction
(``pase.compiler.stages.bounds``). The seconds are those of ``pase.compiler.stages.costs``. The bytes are at most those
of its account, which also counts what lives only for one op or one block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from pase.compiler.stages.costs import (
    CostKind,
    GatheredWeights,
    collective_shares,
    products_of_weights,
    work_shares,
)
from pase.compiler.stages.places import Places
from pase.ir import Edge, Graph, Node, Tensor
from pase.ir.blocks import micro_batches_of
from pase.machine import CostModel, Mesh
from pase.memory.account import held
from pase.tables import CostTables, EdgeTable
from pase.tables.axis_layout import forward_states
from pase.tables.build import (
    EdgeCosts,
    Space,
    charge_price,
    config_space,
    edge_costs,
    habits,
    work_price,
)
from pase.tables.charges import is_of_parameter, node_charges
from pase.tables.facts import facts
from pase.tables.layouts import concrete_size, local_bytes
from pase.tables.work import Phase, node_work

__all__ = ["Feature", "FeatureTables", "direction", "feature_tables", "running", "slower_may_weigh_less"]


class Feature(IntEnum):
    """The features of a stage: its kinds of cost (``CostKind``), with recomputation as part of the input's backward."""

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
    """Whether a way to run that takes longer may have a smaller weighted sum of seconds.

    It may if gathers and sums weigh less in each micro-batch than once per step, or if more compute hides more of them.
    """
    rises = min(weights[Feature.FORWARD_SENT], weights[Feature.AFTER]) < weights[Feature.BEFORE]
    return bool(rises or weights[Feature.WEIGHT_SENT] < weights[Feature.SUMS] or (weights < 0).any())


def direction(**weights: float) -> np.ndarray:
    """Return the weight of each feature, given by name, float64 [features].

    >>> direction(forward=4, sums=1).nonzero()[0].tolist() == [Feature.FORWARD, Feature.SUMS]
    True
    """
    out = np.zeros(len(Feature))
    for name, weight in weights.items():
        out[Feature[name.upper()]] = weight
    return out


def running(*, forward: float = 0, input: float = 0, weight: float = 0) -> np.ndarray:
    """Return the direction of actions that run this often, with compute and collectives; float64 [features].

    >>> bool((running(forward=2) == direction(forward=2, forward_sent=2)).all())
    True
    """
    sent = direction(forward_sent=forward, input_sent=input, weight_sent=weight)
    return sent + direction(forward=forward, input=input, weight=weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureTables:
    """The features of each node and edge.

    nodes: for each node, each feature of its configs, float64 [K]; equal nodes share one dict.
    edges: (an edge without its cost, each feature of its pairs of layouts).
    """

    space: Space
    nodes: tuple[_ByFeature, ...]
    edges: tuple[tuple[EdgeTable, _ByFeature], ...]

    @cached_property
    def entries(self) -> int:
        """How many numbers the tables hold; shared arrays count once."""
        distinct = {id(p): p for p in (*self.nodes, *(p for _, p in self.edges))}
        return sum(x.size for p in distinct.values() for x in p.values())

    @cached_property
    def stacked(self) -> dict[int, tuple[list[Feature], np.ndarray]]:
        """The features of each node and edge by the ``id`` of its dict: (which ones, float64 [features, entries])."""
        distinct = {id(p): p for p in (*self.nodes, *(p for _, p in self.edges)) if p}
        return {i: (list(p), np.stack([x.ravel() for x in p.values()])) for i, p in distinct.items()}

    def weighted(self, weights: np.ndarray, shares: list[float]) -> CostTables:
        """Return the tables of a weighted sum.

        weights: float64 [features].
        shares: the weight of each node, with the edges into it.
        """
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
    """Return them for the graph of a step in micro-batches (``pase.ir.blocks.accumulated``) on one stage's devices."""
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
        """Return a node's own work and collectives, grouped as in ``costs``."""
        out, for_weights = _ByFeature(), products_of_weights(self.graph, n)
        for w in node_work(self.graph, n, cfg, self.mesh, self.optimizer, habits(self.model)):
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
        """Return the fraction of a collective's seconds per step of each feature. reader: the node that pays for it."""
        return _features(
            collective_shares(reader, phase, times, of_parameter, self.weights, self.micro_batches)
        )

    def _bytes(self, n: Node, cfg: np.ndarray) -> _ByFeature:
        """Return what a node keeps, except in a region that is recomputed."""
        whole = self.weights == "hoisted" and self.micro_batches > 1
        out = _ByFeature()
        waits = not (self.recomputes and self.places.of(n.name) == "block")
        for h in held(self.graph, n, cfg, self.mesh, self.optimizer):
            apart = (h.weights and self.weights != "each") or (h.kind == "gradients" and whole)
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
        """Whether a block recomputes anything. If so, only that waits for its weights' gradients."""
        return any(
            op.region is not None
            for n in self.graph.nodes
            if self.places.of(n.name) == "block"
            for op in n.ops
        )

    @cached_property
    def reads(self) -> dict[str, list[tuple[Edge, float]]]:
        """For weights that stay gathered through the step: node -> (read of a parameter, its fraction of the count).

        If a part has several readers, the account counts the largest, which is at least their mean.
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
        """Return the bytes of a parameter as its reader has it, over all iterations of its loop."""
        reader, tensor = self.graph.node[e.dst], self.graph.tensors[e.tensor]
        return (
            local_bytes(reader, tensor, e.access, cfg, self.mesh)
            * concrete_size(e.op.times, e.dst)
            / self.micro_batches
        )

    def edges(self) -> Iterator[tuple[EdgeTable, _ByFeature]]:
        """Yield the edges that have a feature. An edge includes the copy of a parameter that it reshards."""
        graph, made = self.graph, dict[object, _ByFeature]()
        share = {id(e): part for reads in self.reads.values() for e, part in reads}
        shown = edge_costs(facts(graph), self.space.configs, self.mesh, self.model)
        for edge, (e, priced) in zip(graph.edges, shown, strict=True):
            reader, cast = graph.node[edge.dst], graph.tensors[edge.tensor].dtype
            copied = id(edge) in share and cast == self._stored(edge).dtype
            times = tuple(float(concrete_size(op.times, reader.name)) for op in reader.ops)
            weight = is_of_parameter(graph, edge.tensor)
            key = (
                id(priced.flows),
                edge if copied else None,
                times,
                any(op.remat for op in reader.ops),
                weight,
            )
            if key not in made:
                parts = _ByFeature()
                for f, cost in priced.flows:
                    _add(parts, cost, self._paid(reader, f.phase, f.times, weight))
                if copied:
                    _add(parts, self._copied(edge, priced, share[id(edge)]), {Feature.STATIC: 1.0})
                made[key] = parts
            if made[key]:
                yield priced.table(e, next(iter(made[key].values()))), made[key]

    def _copied(self, edge: Edge, priced: EdgeCosts, share: float) -> np.ndarray:
        """Return the bytes of the copy for each pair of layouts: none if it is read as it is stored."""
        have, want = (forward_states(rows) for rows in priced.rows)
        resharded = (have[:, None] != want[None]).any(axis=-1)
        local = np.full(len(want), np.inf)
        np.minimum.at(local, priced.classes[1], self._local(edge, self.space.configs[self._at[edge.dst]]))
        local[np.isinf(local)] = 0.0  # of layouts that no config has
        return np.where(resharded, share * local[None], 0.0)

    @cached_property
    def _at(self) -> dict[str, int]:
        return {n.name: v for v, n in enumerate(self.graph.nodes)}


_FEATURE_OF = {kind: Feature[kind.name.replace("RECOMPUTE", "INPUT")] for kind in CostKind}


def _features(shares: Mapping[CostKind, np.ndarray | float]) -> dict[Feature, np.ndarray | float]:
    """Return shares by feature, from shares by kind. Recomputation is part of the input's backward."""
    return {_FEATURE_OF[kind]: share for kind, share in shares.items()}


def _add(parts: _ByFeature, value: np.ndarray, shares: Mapping[Feature, np.ndarray | float]) -> None:
    """Add the value to each feature by its share. A feature that is zero everywhere is left out."""
    for f, share in shares.items():
        if np.any(share) and np.any(value):
            parts[f] = parts.get(f, 0.0) + share * value
