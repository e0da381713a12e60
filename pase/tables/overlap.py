"""The step time when collectives overlap with compute, depending on their position in the step.

The search bounds this time, and every report shows it.

    step = waited + overlapped(forward, gathers) + overlapped(backward, backward_collectives)
    overlapped(compute, collectives) = max(compute + slow * collectives, collectives)

With n micro-batches, parameters whose update is sharded are gathered once, during the first micro-batch's forward:

    step = waited + overlapped(forward / n, gathers / n + updated) + (n - 1) / n * overlapped(forward, gathers) + ...

Collectives of parameters overlap with the compute of their pass. Parameters are gathered before their readers run,
gradients are summed during backward, and with recomputation parameters are also gathered in backward. The collectives
run one after another. While they run, compute is slower by the fraction of the device that they occupy. Because of
their position, some collectives and some compute overlap with nothing:

- The gather of the first parameter that is read (nothing runs before it) and the sum of its gradient (nothing runs
  after it). In backward, the first gather that recomputation needs.
- Compute after the last read of a parameter: in forward all gathers are over, in backward no sum has begun.

On machines whose compiler runs sums alone (``Machine.sums_alone``), compute waits for all sums of gradients. On
machines with lone gathers (``Machine.lone_gather_bytes``), compute waits for all gathers of small parameters.

A whole step (``pase.ir.whole_step``) has its backward and its sums of gradients in its own graph; the same holds there.

In a loop, this applies to one iteration. This time counts as waited, and so do collectives between products and the
optimizer's update. Collectives that run once a step overlap with one micro-batch only.

With equal blocks, the result is the makespan of a schedule with gathers one block early and sums one block late (as in
``pase.stated``). It is also the longest path through the two-machine flow shop of compute and transfers (Johnson 1954).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pase.ir import Edge, Graph
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.ir.made_of_weights import made_of_weights
from pase.ir.whole_step import StepPass, sums_gradient, whole_step
from pase.machine import CostModel, Mesh
from pase.once import once
from pase.tables.build import Space, config_space, edge_costs, facts_along, lone_gather, phase_costs
from pase.tables.charges import Flow, is_made_of_weights, is_of_parameter
from pase.tables.facts import facts
from pase.tables.layouts import concrete_size
from pase.tables.types import CostTables, EdgeTable

__all__ = [
    "Alone",
    "Passes",
    "StepParts",
    "StepTables",
    "alone",
    "edges_at",
    "nodes_at",
    "overlapped",
    "passes_of",
]


def overlapped(compute: float, collectives: float, slow: float) -> float:
    """Time of compute and of collectives that overlap with it. slow: the fraction of the device that they occupy.

    >>> overlapped(1.0, 0.5, 0.0), overlapped(1.0, 0.5, 0.2), overlapped(1.0, 3.0, 0.2)
    (1.0, 1.1, 3.0)
    """
    return max(compute + slow * collectives, collectives)


@dataclass(frozen=True)
class StepParts:
    """The parts of a step, in the cost model's unit.

    waited: time that overlaps with nothing. forward, backward: compute. gathers: collectives that overlap with forward.
    backward_collectives: collectives that overlap with backward: sums of gradients, and gathers for recomputation.
    updated: gathers of updated parameters, once a step, which overlap with the first micro-batch's forward.
    """

    waited: float = 0.0
    forward: float = 0.0
    gathers: float = 0.0
    backward: float = 0.0
    backward_collectives: float = 0.0
    updated: float = 0.0

    def total(self, slow: float, first: float = 1.0) -> float:
        """The cost of the step.

        slow: the fraction of the device that collectives occupy while they run. first: the fraction of forward that
        runs in the first micro-batch.
        """
        forward = overlapped(first * self.forward, first * self.gathers + self.updated, slow)
        rest = (1 - first) * overlapped(self.forward, self.gathers, slow)
        return self.waited + forward + rest + overlapped(self.backward, self.backward_collectives, slow)

    @property
    def summed(self) -> float:
        """The cost of the step if nothing overlaps."""
        return float(self.row.sum())

    @property
    def row(self) -> np.ndarray:
        """The parts as an array, float64 [6]."""
        return np.array(
            [self.waited, self.forward, self.gathers, self.backward, self.backward_collectives, self.updated]
        )


_PARTS = 6
WAITED, FORWARD, GATHERS, BACKWARD, BACKWARD_COLLECTIVES, UPDATED = range(_PARTS)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Which parts of a step overlap: in each pass, compute with collectives.

    slow: the fraction of the device that collectives occupy while they run. first: the fraction of forward that runs in
    the first micro-batch. If it is below 1, the first micro-batch's forward is a pass of its own.
    """

    slow: float
    first: float = 1.0

    @cached_property
    def compute_margin(self) -> np.ndarray:
        """By how much compute takes longer than collectives in each pass, as weights of the parts; float64 [passes,
        6]."""
        behind = self.slow - 1
        rows = np.zeros((3, _PARTS))
        rows[0, [FORWARD, GATHERS, UPDATED]] = self.first, self.first * behind, behind
        rows[1, [BACKWARD, BACKWARD_COLLECTIVES]] = 1.0, behind
        rows[2, [FORWARD, GATHERS]] = 1 - self.first, (1 - self.first) * behind
        return rows[: 2 if self.first == 1 else 3]

    @cached_property
    def least_parts(self) -> np.ndarray:
        """Weights of the parts that a step takes at least: waited time and collectives; float64 [6]."""
        out = np.ones(_PARTS)
        out[[FORWARD, BACKWARD]] = 0.0
        return out

    @property
    def longest(self) -> tuple[float, ...]:
        """The weights with which every pass takes as long as its compute."""
        return (1.0,) * len(self.compute_margin)

    def between(self, compute: Sequence[float]) -> np.ndarray:
        """Weights of the parts, float64 [6], with which the price of a step is linear and never above its real cost.

        This holds because the maximum of two numbers is at least any weighted mean of them. compute: the weight of
        compute in each pass, in [0, 1].
        """
        return np.asarray(self.least_parts + np.array(compute) @ self.compute_margin)


def passes_of(graph: Graph, slow: float) -> Passes:
    """The passes of a step. Gathers of every micro-batch overlap with all of them, hoisted gathers with one only."""
    return Passes(slow=slow, first=1 / micro_batches_of(graph) if hoisted_of(graph) == "none" else 1.0)


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Fractions, in [0, 1], of each node's times that overlap with nothing because of their position.

    forward, backward: of the node's compute. gathers, regathers, sums: of the collectives of a parameter that the node
    reads, which are its gather for forward, its gather for recomputation and the sum of its gradient.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gathers: tuple[float, ...]
    regathers: tuple[float, ...]
    sums: tuple[float, ...]


@once
def alone(graph: Graph) -> Alone:
    """The fractions for each node. A node's position is its index in the graph's list, which is in execution order."""
    if passes := whole_step(graph):
        return _alone_in_step(graph, passes)
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    turn = [min(micro_batches_of(graph) / max(concrete_size(n.times, n.name), 1), 1.0) for n in graph.nodes]
    of_weights = made_of_weights(graph)
    reads = [
        e
        for e in graph.edges
        if is_made_of_weights(graph, e)
        or (graph.producer[e.tensor].kind == "parameter" and e.dst not in of_weights)
    ]
    earliest = sorted({e.dst for e in reads}, key=lambda name: place[name])[:1]
    first = {place[name] for name in _with_makers(graph, earliest)}
    last = max((place[e.dst] for e in reads), default=-1)
    rerun = max((place[e.dst] for e in reads if e.access.recompute), default=-1)

    def at(*where: int) -> tuple[float, ...]:
        return tuple(t if i in where else 0.0 for i, t in enumerate(turn))

    hoisted = hoisted_of(graph)

    def compute(single: bool) -> tuple[float, ...]:
        """Fractions of compute. single: whether the collectives run once a step and overlap with one micro-batch."""
        beside = 1 / micro_batches_of(graph) if single else 1.0
        return tuple(1 - beside * (1 - (t if i >= last else 0.0)) for i, t in enumerate(turn))

    return Alone(
        forward=compute(hoisted != "none"),
        backward=compute(hoisted == "all"),
        gathers=at(*first),
        regathers=at(rerun),
        sums=at(*first),
    )


def _with_makers(graph: Graph, readers: Iterable[str]) -> set[str]:
    """The nodes and those that make their weights of parameters alone."""
    of_weights, found, todo = made_of_weights(graph), set[str](), list(readers)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            makers = (graph.producer.get(a.tensor) for _, a in graph.node[name].reads)
            todo += [m.name for m in makers if m is not None and m.name in of_weights]
    return found


def _alone_in_step(graph: Graph, passes: Mapping[str, StepPass]) -> Alone:
    """The fractions for the nodes of a whole step, whose backward comes after its forward in the graph's list.

    The gradients of a loop are summed when the loop has ended, as one stack. These sums count as overlapping with
    nothing.
    """
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    runs = [max(concrete_size(n.times, n.name), 1) for n in graph.nodes]
    reads = [e for e in graph.edges if is_of_parameter(graph, e.tensor) and graph.node[e.dst].kind != "copy"]
    forward = [e for e in reads if passes[e.dst] == "forward"]
    backward = [e for e in reads if passes[e.dst] == "backward"]
    sums = [(place[e.src], place[e.dst]) for e in graph.edges if sums_gradient(graph, e)]
    beside = [(made, read) for made, read in sums if runs[made] == 1]
    begin, end = (f([made for made, _ in beside], default=len(runs)) for f in (min, max))

    def at(*where: int) -> tuple[float, ...]:
        return tuple(1 / n if i in where else 0.0 for i, n in enumerate(runs))

    def gathered(edges: Sequence[Edge]) -> tuple[float, ...]:
        """The first reader, or its copy of the parameter: one of them gathers."""
        names = {name for e in edges[:1] for name in (e.src, e.dst)}
        return at(*map(place.__getitem__, names))

    return Alone(
        forward=at(*range(max((place[e.dst] for e in forward), default=0), len(runs))),
        backward=at(*range(begin + 1)),
        gathers=gathered(forward),
        regathers=gathered(backward),
        sums=at(*(read for made, read in sums if made == end or runs[made] > 1)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTables:
    """The prices on a mesh, by the parts of a step, from which cost tables at any weights are made.

    nodes: float64 [6, K] each. edges: as in cost tables, without overlap. parts: for each edge, float64 [6, classes of
    src, classes of dst], or None if the reader waits for all of its cost. Equal nodes and edges of repeated layers
    share arrays.
    """

    space: Space
    nodes: tuple[np.ndarray, ...]
    edges: tuple[EdgeTable, ...]
    parts: tuple[np.ndarray | None, ...]

    @classmethod
    def of(
        cls,
        graph: Graph,
        mesh: Mesh,
        model: CostModel,
        optimizer: str,
        configs: Sequence[np.ndarray] | None = None,
    ) -> StepTables:
        """Price every config of every node and every pair of layouts of every edge.

        configs: the configs to price for each node, int8 [K, axes]; None for all.
        """
        among = config_space(graph, mesh, model) if configs is None else tuple(configs)
        edges = list(_parted_edges(graph, among, mesh, model))
        return cls(
            space=Space(graph=graph, mesh=mesh, configs=among),
            nodes=tuple(_parted_nodes(graph, mesh, model, optimizer, among)),
            edges=tuple(e for e, _ in edges),
            parts=tuple(p for _, p in edges),
        )

    def at(self, weights: np.ndarray) -> CostTables:
        """The cost tables at these weights of the parts, float64 [6]."""
        at = _Weighing(weights)
        return CostTables(
            node_costs=tuple(map(at.of, self.nodes)),
            edges=_weighed(self.edges, self.parts, at),
            names=tuple(n.name for n in self.space.graph.nodes),
        )

    @property
    def summed(self) -> CostTables:
        """The tables of a step in which nothing overlaps."""
        return self.at(np.ones(_PARTS))

    def of_choice(self, choice: np.ndarray) -> StepParts:
        """The parts of a choice, which has one config index per node."""
        total = np.sum([n[:, k] for n, k in zip(self.nodes, choice, strict=True)], axis=0)
        for e, p in zip(self.edges, self.parts, strict=True):
            i, j = e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]
            if p is None:
                total[WAITED] += e.cost[i, j]
            else:
                total += p[:, i, j]
        return StepParts(*map(float, total))


def nodes_at(
    graph: Graph,
    among: Sequence[np.ndarray],
    mesh: Mesh,
    model: CostModel,
    optimizer: str,
    weights: np.ndarray,
) -> list[np.ndarray]:
    """The costs of each node's configs at these weights of the parts, float64 [K]. Equal nodes share an array.

    among: per node, its configs, int8 [K, axes]. weights: float64 [6].
    """
    parts, at = list(_parted_nodes(graph, mesh, model, optimizer, among)), _Weighing(weights)
    return [at.of(p) for p in parts]


def edges_at(
    graph: Graph,
    among: Sequence[np.ndarray],
    mesh: Mesh,
    model: CostModel,
    along: Sequence[int],
    weights: np.ndarray,
) -> tuple[EdgeTable, ...]:
    """Tables of some of the edges for some of the configs, at these weights of the parts; free edges are left out.

    among: per node, the configs, int8 [K, axes]; equal nodes should share an array. along: indices into
    ``graph.edges``. weights: float64 [6].
    """
    made = list(_parted_edges(graph, among, mesh, model, along))
    return _weighed([e for e, _ in made], [p for _, p in made], _Weighing(weights))


class _Weighing:
    """Weighted sums of arrays of parts. weights: float64 [6]. Nodes and edges that share an array share its sum."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights
        self._made: dict[int, np.ndarray] = {}

    def of(self, parts: np.ndarray) -> np.ndarray:
        """The weighted sum. parts: float64 [6, …]; the caller must keep a reference to it."""
        if id(parts) not in self._made:
            self._made[id(parts)] = np.tensordot(self.weights, parts, 1)
        return self._made[id(parts)]


def _weighed(
    edges: Sequence[EdgeTable], parts: Sequence[np.ndarray | None], at: _Weighing
) -> tuple[EdgeTable, ...]:
    """The edges with their costs at the weights."""
    return tuple(e if p is None else replace(e, cost=at.of(p)) for e, p in zip(edges, parts, strict=True))


def _parted_edges(
    graph: Graph,
    among: Sequence[np.ndarray],
    mesh: Mesh,
    model: CostModel,
    along: Sequence[int] | None = None,
) -> Iterator[tuple[EdgeTable, np.ndarray | None]]:
    """Edges that cost something, with their parts. along: indices of the edges; None for all."""
    at = alone(graph)
    made: dict[tuple[int, float, float, float], tuple[np.ndarray, np.ndarray | None] | None] = {}
    known = facts(graph) if along is None else facts_along(facts(graph), along)
    for e, priced in edge_costs(known, tuple(among), mesh, model):
        sums = 1.0 if model.machine.sums_alone else at.sums[e.dst]
        key = id(priced.flows), at.gathers[e.dst], at.regathers[e.dst], sums
        if key not in made:
            cost = sum((one for _, one in priced.flows), np.zeros([len(rows) for rows in priced.rows]))
            made[key] = (cost, _parted(priced.flows, *key[1:], model)) if cost.any() else None
        if (made_here := made[key]) is not None:
            yield priced.table(e, made_here[0]), made_here[1]


def _parted_nodes(
    graph: Graph, mesh: Mesh, model: CostModel, optimizer: str, configs: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
    """The parts of each node, float64 [6, K]."""
    at = alone(graph)
    made: dict[tuple[int, float, float, float], np.ndarray] = {}
    readers = _first_readers(graph)
    for v, n in enumerate(phase_costs(graph, configs, mesh, model, optimizer)):
        f, b, gathered = at.forward[v], at.backward[v], at.gathers[readers[v]] if v in readers else 0.0
        key = (id(n), f, b, gathered)
        if key not in made:
            out = np.zeros((_PARTS, n.waited.size))
            out[WAITED] = n.waited + f * n.forward + b * n.backward + gathered * n.gathers
            out[FORWARD], out[BACKWARD] = (1 - f) * n.forward, (1 - b) * n.backward
            out[UPDATED] = (1 - gathered) * n.gathers
            made[key] = out
        yield made[key]


def _first_readers(graph: Graph) -> dict[int, int]:
    """Index of a parameter's node -> index of the first node that reads it."""
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    out: dict[int, int] = {}
    for e in graph.edges:
        if graph.node[e.src].kind == "parameter":
            at = place[e.dst]
            out[place[e.src]] = min(at, out.get(place[e.src], at))
    return out


def _parted(
    flows: Sequence[tuple[Flow, np.ndarray]], gathers: float, recompute: float, sums: float, model: CostModel
) -> np.ndarray | None:
    """The parts of a parameter's edge; None for other edges.

    gathers, recompute, sums: the fraction of each kind of collective that overlaps with nothing.
    """
    if not any(f.bucketed for f, _ in flows):
        return None
    out = np.zeros((_PARTS, *flows[0][1].shape))
    for f, cost in flows:
        if f.back or f.summed:
            out[WAITED] += sums * cost
            out[BACKWARD_COLLECTIVES] += (1 - sums) * cost
        elif lone_gather("all_gather", f.nbytes, model):
            out[WAITED] += cost
        else:
            first = 0.0 if f.late else cost / f.repeats
            rerun = cost - first
            out[WAITED] += gathers * first + recompute * rerun
            out[GATHERS] += (1 - gathers) * first
            out[BACKWARD_COLLECTIVES] += (1 - recompute) * rerun
    return out
