"""Collectives inside a node and along an edge, in forward and backward, for each config or pair of layouts.

- If an op sums over a split dim, the tensor that it writes is partial over that dim's axes. Inside a node it is
  summed at once (softmax's maximum, a norm's mean). Between nodes the edge sums it.
- The gradient of a tensor that is read is partial over the axes of split dims that its map does not contain.
  For a parameter, the sum over these axes is the gradient synchronisation.
- An axis on a parameter's *state* splits its gradient and the optimizer's work. The updated parameter is then gathered.
- For ops that run in backward because of the user's own derivative rule, only collectives are derived.
- A windowed dim exchanges halos. An edge pays to go from the layout written to the layout read, and back
  for the gradient.

Everything is an array over configs (or pairs of layouts). With one config it is the plan's own list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pase.ir import Access, Edge, Graph, Node, Op, Tensor
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.ir.functions import CAUSAL_ATTENTION, UNSTACK
from pase.ir.types import is_floating
from pase.machine import CollectiveKind, Mesh
from pase.tables.decompose import TAKEN_APART, Products, made_by, read_by, sums_apart
from pase.tables.layouts import (
    PARTIAL,
    REPLICATED,
    RingDim,
    axis_bits,
    concrete_size,
    dim_index,
    forward_states,
    gradient_states,
    local_bytes,
    ring_of,
    shards,
    state_index,
)
from pase.tables.reshard import reshard
from pase.tables.work import Phase, Work, has_gradient, node_work, phase_of, runs_of

__all__ = ["SUMS", "Charge", "Flow", "OpAccess", "edge_charges", "edge_flows", "node_charges"]

SUMS: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter")
"""The collectives that add."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Collectives, one per config or pair of layouts.

    axes, nbytes: as in CostModel.collective. times: how often in a step.
    bucketed: a parameter's gather or its gradient's sum. No op waits for it alone, and it is sent in a bucket with
    others, unless it is a lone gather (``Machine.lone_gather_bytes``).
    rounds: the number of collectives that follow each other, each time. behind: work in turns + 1 equal parts, one of
    which overlaps with each collective. Only the rest of a collective is waited for.
    within: inside a node, the op and the read or write that it is for. None: of an edge, or of the whole node.
    during: of one pair of layouts, the products whose pieces run beside it (``Flow.overlapping``); none: it is waited
    for.
    whole: bytes of the whole tensor, where it is bucketed or has products. back: of the gradient.
    """

    kind: CollectiveKind
    axes: np.ndarray
    nbytes: np.ndarray
    tensor: str
    phase: Phase
    times: float
    bucketed: bool = False
    rounds: np.ndarray | float = 1.0
    behind: Work | None = None
    within: OpAccess | None = None
    during: Products = ()
    whole: np.ndarray | float = 0.0
    back: bool = False


@dataclass(frozen=True)
class OpAccess:
    """One access of an op: the op's number in its node, and which of its reads or writes it is."""

    op: int
    access: int


def node_charges(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Collectives inside the node: sums that its own ops need at once, halos, and the ring of an attention."""
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
            whole=concrete_size(graph.tensors[a.tensor].nbytes, a.tensor),
        )
    consumed = {a.tensor for op in node.ops for a in op.reads}
    for at in range(len(node.ops)):
        yield from _op_charges(graph, node, at, consumed, cfg, mesh)
    if (ring := ring_of(node)) is not None:
        yield from _ring_charges(graph, node, ring, cfg, mesh)


def _op_charges(
    graph: Graph, node: Node, at: int, consumed: Collection[str], cfg: np.ndarray, mesh: Mesh
) -> Iterator[Charge]:
    """The sums and halos of one op of a node. at: its number there; consumed: the tensors that the node's ops read."""
    op = node.ops[at]
    times = runs_of(op, node.name)
    itself: tuple[Phase, float] = phase_of(op), times * (2 if op.remat else 1)
    gradient: tuple[Phase, float] = "backward", times

    def charge(
        kind: CollectiveKind,
        i: int,
        a: Access,
        over: Sequence[str],
        when: tuple[Phase, float],
        part: np.ndarray | float = 1.0,
    ) -> Charge:
        """A collective over the axes of some dims, for the i-th access: this part of a device's share of its tensor."""
        return Charge(
            kind=kind,
            axes=axis_bits(cfg, dim_index(node, over), mesh),
            nbytes=local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh) * part,
            tensor=a.tensor,
            phase=when[0],
            times=when[1],
            within=OpAccess(at, i),
        )

    for i, a in enumerate(op.writes):
        summed = [d for d in op.dims if d not in set(a.map.dims)]
        if a.tensor in consumed and summed:
            yield charge("all_reduce", i, a, summed, itself)
    for i, a in enumerate(op.reads):
        other = [d for d in op.dims if d not in set(a.map.dims)]
        back = has_gradient(graph, op, a.tensor)
        if a.tensor in node.internal and other and back:
            tensor = graph.tensors[a.tensor]
            wider = _summed_itemsize(graph, op, tensor) / tensor.itemsize
            yield charge("all_reduce", i, a, other, gradient, wider)
        grown = np.ones(
            len(cfg)
        )  # rows of a later dim are longer by those of the earlier ones: corners come along
        for walk, extent in zip(a.map.walks, graph.tensors[a.tensor].shape, strict=True):
            if walk.window is None or not walk.window.halo or len(walk.dims) != 1:
                continue
            ways = shards(cfg, dim_index(node, walk.dims), mesh)
            part = walk.window.halo * ways / concrete_size(extent, a.tensor)
            for when in (itself, gradient) if back else (itself,):
                yield charge("permute", i, a, walk.dims, when, part * grown)
            grown = grown * np.where(ways > 1, 1 + part, 1.0)


def _ring_charges(graph: Graph, node: Node, ring: RingDim, cfg: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Keys and values go around the ring while attention works on those that have arrived. In backward, the sums of
    their gradients (float32) go around as well, and then return to their device. Liu et al. 2023 (arXiv 2310.01889).

    With a causal mask, half of each part is exchanged before and after, so that all devices have the same work
    (``RingDim.balanced``).
    """
    op = node.main
    q, k, v = (local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh) for a in op.reads)
    out = local_bytes(node, graph.tensors[op.writes[0].tensor], op.writes[0], cfg, mesh)
    sums = (k + v) * max(4 / graph.tensors[op.reads[1].tensor].itemsize, 1.0)
    rounds = shards(cfg, [ring.dim], mesh) - 1
    half = np.where(ring.balanced(node, cfg, mesh) & (op.function is CAUSAL_ATTENTION), 0.5, 0.0)
    for w in [w for w in node_work(graph, node, cfg, mesh) if w.kind == "attention"]:

        def moved(
            nbytes: np.ndarray, rounds: np.ndarray | float, behind: Work | None = None, w: Work = w
        ) -> Charge:
            return Charge(
                kind="permute",
                axes=axis_bits(cfg, [ring.dim], mesh),
                nbytes=nbytes,
                tensor=op.reads[1].tensor,
                phase=w.phase,
                times=w.times,
                rounds=rounds,
                behind=behind,
            )

        if w.phase == "forward":
            yield moved(k + v, rounds, w)
            yield moved(half * (q + k + v + out), 2)
        else:
            yield moved(k + v + sums, rounds, w)
            yield moved(sums, 1)
            yield moved(half * (2 * out + q + k + v), 2)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A tensor, or its gradient, that is sent along an edge: bytes of the whole tensor, and how often in a step,
    including recomputation.

    sum_nbytes: the bytes where it is a sum that devices add up, of a gradient in another dtype than the tensor's.
    back: it is the gradient, which comes from the reader. repeats: 2 if recomputation needs it once more. read, made:
    the products that read the tensor, and that make it, where their pieces may run beside its gather or its scatter.
    """

    phase: Phase
    back: bool
    nbytes: int
    sum_nbytes: int
    times: float
    bucketed: bool
    repeats: int = 1
    read: Products = ()
    made: Products = ()

    def bytes_of(self, kind: CollectiveKind) -> int:
        """Bytes of the whole tensor in a collective of this kind."""
        return self.sum_nbytes if kind in SUMS else self.nbytes

    def ends(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The layouts before and after. src: from write_states. dst: from read_states."""
        if not self.back:
            return forward_states(src), np.where(dst == PARTIAL, REPLICATED, dst)
        return dst, gradient_states(src)

    def overlapping(self, kind: CollectiveKind) -> Products:
        """The products whose pieces may run beside a collective of this kind that is the whole way of the tensor."""
        if kind not in TAKEN_APART:
            return ()
        return self.read if self.of_reader(kind) else self.made

    def of_reader(self, kind: CollectiveKind) -> bool:
        """Is a gather or a scatter next to the tensor's reader, rather than to its maker?"""
        return (kind == "all_gather") != self.back

    def during(self, kind: CollectiveKind, src: np.ndarray, mesh: Mesh) -> np.ndarray:
        """From which of the layouts written (write_states, [S, axes]) it may run beside them; bool [S]."""
        products = self.overlapping(kind)
        if not products or self.of_reader(kind):
            return np.full(len(src), bool(products))
        return sums_apart(products[0], src, mesh)


def edge_flows(graph: Graph, edge: Edge) -> tuple[Flow, ...]:
    """The tensor to its reader and, if it has a gradient, the gradient back.

    A parameter for a reader that runs in backward counts as forward, like its second gather in a rematerialised
    region. If a loop reads a slice of a stack at each turn, the whole stack is moved before the loop.
    What a step does once (``pase.ir.blocks.Hoisted``) is not repeated by micro-batches or by recomputation.
    """
    tensor = graph.tensors[edge.tensor]
    maker, _ = graph.node[edge.src].write_of(edge.tensor)
    nbytes = concrete_size(tensor.nbytes, tensor.name)
    times = runs_of(maker, edge.src) if edge.op.function is UNSTACK else runs_of(edge.op, edge.dst)
    bucketed = graph.producer[edge.tensor].kind == "parameter"
    hoisted = hoisted_of(graph) if bucketed else "none"
    repeats = 2 if edge.access.again and hoisted == "none" else 1
    rounds = micro_batches_of(graph)
    read, made = ((), ()) if bucketed else (read_by(graph, edge), made_by(graph, edge))
    phase: Phase = "forward" if bucketed else phase_of(edge.op)
    there = Flow(
        phase=phase,
        back=False,
        nbytes=nbytes,
        sum_nbytes=nbytes,
        times=times * repeats / (1 if hoisted == "none" else rounds),
        bucketed=bucketed,
        repeats=repeats,
        read=read,
        made=made,
    )
    if not (tensor.needs_grad and edge.op.differentiable):
        return (there,)
    summed = times / (rounds if hoisted == "all" else 1)
    back = Flow(
        phase="backward",
        back=True,
        nbytes=nbytes,
        sum_nbytes=nbytes // tensor.itemsize * _summed_itemsize(graph, edge.op, tensor),
        times=summed,
        bucketed=bucketed,
        read=read,
        made=made,
    )
    return (back,) if edge.access.gradient else (there, back)


def _summed_itemsize(graph: Graph, op: Op, tensor: Tensor) -> int:
    """Bytes of an element of the tensor's gradient while devices add their parts of it, if this op reads the tensor.

    A product makes the gradient of an operand in the dtype of its result. XLA rounds it to the operand's dtype only
    after the sum. Steps that are lowered by hand round before it, except in eight bits, where products are left to XLA
    (``backends/jax/spmd/rules.check_sums``).
    """
    if tensor.itemsize > 1 or not is_floating(tensor.dtype):
        return tensor.itemsize
    made = [graph.tensors[a.tensor] for a in op.writes]
    if op.kind == "copy":
        readers = (o for n in graph.nodes for o, a in n.reads if a.tensor == made[0].name)
        return max((_summed_itemsize(graph, o, made[0]) for o in readers), default=tensor.itemsize)
    return max(t.itemsize for t in made) if op.kind in ("matmul", "conv") else tensor.itemsize


def edge_charges(graph: Graph, edge: Edge, src: np.ndarray, dst: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Collectives of an edge for every pair of layouts; src from write_states, dst from read_states."""
    for flow in edge_flows(graph, edge):
        steps = reshard(*flow.ends(src, dst), mesh)
        single = len(src) == len(dst) == len(steps) == 1
        for step in steps:
            axes, fraction = (step.axes.T, step.fraction.T) if flow.back else (step.axes, step.fraction)
            yield Charge(
                kind=step.kind,
                axes=axes,
                nbytes=fraction * flow.bytes_of(step.kind),
                tensor=edge.tensor,
                phase=flow.phase,
                times=flow.times,
                bucketed=flow.bucketed,
                during=flow.overlapping(step.kind) if single and flow.during(step.kind, src, mesh)[0] else (),
                whole=float(flow.bytes_of(step.kind)),
                back=flow.back,
            )
