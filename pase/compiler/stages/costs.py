"""The costs of a strategy in each part of a model with stages: before the blocks, in one block, and after them.

Work, collectives and memory are those of a step without stages (``pase.tables``, ``pase.memory.account``). They are
grouped by the part that pays for them, and by whether they are paid once per step or in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np

from pase.compiler.stages.places import Places, StagePart
from pase.ir import Edge, Graph, Node
from pase.ir.blocks import micro_batches_of
from pase.machine import CostModel, Mesh
from pase.memory.account import Held, held, in_flight
from pase.tables.axis_layout import forward_states
from pase.tables.build import habits, work_price
from pase.tables.charges import is_of_parameter
from pase.tables.facts import facts
from pase.tables.itemize import KnownCharges, collectives
from pase.tables.layouts import concrete_size, local_bytes, read_rule, write_rule
from pase.tables.work import Phase, Work, has_gradient, node_work, phase_of

__all__ = [
    "PARTS",
    "CostKind",
    "GatheredWeights",
    "PartCost",
    "PricedParts",
    "collective_shares",
    "part_costs",
    "products_of_weights",
    "work_shares",
]

PARTS: tuple[StagePart, ...] = ("first", "block", "last")

GatheredWeights = Literal["hoisted", "gathered", "each"]
"""When split parameters are gathered and their gradients summed. ``hoisted``: once per step, so that gathered weights
and unreduced sums of gradients are kept through the step. ``gathered``: gathered once per step, summed in each
micro-batch, as one program does that scans over micro-batches. ``each``: in each micro-batch. They are gathered for its
forward, and again for its backward (``pase.ir.recompute.gathering_again``), so that micro-batches in flight keep none;
the account has those of the action that runs."""


class CostKind(IntEnum):
    """The kinds of cost of a part: seconds by when they are paid, and bytes by how long they are held.

    Seconds per micro-batch: compute in forward, in the two parts of backward, and in recomputation; and the collectives
    for which each of these waits (``…_SENT``), which overlap with nothing.
    Seconds per step: gathers of parameters (before), sums of their gradients, and the optimizer's update (after).
    Bytes on a device: held through the step (static), of one micro-batch until its backward (kept), and until its
    weights' gradients (waiting).
    """

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2
    RECOMPUTE = 3
    FORWARD_SENT = 4
    INPUT_SENT = 5
    WEIGHT_SENT = 6
    RECOMPUTE_SENT = 7
    BEFORE = 8
    SUMS = 9
    AFTER = 10
    STATIC = 11
    KEPT = 12
    WAITING = 13


@dataclass(kw_only=True, eq=False)
class PartCost:
    """The costs of one part; if it consists of equal units, those of one unit.

    by_kind: seconds and bytes, float64 [kinds].
    inner: bytes of a block while it is recomputed.
    buffers: bytes of one op, with its gradients.
    memory: what is static, by kind: parameters, gradients, optimizer, activations (gathered weights and inputs).
    """

    by_kind: np.ndarray = field(default_factory=lambda: np.zeros(len(CostKind)))
    inner: float = 0.0
    buffers: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, kind: CostKind) -> float:
        return float(self.by_kind[kind])

    def add(self, shares: Mapping[CostKind, float], many: float = 1.0) -> None:
        """Add so many seconds or bytes to each kind, by its share."""
        for kind, share in shares.items():
            self.by_kind[kind] += share * many

    def keep(self, kind: str, nbytes: float) -> None:
        """Add bytes that are kept through the step."""
        self.add({CostKind.STATIC: nbytes})
        self.memory[kind] = self.memory.get(kind, 0.0) + nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedParts:
    """What was priced already for one graph, mesh, cost model and optimizer, because splits differ only in a few nodes.

    work: seconds of a node's work, by kind.
    held: what a node keeps.
    buffers: bytes of a node while it runs.
    read: bytes of a parameter as it is read.
    """

    charges: KnownCharges = field(default_factory=KnownCharges)
    work: dict[object, dict[CostKind, float]] = field(default_factory=dict)
    held: dict[object, list[Held]] = field(default_factory=dict)
    buffers: dict[object, float] = field(default_factory=dict)
    read: dict[object, tuple[float, float]] = field(default_factory=dict)


def part_costs(
    graph: Graph,
    places: Places,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    model: CostModel,
    optimizer: str,
    weights: GatheredWeights,
    known: PricedParts | None = None,
) -> dict[StagePart, PartCost]:
    """Return the costs of the parts of the graph of a step in micro-batches (``pase.ir.blocks.accumulated``).

    configs: node -> int8 [axes].
    known: what was priced for other configs.
    """
    out = {part: PartCost() for part in places.sizes}
    has, known = places.parts, PricedParts() if known is None else known
    sent = collectives(graph, mesh, configs, model, has, known.charges)
    for n, like in zip(graph.nodes, facts(graph).cost, strict=True):
        if n.name in has:
            key = like, configs[n.name].tobytes()
            if key not in known.work:
                known.work[key] = _work(graph, n, configs[n.name], mesh, model, optimizer)
            for place in has[n.name]:  # a tied parameter is updated in each of its stages
                out[place].add(known.work[key])
    paid: dict[object, dict[CostKind, float]] = {}
    for c in sent:
        of = c.node, c.tensor, c.phase, c.times
        if of not in paid:
            of_parameter = is_of_parameter(graph, c.tensor)
            shares = collective_shares(
                graph.node[c.node], c.phase, c.times, of_parameter, weights, micro_batches_of(graph)
            )
            paid[of] = {kind: float(share) for kind, share in shares.items()}
        for place in has[c.node]:
            out[place].add(paid[of], c.cost)
    _hold(graph, places, mesh, configs, optimizer, weights, out, known)
    for c in sent:
        part = out[places.of(c.node)]
        part.buffers = max(part.buffers, c.nbytes)
    for name, nbytes in in_flight(graph, configs, mesh, known.buffers).items():
        if name in has:
            part = out[places.of(name)]
            part.buffers = max(part.buffers, nbytes)
    for place, many in places.sizes.items():
        unit = out[place]
        unit.by_kind /= many
        unit.memory = {k: v / many for k, v in unit.memory.items()}
        unit.add({CostKind.WAITING: unit.inner or unit[CostKind.KEPT]})
    return out


def _work(
    graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, model: CostModel, optimizer: str
) -> dict[CostKind, float]:
    """Return the seconds of the node's own work, by kind."""
    out: dict[CostKind, float] = {}
    for_weights = products_of_weights(graph, n)
    for w in node_work(graph, n, cfg[None, :], mesh, optimizer, habits(model)):
        seconds = w.times * float(np.ravel(work_price(w, model))[0])
        for kind, share in work_shares(w, for_weights, micro_batches_of(graph)).items():
            out[kind] = out.get(kind, 0.0) + share * seconds
    return out


def work_shares(w: Work, for_weights: Iterator[bool], micro_batches: int) -> dict[CostKind, float]:
    """Return the fraction of a piece of work, in seconds per step, that goes to each kind of cost.

    for_weights: ``products_of_weights`` of the node; each product of its backward takes one item from it.
    """
    m = micro_batches
    if w.phase == "update":  # the update, or adding each micro-batch's gradient to the sum
        return {CostKind.WEIGHT: 1 / m} if w.times > 1 else {CostKind.AFTER: 1.0}
    if w.phase == "forward":
        return {CostKind.FORWARD: (1 - w.late) / m, CostKind.RECOMPUTE: w.late / m}
    of_weight = w.kind in ("matmul", "conv") and next(for_weights)
    return {CostKind.WEIGHT if of_weight else CostKind.INPUT: 1 / m}


def products_of_weights(graph: Graph, n: Node) -> Iterator[bool]:
    """Yield, for each product of the node's backward, in ``node_work``'s order, whether it is a weights' gradient.

    A product of a derivative rule of the program's own runs in backward, too.
    """
    for op in n.ops:
        if op.kind in ("matmul", "conv"):
            if phase_of(graph, n.name, op) == "backward":
                yield False
            for a in op.factors:
                if has_gradient(graph, op, a.tensor):
                    yield a.tensor in graph.producer and is_of_parameter(graph, a.tensor)


def collective_shares(
    reader: Node,
    phase: Phase,
    times: np.ndarray | float,
    of_parameter: bool,
    weights: GatheredWeights,
    micro_batches: int,
) -> dict[CostKind, np.ndarray | float]:
    """Return the fraction of a collective's seconds per step that goes to each kind of cost.

    Of one that runs twice in a micro-batch, half is for its backward.

    reader: the node that pays for it.
    times: how often it runs in a step.
    """
    m, hoisted, once = micro_batches, weights == "hoisted", weights != "each"
    # ZeRO gathers updated parameters, which overlaps with the first forward of the next step.
    if phase == "update":
        return {CostKind.BEFORE if once else CostKind.AFTER: 1.0}
    if of_parameter and phase == "backward":
        return {CostKind.SUMS if hoisted else CostKind.WEIGHT_SENT: 1 / m}
    if phase == "backward":
        return {CostKind.INPUT_SENT: 1 / m}
    runs, remat = (
        max(float(concrete_size(op.times, reader.name)) for op in reader.ops),
        any(op.remat for op in reader.ops),
    )
    again = np.where((remat or of_parameter) & (np.asarray(times) >= 2 * runs), 0.5, 0.0)
    if of_parameter and once:
        return {CostKind.BEFORE: (1 - again) / m}
    then = CostKind.RECOMPUTE_SENT if remat else CostKind.INPUT_SENT
    return {CostKind.FORWARD_SENT: (1 - again) / m, then: again / m}


def _hold(
    graph: Graph,
    places: Places,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    optimizer: str,
    weights: GatheredWeights,
    out: dict[StagePart, PartCost],
    known: PricedParts,
) -> None:
    """Add bytes to the parts. Gathered weights and unreduced sums of gradients are counted in the readers' layouts."""
    whole = weights == "hoisted" and micro_batches_of(graph) > 1
    regions: dict[tuple[StagePart, object], float] = {}
    for n in graph.nodes:
        key = n.name, configs[n.name].tobytes()
        if key not in known.held:
            known.held[key] = list(held(graph, n, configs[n.name][None, :], mesh, optimizer))
        for h in known.held[key]:
            nbytes = float(h.nbytes[0])
            if (h.weights and weights != "each") or (h.kind == "gradients" and whole):
                continue
            for place in places.parts.get(n.name, ()):
                if h.region is not None:
                    regions[place, h.region] = regions.get((place, h.region), 0.0) + nbytes
                elif h.kind != "activations" or h.weights or n.kind == "input":
                    out[place].keep(h.kind, nbytes)
                else:
                    out[place].add({CostKind.KEPT: nbytes})
    for (place, _), nbytes in regions.items():
        out[place].inner = max(out[place].inner, nbytes)
    if weights != "each":
        for place, copied, summed in _as_read(graph, places, mesh, configs, known.read):
            out[place].keep("activations", copied)
            if whole:
                out[place].keep("gradients", summed)


def _as_read(
    graph: Graph,
    places: Places,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    known: dict[object, tuple[float, float]],
) -> Iterator[tuple[StagePart, float, float]]:
    """Yield, per parameter and part that reads it, over all iterations of its loop: (the part, copies, sums)."""
    found: dict[tuple[StagePart, str], tuple[float, float]] = {}
    for i, e in enumerate(graph.edges):
        if graph.node[e.src].kind != "parameter" or e.dst not in places.parts:
            continue
        like = i, configs[e.src].tobytes(), configs[e.dst].tobytes()
        if like not in known:
            known[like] = _read_bytes(graph, e, mesh, configs)
        copied, summed = known[like]
        for place in places.parts[e.dst]:
            before = found.get((place, e.src), (0.0, 0.0))
            found[place, e.src] = max(before[0], copied), max(before[1], summed)
    for (place, _), (copied, summed) in found.items():
        yield place, copied, summed


def _read_bytes(graph: Graph, e: Edge, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Return (bytes of a parameter that is read in another layout or dtype than the stored one, bytes of a sum of its
    gradients in the reader's layout), over all iterations of its loop."""
    source, reader = graph.node[e.src], graph.node[e.dst]
    stored, tensor = graph.tensors[source.ops[0].writes[0].tensor], graph.tensors[e.tensor]
    written = write_rule(source, *source.write_of(e.tensor)).states(configs[e.src][None, :], mesh)
    read = read_rule(reader, e.op, e.access).states(configs[e.dst][None, :], mesh)
    resharded = bool((forward_states(written) != forward_states(read)).any())
    times = concrete_size(e.op.times, e.dst) / micro_batches_of(graph)
    local = times * float(local_bytes(reader, tensor, e.access, configs[e.dst][None, :], mesh)[0])
    copied = local if resharded or tensor.dtype != stored.dtype else 0.0
    return copied, local / tensor.itemsize * stored.itemsize if stored.needs_grad else 0.0
