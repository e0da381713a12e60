"""One rule gives all work and all collectives, forward and backward, from (node, config).

- Local work is the op's points over the shards of the dims it works on; backward has one product for each
  differentiable operand of a matmul or conv, and as much traffic again for the rest.
- A tensor written by an op that sums over a split dim is partial over that dim's axes. OwnAccess a node it is
  summed at once (softmax's maximum, a norm's mean); between nodes the edge settles it.
- The gradient of a tensor read is partial over the axes of the split dims of which its map knows nothing:
  for a parameter that is the gradient synchronisation.
- An axis on a parameter's *state* splits its gradient and the optimizer's work, which ends in a gather of the
  updated parameter.
- A derivative rule that the user wrote is ops that run in backward; of it nothing is derived but collectives.
- A windowed dim exchanges halos; an edge pays to go from the layout written to the layout read, and back
  for the gradient.

Everything is an array over configs (or pairs of layouts); with one config it is the plan's own list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pase.ir import Access, Edge, Graph, Node, Op, Tensor
from pase.ir.blocks import turns_of
from pase.ir.functions import CAUSAL_ATTENTION
from pase.ir.types import WORKLESS
from pase.machine import CollectiveKind, Mesh
from pase.tables.layouts import (
    PARTIAL,
    REPLICATED,
    RingDim,
    axis_bits,
    dim_index,
    forward_states,
    gradient_states,
    local_bytes,
    number,
    ring_of,
    shards,
    state_index,
)
from pase.tables.reshard import reshard
from pase.tables.tiles import padding, rounded

__all__ = [
    "BACKWARD_PRODUCTS",
    "OPTIMIZERS",
    "Charge",
    "Flow",
    "OwnAccess",
    "Phase",
    "Work",
    "edge_charges",
    "edge_flows",
    "node_charges",
    "node_work",
]

Phase = Literal["forward", "backward", "update"]

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam_master": 3, "lion": 1, "adafactor": 0}
"""Optimizer -> float32 values of state it keeps per parameter (adafactor's factored rows are below a percent)."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Collectives, one per config or pair of layouts.

    axes, nbytes: as CostModel.collective has them; times: how often in a step.
    bucketed: of a parameter (its gather, its gradient's sum), hence nothing waits for it alone, and it travels
    with others in a bucket.
    turns: how many of them follow each other, each time. behind: work in turns + 1 equal parts, one of which runs
    beside each of them: only what is left then is waited for.
    within: of a node's own, the op and which of its reads or writes it is for; None: of an edge, or of the node whole.
    """

    kind: CollectiveKind
    axes: np.ndarray
    nbytes: np.ndarray
    tensor: str
    phase: Phase
    times: float
    bucketed: bool = False
    turns: np.ndarray | float = 1.0
    behind: Work | None = None
    within: OwnAccess | None = None


@dataclass(frozen=True)
class OwnAccess:
    """One access of an op: the op's number in its node, and of its reads or its writes which."""

    op: int
    access: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """Local work of one op (or of all light ops of a node together), one entry per config; see CostModel.compute.

    nbytes: with what the arrays are padded with; padding: of a product, work with the rows that are padded over
    ``flops`` (the columns and the contraction are rounded up by the cost model's own tiles).
    """

    kind: Literal["matmul", "conv", "attention", "memory"]
    dtype: str
    flops: np.ndarray
    nbytes: np.ndarray
    mnk: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    phase: Phase
    times: float
    padding: np.ndarray | float = 1.0


TileShape = tuple[int, int]
"""Rows and lanes of the tiles that a device stores arrays in."""


def _phase(op: Op) -> Phase:
    return "backward" if op.backward else "forward"


def _runs(op: Op, what: str) -> float:
    """How often the op runs in a step, on average."""
    return float(number(op.times, what)) * op.chance


def _local_points(node: Node, dims: tuple[str, ...], cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    index = dim_index(node, dims)
    points = 1.0
    for i in index:
        points *= number(node.space.dims[i].size, node.name)
    return points / shards(cfg, index, mesh)


def _padded(
    node: Node, tensor: Tensor, access: Access, cfg: np.ndarray, mesh: Mesh, tile: TileShape | None
) -> Any:
    """The factor by which tiles pad the local part of a tensor, under each config; 1 where nothing is padded."""
    if tile is None or len(tensor.shape) < 2:
        return 1.0
    extents = [
        number(extent, tensor.name) / shards(cfg, dim_index(node, walk.dims), mesh)
        for extent, walk in zip(tensor.shape, access.map.walks, strict=True)
    ]
    return padding(extents, tile)


def _grad(graph: Graph, op: Op, tensor: str) -> bool:
    return op.differentiable and graph.tensors[tensor].needs_grad


def node_work(
    graph: Graph,
    node: Node,
    cfg: np.ndarray,
    mesh: Mesh,
    optimizer: str = "adam",
    tile: TileShape | None = None,
) -> Iterator[Work]:
    """The node's local work under each config; tile: what the device stores arrays in, if it pads them."""
    if node.kind == "parameter":
        yield from _parameter_work(graph, node, cfg, mesh, optimizer)
        return
    internal = node.internal
    zero = np.zeros(len(cfg))
    flops_of: dict[Phase, np.ndarray] = {"forward": zero, "backward": zero}  # of light ops together
    bytes_of: dict[Phase, np.ndarray] = dict(flops_of)
    seen: set[str] = set()
    for op in node.ops:
        over = op.dims if op.over is None else op.over
        flops = op.flops_per_point * _local_points(node, over, cfg, mesh)
        heavy = op.kind in ("matmul", "conv", "attention", "gather", "scatter")

        def touched(a: Access, over: tuple[str, ...] = over) -> np.ndarray:
            t = graph.tensors[a.tensor]
            if a.sparse:
                return t.itemsize * _local_points(node, over, cfg, mesh)
            return local_bytes(node, t, a, cfg, mesh) * _padded(node, t, a, cfg, mesh, tile)

        nbytes, wrote = zero, zero
        for a in op.writes:
            if heavy or graph.read_outside(node, a.tensor):
                wrote = wrote + touched(a)
        for a in op.reads:
            outside = a.tensor not in internal and a.tensor in graph.producer
            if outside and (heavy or a.tensor not in seen):
                seen.add(a.tensor)
                nbytes = nbytes + touched(a)
        nbytes = nbytes + wrote
        grads = [a for a in op.reads if _grad(graph, op, a.tensor)]
        if op.kind in ("matmul", "conv"):
            yield from _products(graph, node, op, flops, nbytes, cfg, mesh, tile)
        elif op.kind == "attention":
            yield from _attention(graph, node, op, flops, nbytes, cfg, mesh)
        elif op.kind not in WORKLESS:
            flops_of[_phase(op)] = flops_of[_phase(op)] + flops
            bytes_of[_phase(op)] = bytes_of[_phase(op)] + nbytes
            if op.kind == "gather":
                for a in grads:  # a scatter-add into zeros of the table's local size
                    table = local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh)
                    bytes_of["backward"] = bytes_of["backward"] + 2 * wrote + table
            elif grads:
                flops_of["backward"] = flops_of["backward"] + 2 * flops
                bytes_of["backward"] = bytes_of["backward"] + 2 * nbytes
    main = node.main
    times = _runs(main, node.name)
    dtype = graph.tensors[(main.writes or main.reads)[0].tensor].dtype
    executions: dict[Phase, float] = {"forward": times * (2 if main.remat else 1), "backward": times}
    for phase, runs in executions.items():
        flops, nbytes = flops_of[phase], bytes_of[phase]
        if flops.any() or nbytes.any():
            yield Work(
                kind="memory", dtype=dtype, flops=flops, nbytes=nbytes, mnk=None, phase=phase, times=runs
            )


def _products(
    graph: Graph,
    node: Node,
    op: Op,
    flops: np.ndarray,
    nbytes: np.ndarray,
    cfg: np.ndarray,
    mesh: Mesh,
    tile: TileShape | None,
) -> Iterator[Work]:
    """A matmul or conv forward, and one product for each operand that has a gradient."""
    x, w = (set(a.map.dims) for a in op.reads)
    out = set(op.writes[0].map.dims)

    def extent(dims: set[str]) -> np.ndarray:
        return _local_points(node, tuple(dims), cfg, mesh)

    m, n, k = extent(out - w), extent(out - x), extent(set(op.dims) - out)
    times = _runs(op, node.name)
    kind: Literal["matmul", "conv"] = "conv" if op.kind == "conv" else "matmul"
    dtype = graph.tensors[op.reads[0].tensor].dtype
    runs = times * (2 if op.remat else 1)
    accesses = (*op.reads, *op.writes)
    most = np.ones(1)
    for a in accesses if kind == "matmul" else ():
        most = np.maximum(most, _padded(node, graph.tensors[a.tensor], a, cfg, mesh, tile))

    def product(mnk: tuple[np.ndarray, np.ndarray, np.ndarray], phase: Phase, times: float) -> Work:
        known = 1.0 if tile is None else rounded(mnk[1], tile[1]) * rounded(mnk[2], tile[1])
        return Work(
            kind=kind,
            dtype=dtype,
            flops=flops,
            nbytes=nbytes,
            mnk=mnk,
            phase=phase,
            times=times,
            padding=np.maximum(most / known, 1.0),
        )

    yield product((m, n, k), _phase(op), runs)
    for a, mnk in zip(op.reads, ((m, k, n), (k, n, m)), strict=True):
        if _grad(graph, op, a.tensor):
            yield product(mnk, "backward", times)


BACKWARD_PRODUCTS = 5 / 2
"""Of a fused attention: the scores again, and a product for each of four gradients (scores', values', queries' and
keys'), where forward has two. Dao et al. 2022 (arXiv 2205.14135), algorithm 4."""


def _attention(
    graph: Graph, node: Node, op: Op, flops: np.ndarray, nbytes: np.ndarray, cfg: np.ndarray, mesh: Mesh
) -> Iterator[Work]:
    """A fused attention forward, and backward, which reads once more what forward read and wrote, the result's
    gradient in place of the result, and writes the operands' gradients.

    Causal: of n contiguous parts of the queries the last sees most keys, and the others wait for it: it has
    1 - 1/2n of a part's whole work, all of them together have half. In a ring each takes two chunks, where they divide,
    and has half, too. What a device reads and writes of it, it does at each turn of the ring.
    """
    q, k = (set(a.map.dims) for a in op.reads[:2])
    queries = op.writes[1].map.walks[1].dims
    width = (q & k) - set(op.writes[0].map.dims)
    rows, keys, inner = (_local_points(node, tuple(dims), cfg, mesh) for dims in (queries, k - q, width))
    ring = ring_of(node)
    if op.function is CAUSAL_ATTENTION:
        part = 1 - 1 / (2 * shards(cfg, dim_index(node, queries), mesh))
        if ring is not None:
            part = np.where((shards(cfg, [ring.dim], mesh) > 1) & ring.balanced(node, cfg, mesh), 0.5, part)
        flops = flops * part
    if ring is not None:
        keys, nbytes = keys / shards(cfg, [ring.dim], mesh), nbytes * shards(cfg, [ring.dim], mesh)
    times = _runs(op, node.name)
    dtype = graph.tensors[op.reads[0].tensor].dtype
    yield Work(
        kind="attention",
        dtype=dtype,
        flops=flops,
        nbytes=nbytes,
        mnk=(rows, keys, inner),
        phase=_phase(op),
        times=times * (2 if op.remat else 1),
    )
    if any(_grad(graph, op, a.tensor) for a in op.reads):
        yield Work(
            kind="attention",
            dtype=dtype,
            flops=BACKWARD_PRODUCTS * flops,
            nbytes=2 * nbytes,
            mnk=(rows, keys, inner),
            phase="backward",
            times=times,
        )


def _parameter_work(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str) -> Iterator[Work]:
    """Casts at each use, and the optimizer's reads and writes of what this device updates."""
    for op in node.ops[1:]:
        if op.kind == "elementwise":
            moved = sum(
                local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh) for a in (*op.reads, *op.writes)
            )
            yield Work(
                kind="memory",
                dtype=graph.tensors[op.writes[0].tensor].dtype,
                flops=np.zeros(len(cfg)),
                nbytes=np.asarray(moved),
                mnk=None,
                phase="forward",
                times=_runs(op, node.name) * (2 if op.remat else 1),
            )
    write = node.ops[0].writes[0]
    tensor = graph.tensors[write.tensor]
    if not tensor.needs_grad:
        return
    stored = local_bytes(node, tensor, write, cfg, mesh) / shards(cfg, state_index(node), mesh)
    state = stored / tensor.itemsize * 4 * OPTIMIZERS[optimizer]
    elements = stored / tensor.itemsize
    yield Work(
        kind="memory",
        dtype=tensor.dtype,
        flops=(2 + 5 * OPTIMIZERS[optimizer]) * elements,
        nbytes=3 * stored + 2 * state,
        mnk=None,
        phase="update",
        times=1.0,
    )
    if turns_of(graph) > 1:  # each micro-batch's gradient is added to the sum
        yield Work(
            kind="memory",
            dtype=tensor.dtype,
            flops=elements,
            nbytes=3 * stored,
            mnk=None,
            phase="update",
            times=float(turns_of(graph)),
        )


def node_charges(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Collectives inside the node: sums that its own ops need at once, halos, and an attention's ring."""
    internal = node.internal
    consumed = {a.tensor for op in node.ops for a in op.reads}
    for i in state_index(node):
        a = node.ops[0].writes[0]
        yield Charge(
            kind="all_gather",
            axes=axis_bits(cfg, [i], mesh),
            tensor=a.tensor,
            phase="update",
            times=1.0,
            nbytes=local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh),
            bucketed=True,
        )
    for number_of_op, op in enumerate(node.ops):
        times = _runs(op, node.name)
        runs = times * (2 if op.remat else 1)
        for i, a in enumerate(op.writes):
            summed = [d for d in op.dims if d not in set(a.map.dims)]
            if a.tensor in consumed and summed:
                axes = axis_bits(cfg, dim_index(node, summed), mesh)
                size = local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh)
                yield Charge(
                    kind="all_reduce",
                    axes=axes,
                    nbytes=size,
                    tensor=a.tensor,
                    phase=_phase(op),
                    times=runs,
                    within=OwnAccess(number_of_op, i),
                )
        for i, a in enumerate(op.reads):
            t = graph.tensors[a.tensor]
            other = [d for d in op.dims if d not in set(a.map.dims)]
            if a.tensor in internal and other and _grad(graph, op, a.tensor):
                axes = axis_bits(cfg, dim_index(node, other), mesh)
                size = local_bytes(node, t, a, cfg, mesh)
                yield Charge(
                    kind="all_reduce",
                    axes=axes,
                    nbytes=size,
                    tensor=a.tensor,
                    phase="backward",
                    times=times,
                    within=OwnAccess(number_of_op, i),
                )
            for walk, extent in zip(a.map.walks, t.shape, strict=True):
                if walk.window is None or not walk.window.halo or len(walk.dims) != 1:
                    continue
                index = dim_index(node, walk.dims)
                ways = shards(cfg, index, mesh)
                part = walk.window.halo * ways / number(extent, t.name)
                size = local_bytes(node, t, a, cfg, mesh) * part
                axes = axis_bits(cfg, index, mesh)
                yield Charge(
                    kind="permute",
                    axes=axes,
                    nbytes=size,
                    tensor=a.tensor,
                    phase=_phase(op),
                    times=runs,
                    within=OwnAccess(number_of_op, i),
                )
                if _grad(graph, op, a.tensor):
                    yield Charge(
                        kind="permute",
                        axes=axes,
                        nbytes=size,
                        tensor=a.tensor,
                        phase="backward",
                        times=times,
                        within=OwnAccess(number_of_op, i),
                    )
    if (ring := ring_of(node)) is not None:
        yield from _ring_charges(graph, node, ring, cfg, mesh)


def _ring_charges(graph: Graph, node: Node, ring: RingDim, cfg: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Keys and values go round behind the attention over those that are there; backward with the sums of their
    gradients, in float32, which then go home. Liu et al. 2023 (arXiv 2310.01889).

    Causal: before and after, half of each part changes places, so that all have the same work (``RingDim.balanced``).
    """
    op = node.main
    q, k, v = (local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh) for a in op.reads)
    out = local_bytes(node, graph.tensors[op.writes[0].tensor], op.writes[0], cfg, mesh)
    sums = (k + v) * max(4 / graph.tensors[op.reads[1].tensor].itemsize, 1.0)
    turns = shards(cfg, [ring.dim], mesh) - 1
    half = np.where(ring.balanced(node, cfg, mesh) & (op.function is CAUSAL_ATTENTION), 0.5, 0.0)
    for w in [w for w in node_work(graph, node, cfg, mesh) if w.kind == "attention"]:

        def moved(
            nbytes: np.ndarray, turns: np.ndarray | float, behind: Work | None = None, w: Work = w
        ) -> Charge:
            return Charge(
                kind="permute",
                axes=axis_bits(cfg, [ring.dim], mesh),
                nbytes=nbytes,
                tensor=op.reads[1].tensor,
                phase=w.phase,
                times=w.times,
                turns=turns,
                behind=behind,
            )

        if w.phase == "forward":
            yield moved(k + v, turns, w)
            yield moved(half * (q + k + v + out), 2)
        else:
            yield moved(k + v + sums, turns, w)
            yield moved(sums, 1)
            yield moved(half * (2 * out + q + k + v), 2)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A tensor, or its gradient, on its way along an edge: bytes of the whole, and how often in a step, recomputation
    included.

    back: it is the gradient, on its way from the reader. again: 2 where recomputation needs it once more.
    """

    phase: Phase
    back: bool
    nbytes: int
    times: float
    bucketed: bool
    again: int = 1

    def ends(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The layouts that it leaves and those that it reaches; src from write_states, dst from read_states."""
        if not self.back:
            return forward_states(src), np.where(dst == PARTIAL, REPLICATED, dst)
        return dst, gradient_states(src)


def edge_flows(graph: Graph, edge: Edge) -> tuple[Flow, ...]:
    """The tensor to its reader, and where it has a gradient, that one back.

    A parameter on its way to a reader that runs in backward counts as forward, as its second gather in a rematerialised
    region does.
    """
    tensor = graph.tensors[edge.tensor]
    nbytes, times = number(tensor.nbytes, tensor.name), _runs(edge.op, edge.dst)
    bucketed = graph.producer[edge.tensor].kind == "parameter"
    again = 2 if edge.access.again else 1
    phase: Phase = "forward" if bucketed else _phase(edge.op)
    there = Flow(phase=phase, back=False, nbytes=nbytes, times=times * again, bucketed=bucketed, again=again)
    if not (tensor.needs_grad and edge.op.differentiable):
        return (there,)
    back = Flow(phase="backward", back=True, nbytes=nbytes, times=times, bucketed=bucketed)
    return (back,) if edge.access.gradient else (there, back)


def edge_charges(graph: Graph, edge: Edge, src: np.ndarray, dst: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Collectives of an edge for every pair of layouts; src from write_states, dst from read_states."""
    for flow in edge_flows(graph, edge):
        for step in reshard(*flow.ends(src, dst), mesh):
            axes, fraction = (step.axes.T, step.fraction.T) if flow.back else (step.axes, step.fraction)
            yield Charge(
                kind=step.kind,
                axes=axes,
                nbytes=fraction * flow.nbytes,
                tensor=edge.tensor,
                phase=flow.phase,
                times=flow.times,
                bucketed=flow.bucketed,
            )
