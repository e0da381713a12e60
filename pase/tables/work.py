"""Local work, forward and backward, of a node under each of its configs.

The work of an op is its number of points, divided by the number of shards of the dims that it works on. Backward has
one product for each differentiable operand of a matmul or conv; for other ops it has twice the FLOPs and the traffic of
forward. A derivative rule that the user wrote consists of ops that run in backward. Everything is an array over
configs. With a single config, the result is the plan's own list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from pase.ir import Access, Graph, Node, Op, Tensor
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.ir.functions import CAUSAL_ATTENTION
from pase.ir.precision import gradient_dtype, operand_bytes, product_dtype, rate_dtype, stored_dtype
from pase.ir.types import WORKLESS, itemsize
from pase.ir.whole_step import handed_on, whole_step
from pase.machine import Mesh
from pase.tables.layouts import concrete_size, dim_index, local_bytes, ring_of, shards, state_index
from pase.tables.passes import HEAVY, LightReads, longest_row, scale_gradients
from pase.tables.tiles import padding, rounded

__all__ = [
    "BACKWARD_PRODUCTS",
    "OPTIMIZERS",
    "SCALE_PASSES",
    "CompilerHabits",
    "Phase",
    "Work",
    "WorkKind",
    "aligned_elements",
    "backward_passes",
    "has_gradient",
    "matrix_rows",
    "node_work",
    "parameter_reads",
    "phase_of",
    "product_groups",
    "runs_of",
    "state_itemsize",
]

Phase = Literal["forward", "backward", "update"]
WorkKind = Literal["matmul", "conv", "attention", "memory"]

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam_master": 3, "lion": 1, "adafactor": 0}
"""Optimizer -> values of state per parameter (the factored rows of adafactor are below one percent)."""


def state_itemsize(graph: Graph, parameter: Tensor, optimizer: str) -> int:
    """Returns the bytes of each value of the optimizer's state.

    PyTorch's optimizers hold it in the parameter's dtype. Otherwise it is float32, and so are master weights.
    """
    return parameter.itemsize if graph.facts.eager and optimizer != "adam_master" else 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """Local work of one op (or of all light ops of a node together), one entry per config; see CostModel.compute.

    nbytes: includes the padding of arrays. padding: for a product, the factor by which padded rows increase ``flops``.
    (The cost model's own tiles round up the columns and the contraction.)
    diagonal: for fused attention, the factor by which squares on a causal mask's diagonal, computed whole, add to
        ``flops``. passes: the bytes that its backward moves before and after its products.
    unaligned: for a product with rows of an operand that are no multiple of 16 bytes in memory, the factor by which its
        FLOPs grow in a library's kernels: 1 for a matmul, more for a convolution, whose channels are padded. Otherwise
        0.
    windowed: the FLOPs of light ops that slide a window over an operand (pools).
    casts: whether this work casts operands of a product to the narrower or wider dtype in which the product runs
        ("weight": a parameter, to the narrower one), or gradients back from it.
    recompute: whether recomputation repeats this work, so that ``times`` counts it twice.
    """

    kind: WorkKind
    dtype: str
    flops: np.ndarray
    nbytes: np.ndarray
    mnk: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    phase: Phase
    times: float
    padding: np.ndarray | float = 1.0
    diagonal: np.ndarray | float = 1.0
    passes: np.ndarray | float = 0.0
    unaligned: np.ndarray | float = 0.0
    windowed: np.ndarray | float = 0.0
    casts: Literal["narrower", "weight", "wider"] | None = None
    recompute: bool = False

    @property
    def late(self) -> float:
        """The fraction of ``times`` that recomputation runs in backward, for work that otherwise runs in forward."""
        return 0.5 if self.recompute and self.phase == "forward" else 0.0


@dataclass(frozen=True, kw_only=True)
class CompilerHabits:
    """How a compiler stores arrays and runs products whose dtypes differ.

    tile: rows and lanes of the tiles in which the device stores arrays; None if it does not pad them.
    widens: whether a product in backward runs in the dtype of its result's gradient if that is wider than the
        operands' (JAX: a ``preferred_element_type`` that is wider). Otherwise, a program casts the result after the
        product, and the gradient before.
    converts: whether operands are converted to the dtype of their product in memory (XLA for GPUs); otherwise, a
        product converts what it reads (XLA for TPUs).
    sums_apart: whether the gradients of a norm's scale and of its operand are computed by different kernels
        (``ScaleGradient``). splits_norms: whether these are as many kernels as XLA for GPUs makes.
    """

    tile: tuple[int, int] | None = None
    widens: bool = True
    converts: bool = True
    sums_apart: bool = True
    splits_norms: bool = True


def phase_of(graph: Graph, node: str, op: Op) -> Phase:
    """The phase in which an op of a node itself runs."""
    if passes := whole_step(graph):
        return "update" if handed_on(graph, graph.node[node], op) else passes[node]
    return "backward" if op.backward else "forward"


def runs_of(op: Op, what: str) -> float:
    """How often the op runs in a step, on average. what: the name for an error message."""
    return float(concrete_size(op.times, what)) * op.chance


def _local_points(node: Node, dims: tuple[str, ...], cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """The number of points of these dims on one device, under each config."""
    index = dim_index(node, dims)
    points = 1.0
    for i in index:
        points *= concrete_size(node.space.dims[i].size, node.name)
    return points / shards(cfg, index, mesh)


def _padded(
    node: Node, tensor: Tensor, access: Access, cfg: np.ndarray, mesh: Mesh, tile: tuple[int, int] | None
) -> np.ndarray | float:
    """The factor by which tiles pad the local shard of a tensor, under each config; 1 without padding."""
    if tile is None or len(tensor.shape) < 2:
        return 1.0
    extents = [
        concrete_size(extent, tensor.name) / shards(cfg, dim_index(node, walk.dims), mesh)
        for extent, walk in zip(tensor.shape, access.map.walks, strict=True)
    ]
    return padding(extents, tile)


_ALIGNED_BYTES = 16
"""What a GPU's asynchronous copies to shared memory move at a time (CUDA programming guide: cp.async, TMA)."""


def matrix_rows(
    graph: Graph, accesses: Iterable[Access], groups: Sequence[set[str]]
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields the dims, outermost first, and the elements of a row of each tensor of a product, stored as a matrix.

    groups: the dims of the rows, of the columns and of the contraction. A matrix's row consists of all last dims of one
    group. A last dim of a batch is one that a compiler stores elsewhere: that tensor has no row.
    """
    for a in accesses:
        walks, shape = a.map.walks, graph.tensors[a.tensor].shape
        group = next((g for g in groups if walks and set(walks[-1].dims) <= g), None)
        if group is None:
            continue
        last = next((i for i in range(len(walks), 0, -1) if not set(walks[i - 1].dims) <= group), 0)
        row = math.prod(concrete_size(s, a.tensor) for s in shape[last:])
        yield tuple(d for w in walks[last:] for d in w.dims), row


def aligned_elements(dtype: str) -> int:
    """The elements of which a row has a multiple if it is aligned to 16 bytes. dtype: of a tensor, or of a rate."""
    return max(_ALIGNED_BYTES // itemsize(stored_dtype(dtype)), 1)


def product_groups(op: Op) -> tuple[set[str], set[str], set[str]]:
    """The dims of a product's rows, of its columns, and of its contraction, without groups of rows."""
    x, w = (set(a.map.dims) for a in op.factors)
    out = set(op.writes[0].map.dims)
    ends = {d for a in op.reads[2:] for d in a.map.dims}
    return out - w, out - x, set(op.dims) - out - _groups_of_rows(op) - ends


def _groups_of_rows(op: Op) -> set[str]:
    """The dim of the groups in a ragged product, which has their ends as its third operand."""
    x, w = (set(a.map.dims) for a in op.factors)
    return w - x - set(op.writes[0].map.dims) if op.reads[2:] else set()


def _unaligned(
    graph: Graph, node: Node, op: Op, operands: Iterable[Access], dtype: str, cfg: np.ndarray, mesh: Mesh
) -> np.ndarray | float:
    """``Work.unaligned`` of a product in this dtype, under each config.

    operands: what this product of the op reads: in backward, the result's gradient, too. Rows of what a matmul writes
    do not matter, because only operands are copied to shared memory. Shorter rows than 16 bytes are not copied
    asynchronously at all. A convolution's arrays have channels last.
    """
    found: np.ndarray | float = 0.0
    width = aligned_elements(dtype)
    if op.kind == "conv":
        for a, channels in _channels(op):
            local = _local_points(node, channels if a in operands else (), cfg, mesh)
            found = np.where(
                (local > 1) & (local % width != 0), np.maximum(found, 1.0) * rounded(local, width), found
            )
        return found
    for dims, row in matrix_rows(graph, operands, product_groups(op)):
        if row > width:
            apart = row % (shards(cfg, dim_index(node, dims), mesh) * width) != 0
            found = np.where(apart, 1.0, found)
    return found


def _channels(op: Op) -> Iterator[tuple[Access, tuple[str, ...]]]:
    """A convolution's input and result, each with the dims of its channels."""
    filters = {d for walk in op.factors[1].map.walks for d in walk.dims}
    for a in (op.factors[0], *op.writes):
        yield a, tuple(d for walk in a.map.walks if filters & set(walk.dims) for d in walk.dims)


def has_gradient(graph: Graph, op: Op, tensor: str) -> bool:
    """Whether backward computes the gradient of this tensor, which the op reads."""
    return op.differentiable and graph.tensors[tensor].needs_grad


def node_work(
    graph: Graph,
    node: Node,
    cfg: np.ndarray,
    mesh: Mesh,
    optimizer: str = "adam",
    habits: CompilerHabits = CompilerHabits(),
) -> Iterator[Work]:
    """The node's local work under each config."""
    if node.kind == "parameter":
        yield from _parameter_work(graph, node, cfg, mesh, optimizer)
        return
    yield from _added_unsummed(graph, node, cfg, mesh)
    fed = {a.tensor for op in node.ops if op.kind in HEAVY for a in op.reads}
    arriving, reshaped = _arriving_gradients(graph, node), _reshaped(graph, node)
    zero = np.zeros(len(cfg))
    flops_of: dict[Phase, np.ndarray] = dict.fromkeys(get_args(Phase), zero)  # sums over all light ops
    bytes_of, windowed = dict(flops_of), dict(flops_of)
    longest = longest_row(graph, node)
    light, behind = LightReads(node, longest), LightReads(node, longest)
    moved: dict[str, np.ndarray] = {}
    for op in (op for op in node.ops if not any(a.tensor in reshaped for a in op.writes)):
        flops = op.flops_per_point * _local_points(node, op.worked, cfg, mesh)
        heavy = op.kind in HEAVY
        touched = partial(_touched, graph, node, op.worked, cfg=cfg, mesh=mesh, tile=habits.tile)
        nbytes, wrote = zero, zero
        for a in op.reads if heavy else ():
            if a.tensor in graph.producer:
                nbytes = nbytes + touched(a) * _part_read(op, graph.tensors[a.tensor])
        grads = [a for a in op.reads if has_gradient(graph, op, a.tensor)] if _arrives(op, arriving) else []
        reads, again = light.of(op), behind.of(op, counts=bool(grads))
        moved |= {t: touched(a) for t, a in (reads | again).items() if t in graph.producer and t not in moved}
        for a in op.writes:
            if heavy or a.tensor in fed or _is_stored(graph, node, a.tensor, light.remade(op)):
                wrote = wrote + touched(a)
        forward, backward = (sum((moved[t] for t in r if t in moved), nbytes + wrote) for r in (reads, again))
        if op.kind in ("matmul", "conv"):
            products = _products(graph, node, op, flops, forward, cfg, mesh, habits.tile)
            yield from _widened(graph, node, op, products, cfg, mesh, habits)
            yield from _casts(graph, node, op, cfg, mesh)
        elif op.kind == "attention":
            yield from _attention(graph, node, op, flops, forward, cfg, mesh)
        elif op.kind not in WORKLESS:
            phase = phase_of(graph, node.name, op)
            flops_of[phase] = flops_of[phase] + flops
            bytes_of[phase] = bytes_of[phase] + forward
            if op.kind == "window":
                windowed[phase] = windowed[phase] + flops
                windowed["backward"] = windowed["backward"] + (2 * flops if grads else zero)
            if op.kind == "gather":
                added = _added_by_lookups(graph, node, grads, wrote, cfg, mesh)
                bytes_of["backward"] = bytes_of["backward"] + added
            elif grads:
                flops_of["backward"] = flops_of["backward"] + 2 * flops
                bytes_of["backward"] = bytes_of["backward"] + 2 * backward
    for phase, nbytes in _of_scales(graph, node, cfg, mesh, habits):
        bytes_of[phase] = bytes_of[phase] + nbytes
    for phase, flops in flops_of.items():
        if flops.any() or bytes_of[phase].any():
            light_ops = _light_ops(graph, node, flops, bytes_of[phase], phase)
            yield replace(light_ops, windowed=windowed[phase])


def _touched(
    graph: Graph,
    node: Node,
    worked: tuple[str, ...],
    a: Access,
    *,
    cfg: np.ndarray,
    mesh: Mesh,
    tile: tuple[int, int] | None,
) -> np.ndarray:
    """The bytes of an array that an op over the dims ``worked`` reads or writes, under each config."""
    t = graph.tensors[a.tensor]
    if a.sparse:
        return t.itemsize * _local_points(node, worked, cfg, mesh)
    return local_bytes(node, t, a, cfg, mesh) * _padded(node, t, a, cfg, mesh, tile)


def _added_by_lookups(
    graph: Graph, node: Node, tables: list[Access], found: np.ndarray, cfg: np.ndarray, mesh: Mesh
) -> np.ndarray:
    """The bytes by which what was looked up is added to its tables' gradients: in place if another reader's gradient
    has the table's size, to zeros otherwise. found: the bytes that were looked up."""
    added = np.zeros(len(cfg))
    for a in tables:
        added = added + 2 * found
        if not _has_other_gradient(graph, node, a.tensor):
            added = added + local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh)
    return added


def _reshaped(graph: Graph, node: Node) -> set[str]:
    """The results of views that only products of the node read: of what is in memory, in the same order."""
    views = [op for op in node.ops if op.kind == "view"]
    light = {a.tensor for op in node.ops if op.kind not in (*HEAVY, "view") for a in op.reads}
    for op in reversed(views):
        if op.writes[0].tensor in light or graph.read_outside(node, op.writes[0].tensor):
            light |= {a.tensor for a in op.reads}
    found: set[str] = set()
    for op in views:
        before, after = ([d for w in a.map.walks for d in w.dims] for a in (op.reads[0], op.writes[0]))
        of, made = op.reads[0].tensor, op.writes[0].tensor
        whole = len(op.reads) == 1 and graph.tensors[of].elements == graph.tensors[made].elements
        in_memory = of not in node.internal - found
        in_order = before == after and op.parameters is None
        if whole and in_memory and in_order and made not in light and not graph.read_outside(node, made):
            found.add(made)
    return found


def _is_stored(graph: Graph, node: Node, tensor: str, remade: bool) -> bool:
    """Whether a light op's result is written to memory for other nodes. remade: whether a reader of single elements
    computes them itself."""
    if not remade:
        return graph.read_outside(node, tensor)
    return any(not a.sparse for _, a in _reads_elsewhere(graph, node, tensor))


def _reads_elsewhere(graph: Graph, node: Node, tensor: str) -> Iterator[tuple[Op, Access]]:
    """The reads of a tensor by other nodes."""
    for name in graph.readers.get(tensor, frozenset()) - {node.name}:
        yield from ((op, a) for op, a in graph.node[name].reads if a.tensor == tensor)


def _arriving_gradients(graph: Graph, node: Node) -> set[str]:
    """The tensors of which some differentiable reader passes a gradient back, of those that the node reads or writes.

    A maximum that only keeps a softmax in range has none."""
    found = {a.tensor for op in node.ops for a in op.writes if graph.read_outside(node, a.tensor)}
    for op in reversed(node.ops):
        if op.differentiable and _arrives(op, found):
            found |= {a.tensor for a in op.reads}
    return found


def _arrives(op: Op, arriving: set[str]) -> bool:
    """Whether a gradient of the op's result arrives. An op without results passes on what it reads."""
    return not op.writes or any(a.tensor in arriving for a in op.writes)


def _has_other_gradient(graph: Graph, node: Node, tensor: str) -> bool:
    """Whether another node's gradient of a tensor has the tensor's whole size."""
    return any(
        not a.sparse and has_gradient(graph, op, tensor) for op, a in _reads_elsewhere(graph, node, tensor)
    )


def _of_scales(
    graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh, habits: CompilerHabits
) -> Iterator[tuple[Phase, np.ndarray]]:
    """What norms with scales move besides what light ops do, in backward twice as much as in forward."""
    split = habits.splits_norms and not graph.facts.eager
    for s in scale_gradients(graph, node) if habits.sums_apart else ():
        phase = phase_of(graph, node.name, node.main)
        moved = [(graph.tensors[a.tensor], a) for a in s.operands if a.tensor in graph.producer]
        once = sum((local_bytes(node, t, a, cfg, mesh) for t, a in moved), np.zeros(len(cfg)))
        if s.sums == "apart" and split:
            yield phase, once
            once = 2 * once
        yield "backward", once
        if s.sums == "chained" and split:
            yield "backward", 2 * local_bytes(node, graph.tensors[s.product.tensor], s.product, cfg, mesh)


def _light_ops(graph: Graph, node: Node, flops: np.ndarray, nbytes: np.ndarray, phase: Phase) -> Work:
    """All light ops of a node in one phase."""
    main, times = node.main, runs_of(node.main, node.name)
    dtype = graph.tensors[(main.writes or main.reads)[0].tensor].dtype
    recompute = main.remat and phase == "forward"
    return _traffic(dtype, flops, nbytes, phase, times * (2 if recompute else 1), recompute)


def _part_read(op: Op, operand: Tensor) -> float:
    """The part of an operand's bytes that a product in fewer bits reads."""
    return 1.0 if op.product_dtype is None else operand_bytes(op.product_dtype) / operand.itemsize


def _traffic(
    dtype: str, flops: np.ndarray, nbytes: np.ndarray, phase: Phase, times: float, recompute: bool = False
) -> Work:
    """Work other than a product."""
    return Work(
        kind="memory",
        dtype=dtype,
        flops=flops,
        nbytes=nbytes,
        mnk=None,
        phase=phase,
        times=times,
        recompute=recompute,
    )


def _products(
    graph: Graph,
    node: Node,
    op: Op,
    flops: np.ndarray,
    nbytes: np.ndarray,
    cfg: np.ndarray,
    mesh: Mesh,
    tile: tuple[int, int] | None,
) -> Iterator[Work]:
    """The forward product of a matmul or conv, and one product for each operand with a gradient.

    In a product by groups of rows (a ragged product), each group is a product of its own.
    """

    def extent(dims: set[str]) -> np.ndarray:
        return _local_points(node, tuple(dims), cfg, mesh)

    m, n, k = map(extent, product_groups(op))
    m = m / math.prod(concrete_size(node.space[d].size, node.name) for d in _groups_of_rows(op))
    times = runs_of(op, node.name)
    kind: Literal["matmul", "conv"] = "conv" if op.kind == "conv" else "matmul"
    dtype = product_dtype(graph, op)
    runs = times * (2 if op.remat else 1)
    accesses = (*op.factors, *op.writes)
    most = np.ones(1)
    for a in accesses if kind == "matmul" else ():
        most = np.maximum(most, _padded(node, graph.tensors[a.tensor], a, cfg, mesh, tile))

    def product(
        mnk: tuple[np.ndarray, np.ndarray, np.ndarray],
        operands: Iterable[Access],
        phase: Phase,
        times: float,
        recompute: bool = False,
    ) -> Work:
        known = 1.0 if tile is None else rounded(mnk[1], tile[1]) * rounded(mnk[2], tile[1])
        return Work(
            kind=kind,
            dtype=rate_dtype(op, dtype),
            flops=flops,
            nbytes=nbytes,
            mnk=mnk,
            phase=phase,
            times=times,
            padding=np.maximum(most / known, 1.0),
            unaligned=_unaligned(graph, node, op, operands, dtype, cfg, mesh),
            recompute=recompute,
        )

    yield product((m, n, k), op.factors, phase_of(graph, node.name, op), runs, op.remat)
    x, w = op.factors
    # The gradient of a convolution's input is a convolution as well: it contracts the window and the channels out.
    taps = extent({d for d in product_groups(op)[2] if node.space[d].kind == "window"})
    strides = math.prod(walk.window.stride for walk in x.map.walks if walk.window is not None)
    for a, other, mnk in ((x, w, (m * strides, k / taps, n * taps / strides)), (w, x, (k, n, m))):
        if has_gradient(graph, op, a.tensor):
            yield product(mnk, (*op.writes, other), "backward", times)


def _widened(
    graph: Graph,
    node: Node,
    op: Op,
    products: Iterable[Work],
    cfg: np.ndarray,
    mesh: Mesh,
    habits: CompilerHabits,
) -> Iterator[Work]:
    """The products, with those of backward in the dtype of the result's gradient if that is the widest, and the
    conversions around all whose dtypes differ.

    XLA for GPUs writes an operand again in the dtype of its product, and then the gradient in the operand's dtype.
    """
    forward, *backward = products
    own = product_dtype(graph, op)
    wide = gradient_dtype(graph, op) if habits.widens else own

    def converted(access: Access, dtype: str, like: Work) -> Iterator[Work]:
        t = graph.tensors[access.tensor]
        if habits.converts and op.product_dtype is None and itemsize(dtype) > t.itemsize:
            nbytes = local_bytes(node, t, access, cfg, mesh) * (1 + itemsize(dtype) / t.itemsize)
            none = np.zeros(len(cfg))
            cast = _traffic(t.dtype, none, nbytes, like.phase, like.times, like.recompute)
            yield replace(cast, casts="wider")

    for a in op.factors:
        yield from converted(a, own, forward)
    yield forward
    if wide == own:
        yield from backward
        return
    whole = [(graph.tensors[a.tensor], a) for a in (*op.factors, *op.writes)]
    grown = sum(
        (itemsize(wide) / t.itemsize - 1) * local_bytes(node, t, a, cfg, mesh)
        for t, a in whole
        if habits.converts
    )
    wanted = [has_gradient(graph, op, a.tensor) for a in op.factors]
    read = [other for other, mine in zip(reversed(op.factors), wanted, strict=True) if mine]
    for w, other in zip(backward, read, strict=True):
        unaligned = _unaligned(graph, node, op, (*op.writes, other), wide, cfg, mesh)
        yield replace(w, dtype=rate_dtype(op, wide), nbytes=w.nbytes + grown, unaligned=unaligned)
    for a, mine, others in zip(op.factors, wanted, reversed(wanted), strict=True):
        # The operand is read for the other one's gradient; its own gradient is converted to its dtype.
        for _ in range(mine + others):
            yield from converted(a, wide, backward[0])


SCALE_PASSES = 1
"""How often a tensor is read to find its scale for fp8, which is its own maximum (dynamic scaling)."""


def _casts(graph: Graph, node: Node, op: Op, cfg: np.ndarray, mesh: Mesh) -> Iterator[Work]:
    """Casts of operands, and in backward of the result's gradient, to eight or four bits.

    Each tensor is read twice, for its scale and for the cast. It is written twice, as it is and transposed, because two
    of the three products each read one of these (Transformer Engine's cast_transpose; torchao, roofline_utils.py).
    """
    if op.product_dtype is None:
        return
    backward = op.writes if any(has_gradient(graph, op, a.tensor) for a in op.reads) else ()
    times = runs_of(op, node.name)
    cast: tuple[tuple[tuple[Access, ...], Phase, float, bool], ...] = (
        (op.factors, phase_of(graph, node.name, op), times * (2 if op.remat else 1), op.remat),
        (backward, "backward", times, False),
    )
    for accesses, phase, runs, recompute in cast:
        for a in accesses:
            t = graph.tensors[a.tensor]
            read = local_bytes(node, t, a, cfg, mesh)
            nbytes = (1 + SCALE_PASSES) * read + 2 * operand_bytes(op.product_dtype) * read / t.itemsize
            made_by = graph.producer.get(a.tensor)
            stored = made_by is not None and made_by.kind == "parameter"
            yield replace(
                _traffic(t.dtype, np.zeros(len(cfg)), nbytes, phase, runs, recompute),
                casts="weight" if stored else "narrower",
            )


BACKWARD_PRODUCTS = 5 / 2
"""FLOPs of backward relative to forward in fused attention. Backward computes the scores again and has one product for
each of four gradients (of scores, values, queries and keys); forward has two products. Dao et al. 2022 (arXiv
2205.14135), algorithm 4."""

_MASKED = 64
"""Kernels of fused attention apply a mask to squares of so many queries and keys, which they compute whole."""


def backward_passes(result: Tensor, moved: np.ndarray | float) -> np.ndarray | float:
    """The bytes that fused attention's backward moves outside of its products; moved: the local bytes of its result.

    It first reads the result and its gradient, for their product's sum over each row. It sums up the gradient of the
    queries in float32, which is zeroed first and cast at the end (Dao 2023, arXiv 2307.08691, algorithm 2).
    """
    return 3 * moved + 2 * 4 * moved / result.itemsize


def _attention(
    graph: Graph, node: Node, op: Op, flops: np.ndarray, nbytes: np.ndarray, cfg: np.ndarray, mesh: Mesh
) -> Iterator[Work]:
    """A fused attention forward, and backward.

    Backward reads again what forward read and wrote, with the result's gradient in place of the result, and writes the
    gradients of the operands.

    With a causal mask and n contiguous parts of the queries, the last part sees the most keys, and the others wait for
    it. It has 1 - 1/2n of the work of a part without a mask; all parts together have half. In a ring, each device takes
    two chunks, if the positions divide evenly, and has half as well. A device reads and writes its shards in each round
    of the ring.
    """
    q, k = (set(a.map.dims) for a in op.reads[:2])
    queries = op.writes[1].map.walks[1].dims
    width = (q & k) - set(op.writes[0].map.dims)
    rows, keys, inner = (_local_points(node, tuple(dims), cfg, mesh) for dims in (queries, k - q, width))
    ring = ring_of(node)
    diagonal: np.ndarray | float = 1.0
    if op.function is CAUSAL_ATTENTION:
        part = 1 - 1 / (2 * shards(cfg, dim_index(node, queries), mesh))
        if ring is not None:
            part = np.where((shards(cfg, [ring.dim], mesh) > 1) & ring.balanced(node, cfg, mesh), 0.5, part)
        flops = flops * part
        diagonal = np.minimum(part + _MASKED / (2 * keys), 1.0) / part
    if ring is not None:
        keys, nbytes = keys / shards(cfg, [ring.dim], mesh), nbytes * shards(cfg, [ring.dim], mesh)
    times = runs_of(op, node.name)
    dtype = rate_dtype(op, graph.tensors[op.reads[0].tensor].dtype)
    yield Work(
        kind="attention",
        dtype=dtype,
        flops=flops,
        nbytes=nbytes,
        mnk=(rows, keys, inner),
        phase=phase_of(graph, node.name, op),
        times=times * (2 if op.remat else 1),
        diagonal=diagonal,
        recompute=op.remat,
    )
    if any(has_gradient(graph, op, a.tensor) for a in op.reads):
        result = graph.tensors[op.writes[0].tensor]
        moved = local_bytes(node, result, op.writes[0], cfg, mesh)
        yield Work(
            kind="attention",
            dtype=dtype,
            flops=BACKWARD_PRODUCTS * flops,
            nbytes=2 * nbytes,
            mnk=(rows, keys, inner),
            phase="backward",
            times=times,
            diagonal=diagonal,
            passes=backward_passes(result, moved),
        )


def _parameter_work(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str) -> Iterator[Work]:
    """Casts at each use, and the optimizer's reads and writes of the shard that this device updates."""
    for op in node.ops[1:]:
        if op.kind == "elementwise":
            accesses = (*op.reads, *op.writes)
            moved = np.asarray(
                sum(local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh) for a in accesses)
            )
            dtype = graph.tensors[op.writes[0].tensor].dtype
            runs = runs_of(op, node.name) * (2 if op.remat else 1)
            recompute = op.remat
            if hoisted_of(graph) != "none":  # the cast value is kept, like the gathered parameter
                runs, recompute = runs_of(op, node.name) / micro_batches_of(graph), False
            when = phase_of(graph, node.name, op)
            yield _traffic(dtype, np.zeros(len(cfg)), moved, when, runs, recompute)
    write = node.ops[0].writes[0]
    tensor = graph.tensors[write.tensor]
    if not tensor.needs_grad:
        return
    stored = local_bytes(node, tensor, write, cfg, mesh) / shards(cfg, state_index(node), mesh)
    elements = stored / tensor.itemsize
    state = elements * state_itemsize(graph, tensor, optimizer) * OPTIMIZERS[optimizer]
    flops = (2 + 5 * OPTIMIZERS[optimizer]) * elements
    yield _traffic(tensor.dtype, flops, 3 * stored + 2 * state, "update", 1.0)
    # Each micro-batch's gradient is added to the sum.
    if micro_batches_of(graph) > 1 and hoisted_of(graph) != "all":
        yield _traffic(tensor.dtype, elements, 3 * stored, "update", float(micro_batches_of(graph)))


def _added_unsummed(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh) -> Iterator[Work]:
    """Additions of each micro-batch's gradient to the local sum, if gradients are reduced over devices once a step."""
    if hoisted_of(graph) != "all" or micro_batches_of(graph) == 1:
        return
    for ops, a, stored in parameter_reads(graph, node):
        tensor = graph.tensors[a.tensor]
        if any(has_gradient(graph, op, a.tensor) for op in ops):
            # The gradients of a loop's iterations are added all at once.
            micro_batches = micro_batches_of(graph)
            new = local_bytes(node, tensor, a, cfg, mesh) * runs_of(ops[0], node.name) / micro_batches
            elements = new / tensor.itemsize
            moved = new + 2 * elements * stored.itemsize
            yield _traffic(stored.dtype, elements, moved, "update", float(micro_batches))


def parameter_reads(graph: Graph, node: Node) -> Iterator[tuple[list[Op], Access, Tensor]]:
    """The parameters that a node reads from other nodes: (the ops that read it, the access, the tensor as stored)."""
    found: dict[str, tuple[list[Op], Access, Tensor]] = {}
    for op, a in node.reads:
        source = graph.producer.get(a.tensor)
        if source is not None and source.kind == "parameter":
            stored = graph.tensors[source.ops[0].writes[0].tensor]
            found.setdefault(a.tensor, ([], a, stored))[0].append(op)
    yield from found.values()
