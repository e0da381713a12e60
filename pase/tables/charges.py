"""Derives the collectives inside a node and along an edge, forward and backward, per config or pair of layouts.

- If an op sums over a split dim, the tensor that it writes is partial over that dim's axes. Inside a node, it is
  reduced at once (softmax's maximum, a norm's mean). Between nodes, the edge reduces it.
- The gradient of a tensor that is read is partial over the axes of split dims that the read's map does not contain.
  For a parameter, the sum over these axes is the gradient synchronisation.
- An axis on a parameter's *state* splits its gradient and the optimizer's work. The updated parameter is then gathered.
- For ops that run in backward because of the user's own derivative rule, only collectives are derived.
- A windowed dim exchanges halos. An edge pays for the reshard from the layout written to the layout read, and for the
  reshard of the gradient back.

Everything is an array over configs (or pairs of layouts). With a single config, the result is the plan's own list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pase.ir import Access, Edge, Graph, Node, Op, Tensor
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.ir.functions import CAUSAL_ATTENTION, UNSTACK
from pase.ir.made_of_weights import made_of_weights
from pase.ir.types import is_floating
from pase.ir.whole_step import sums_gradient, whole_step
from pase.machine import CollectiveKind, Mesh
from pase.tables.axis_layout import forward_states, gradient_states, summed_states
from pase.tables.decompose import TAKEN_APART, Products, made_by, read_by, sums_apart
from pase.tables.layouts import (
    RingDim,
    axis_bits,
    concrete_size,
    dim_index,
    local_bytes,
    ring_of,
    shards,
    state_index,
)
from pase.tables.reshard import reshard
from pase.tables.work import Phase, Work, has_gradient, node_work, phase_of, runs_of

__all__ = [
    "SUMS",
    "Charge",
    "Flow",
    "OpAccess",
    "edge_charges",
    "edge_flows",
    "is_made_of_weights",
    "is_of_parameter",
    "node_charges",
]

SUMS: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter")
"""The collectives that reduce."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Collectives of one kind, one per config or per pair of layouts.

    axes, nbytes: as in CostModel.collective. times: how often they run in a step.
    bucketed: whether this is the gather of a parameter, or of what is made of parameters alone, or the sum of its
    gradient. No op waits for such a collective alone. It is
    sent in a bucket with others, unless it is a lone gather (``Machine.lone_gather_bytes``).
    rounds: the number of collectives that follow each other each time. behind: the compute that overlaps with them, in
    rounds + 1 equal parts. One part overlaps with each collective, and only the rest of the collective's time is paid.
    within: for a collective inside a node, the op and the access that it serves; None for an edge or a whole node.
    during: for a single pair of layouts, the products that the collective overlaps with piece by piece
    (``Flow.overlapping``); if empty, compute waits for it.
    whole: bytes of the whole tensor, if the collective is bucketed or has products. back: whether it is for a gradient.
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
    """One access of an op. op: the op's index in its node. access: the index among its reads or its writes."""

    op: int
    access: int


def node_charges(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """Collectives inside the node: sums that its own ops need at once, halos, and the rounds of ring attention."""
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
    """The sums and halos of one op of a node. at: the op's index. consumed: the tensors that the node's ops read."""
    op = node.ops[at]
    times = runs_of(op, node.name)
    itself: tuple[Phase, float] = phase_of(graph, node.name, op), times * (2 if op.remat else 1)
    gradient: tuple[Phase, float] = "backward", times

    def charge(
        kind: CollectiveKind,
        i: int,
        a: Access,
        over: Sequence[str],
        when: tuple[Phase, float],
        part: np.ndarray | float = 1.0,
    ) -> Charge:
        """A collective over the axes of some dims, for the i-th access. part: the fraction of the local tensor sent."""
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
        # Rows of a later dim include the halos of the earlier dims, so that corners are sent as well.
        grown = np.ones(len(cfg))
        for walk, extent in zip(a.map.walks, graph.tensors[a.tensor].shape, strict=True):
            if walk.window is None or not walk.window.halo or len(walk.dims) != 1:
                continue
            ways = shards(cfg, dim_index(node, walk.dims), mesh)
            part = walk.window.halo * ways / concrete_size(extent, a.tensor)
            for when in (itself, gradient) if back else (itself,):
                yield charge("permute", i, a, walk.dims, when, part * grown)
            grown = grown * np.where(ways > 1, 1 + part, 1.0)


def _ring_charges(graph: Graph, node: Node, ring: RingDim, cfg: np.ndarray, mesh: Mesh) -> Iterator[Charge]:
    """The collectives of ring attention (Liu et al. 2023, arXiv 2310.01889).

    Keys and values go around the ring while attention works on those that have arrived. In backward, the sums of their
    gradients (float32) go around as well, and then return to their device.

    With a causal mask, half of each part is exchanged before and after, so that all devices have equal work
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
    """A tensor, or its gradient, that is sent along an edge.

    nbytes: bytes of the whole tensor. times: how often it is sent in a step, including recomputation.
    sum_nbytes: the bytes in a collective that reduces; they differ if a gradient has another dtype than its tensor.
    back: whether this is the gradient, which comes from the reader. repeats: 2 if recomputation sends it a second time.
    summed: whether a whole step (``pase.ir.whole_step``) sums a parameter's gradient here. late: whether a whole step's
    backward reads a parameter here.
    read, made: the products that read the tensor, and those that make it, if its gather or scatter may be decomposed
    to overlap with them.
    """

    phase: Phase
    back: bool
    nbytes: int
    sum_nbytes: int
    times: float
    bucketed: bool
    repeats: int = 1
    summed: bool = False
    late: bool = False
    read: Products = ()
    made: Products = ()

    def bytes_of(self, kind: CollectiveKind) -> int:
        """Bytes of the whole tensor in a collective of this kind."""
        return self.sum_nbytes if kind in SUMS else self.nbytes

    def ends(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The layouts before and after the reshard. src: of a write_rule. dst: of a read_rule."""
        if not self.back:
            return forward_states(src), summed_states(dst)
        return dst, gradient_states(src)

    def overlapping(self, kind: CollectiveKind) -> Products:
        """The products that may overlap, piece by piece, with a collective of this kind if it is the whole reshard."""
        if kind not in TAKEN_APART:
            return ()
        return self.read if self.of_reader(kind) else self.made

    def of_reader(self, kind: CollectiveKind) -> bool:
        """Whether a gather or a scatter is next to the tensor's reader, rather than next to its producer."""
        return (kind == "all_gather") != self.back

    def during(self, kind: CollectiveKind, src: np.ndarray, mesh: Mesh) -> np.ndarray:
        """bool [S]: whether the products may overlap, for each written layout (of a write_rule, [S, axes])."""
        products = self.overlapping(kind)
        if not products or self.of_reader(kind):
            return np.full(len(src), bool(products))
        return sums_apart(products[0], src, mesh)


def is_of_parameter(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is a parameter, as it is stored or as copy nodes hand it on."""
    source = graph.producer[tensor]
    while source.kind == "copy" and (before := graph.producer.get(source.ops[0].reads[0].tensor)) is not None:
        source = before
    return source.kind == "parameter"


def is_made_of_weights(graph: Graph, edge: Edge) -> bool:
    """Whether a node with other data reads what is made of parameters alone. It waits for no activation, so it can be
    gathered as early as a parameter, and its gradient can be summed as late."""
    alone = made_of_weights(graph) if not whole_step(graph) else frozenset[str]()
    return edge.src in alone and edge.dst not in alone


def edge_flows(graph: Graph, edge: Edge) -> tuple[Flow, ...]:
    """The flow of the tensor to its reader and, if the tensor has a gradient, the flow of the gradient back.

    A parameter for a reader that runs in backward counts as forward, like its second gather in a rematerialised
    region. The gradient of a parameter that a whole step hands to its update counts as backward, like the gradient that
    comes back along an edge. If a loop reads a slice of a stack in each iteration, the whole stack is resharded before
    the loop. Hoisted collectives (``pase.ir.blocks.Hoisted``) are not repeated for each micro-batch or for
    recomputation.
    """
    tensor = graph.tensors[edge.tensor]
    maker, _ = graph.node[edge.src].write_of(edge.tensor)
    nbytes = concrete_size(tensor.nbytes, tensor.name)
    times = runs_of(maker, edge.src) if edge.op.function is UNSTACK else runs_of(edge.op, edge.dst)
    when = phase_of(graph, edge.dst, edge.op)
    gradient = sums_gradient(graph, edge)
    of_parameter = graph.producer[edge.tensor].kind == "parameter"
    if whole_step(graph):
        # Copy nodes may hand a parameter on as it is stored, and each pass then gathers it.
        of_parameter = when != "update" and is_of_parameter(graph, edge.tensor)
    hoisted = hoisted_of(graph) if of_parameter or gradient else "none"
    bucketed = of_parameter or gradient or is_made_of_weights(graph, edge)
    repeats = 2 if edge.access.recompute and hoisted == "none" else 1
    rounds = micro_batches_of(graph)
    read, made = ((), ()) if bucketed else (read_by(graph, edge), made_by(graph, edge))
    phase: Phase = "forward" if of_parameter else "backward" if gradient else when
    there = Flow(
        phase=phase,
        back=False,
        nbytes=nbytes,
        sum_nbytes=nbytes,
        times=times * repeats / (1 if hoisted == "none" else rounds),
        bucketed=bucketed,
        repeats=repeats,
        summed=gradient,
        late=of_parameter and when == "backward" and bool(whole_step(graph)),
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
    """Bytes per element of the tensor's gradient while devices sum their partial gradients, if this op reads the
    tensor.

    A product computes the gradient of an operand in the dtype of its result. XLA rounds it to the operand's dtype only
    after the sum. The manual lowering rounds before the sum, except in eight bits, where it leaves products to XLA
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
    """Collectives of an edge for every pair of layouts. src: of a write_rule. dst: of a read_rule."""
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
