"""Assigns each task of a measured iteration to forward, backward or update, to a micro-batch, and to a layer.

The names of the model's parts are not used. PyTorch launches forward and update from the program's thread, and
backward from autograd's thread; each alternation between the two is a micro-batch. In a compiled XLA program, op names
show which ops JAX made by transposition: they are backward. A matrix product of forward that the program has after one
of backward begins the next micro-batch. Layers are found by repetition: products of one shape occur once per layer, or
a fixed number of times.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pase.errors import Infeasible
from pase.replay.graph import DataflowGraph, launching_calls
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE, KINDS, CompiledOp, Shapes, Timeline, on_stream

__all__ = ["OpShape", "ProductKey", "Sections", "StepPhase", "op_shapes", "product_of", "sections"]

ProductKey = tuple[int, int, int]
"""Elements of a matrix product's operands and result, ascending. It does not depend on transposition or flattening."""
_HOST = KINDS.index("host")
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Op → the position of its first factor among its operands; the second factor follows."""


class StepPhase(IntEnum):
    """A part of a training step."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True, kw_only=True)
class OpShape:
    """The framework op that launched a device op (or the compiled op that it is), and the shapes of its operands.

    product: for a compiled op that is or contains one matrix product, the shapes of its factors and its result.
    itemsize: bytes per element; 0 if only the kernel's name shows the element type.
    """

    name: str
    operands: Shapes
    product: Shapes = ()
    itemsize: int = 0

    @property
    def elements(self) -> int:
        """The number of elements of the largest operand; 1 if all are scalars."""
        return max((math.prod(d) for d in self.operands if d), default=1)


def product_of(s: OpShape | None) -> ProductKey | None:
    """Returns the key of the matrix product that an op is; None if it is not one.

    >>> product_of(OpShape(name="aten::mm", operands=((2, 3), (3, 5))))
    (6, 10, 15)
    """
    if s is not None and s.product:
        a, b, c = sorted(map(math.prod, s.product))
        return a, b, c
    at = _PRODUCTS.get(s.name, -1) if s is not None else -1
    if s is None or at < 0 or len(s.operands) < at + 2:
        return None
    x, w = s.operands[at : at + 2]
    if len(x) < 2 or len(x) != len(w) or x[-1] != w[-2] or x[:-2] != w[:-2]:
        return None
    a, b, c = sorted((math.prod(x), math.prod(w), math.prod((*x[:-1], w[-1]))))
    return a, b, c


def op_shapes(t: Timeline, g: DataflowGraph) -> dict[int, OpShape]:
    """Returns device task → its op with operand shapes, if the trace has them.

    This is the innermost op with operands around the launching call or, in a compiled program, the compiled op.
    """
    if t.compiled:
        known = {i: t.compiled.get(g.task_name(i)) for i in np.flatnonzero(on_stream(g.kind)).tolist()}
        return {i: _shape_of(g.task_name(i), x) for i, x in known.items() if x is not None}
    call_of = launching_calls(g)
    shaped = np.flatnonzero((t["kind"] == _HOST) & (t["shape"] >= 0))
    by_lane: dict[int, np.ndarray] = {}
    for lane in np.unique(t["lane"][shaped]).tolist():
        mine = shaped[t["lane"][shaped] == lane]
        by_lane[lane] = mine[np.argsort(t["start_ns"][mine], kind="stable")]
    out: dict[int, OpShape] = {}
    for op, call in call_of.items():
        event = int(g.event[call])
        around = by_lane.get(int(t["lane"][event])) if event >= 0 else None
        if around is None:
            continue
        at = int(t["start_ns"][event])
        k = int(np.searchsorted(t["start_ns"][around], at, side="right")) - 1
        # Ops nest only a few levels deep, so the innermost one that has not ended is among the last few.
        for e in around[max(k - 8, 0) : k + 1][::-1].tolist():
            if int(t.end_ns[e]) > at:
                out[op] = OpShape(name=t.names[int(t["name"][e])], operands=t.shapes[int(t["shape"][e])])
                break
    return out


def _shape_of(name: str, op: CompiledOp) -> OpShape:
    return OpShape(
        name=name.partition(".")[0], operands=op.operands, product=op.product, itemsize=op.itemsize
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sections:
    """Phase, micro-batch and layer of each task of one rank's iteration, [tasks]; −1 for tasks of other ranks.

    order: the rank's tasks in the order in which the replay starts them; the ops of a compiled program without a loop
    in the program's order.
    product: device task → the key of the matrix product that it is.
    shapes: device task → its op.
    """

    rank: int
    phase: np.ndarray
    micro: np.ndarray
    layer: np.ndarray
    micro_batches: int
    layers: int
    order: np.ndarray
    compute: int
    """The stream that computes, as an index of the graph's devices."""
    product: dict[int, ProductKey]
    shapes: dict[int, OpShape]


@dataclass(frozen=True, kw_only=True, eq=False)
class _TaskSections:
    """Phase, micro-batch and layer of each task, [tasks]; −1 where they are not known yet."""

    phase: np.ndarray
    micro: np.ndarray
    layer: np.ndarray

    @classmethod
    def unknown(cls, tasks: int) -> _TaskSections:
        phase, micro, layer = (np.full(tasks, -1, dtype=np.int64) for _ in range(3))
        return cls(phase=phase, micro=micro, layer=layer)


def sections(t: Timeline, g: DataflowGraph) -> Sections:
    """Returns the sections of the first rank. Raises Infeasible, with the reason, if the trace does not show them."""
    rank = g.ranks[0]
    mine = g.rank == rank
    order = replay_graph(g).order
    order = order[mine[order]]
    launched = {} if t.compiled else _launched(g, order, rank)
    shapes = {i: s for i, s in op_shapes(t, g).items() if mine[i]}
    product = {i: k for i, s in shapes.items() if (k := product_of(s)) is not None}
    if not product and t.compiled:
        raise Infeasible(
            "the compiled program in the trace has no matrix product, so its layers cannot be found"
        )
    if not product:
        raise Infeasible(
            "no matrix multiplication in the trace has the shapes of its operands",
            fix="record with record_shapes=True, as pase profile does",
        )
    labels = _TaskSections.unknown(len(g))
    if t.compiled:
        order = _as_in_program(t, g, order, shapes)
        ops = [i for i in order.tolist() if i in shapes]
        _label_program(t, g, labels, ops, product)
    else:
        ops = [i for launched_ops in launched.values() for i in launched_ops]
        _label_calls(g, labels, launched, int(g.device[g.root[rank]]))
    micro_batches = 1 + int(labels.micro[ops].max())
    layers = _layers(labels, ops, product, micro_batches)
    for call, launched_ops in launched.items():
        labels.layer[call] = labels.layer[launched_ops[0]]
    _label_rest(g, order, labels)
    kernels = order[on_stream(g.kind[order]) & (g.kind[order] != COLLECTIVE)]
    return Sections(
        rank=rank,
        phase=labels.phase,
        micro=labels.micro,
        layer=labels.layer,
        micro_batches=micro_batches,
        layers=layers,
        order=order,
        compute=int(np.bincount(g.device[kernels], weights=g.duration_ns[kernels]).argmax()),
        product=product,
        shapes=shapes,
    )


def _launched(g: DataflowGraph, order: np.ndarray, rank: int) -> dict[int, list[int]]:
    """Returns launching call → the device ops that it launches, in the order of the calls. Raises Infeasible if all
    calls are of the program's thread."""
    ops_of: dict[int, list[int]] = defaultdict(list)
    for op, call in launching_calls(g).items():
        if g.rank[op] == rank:
            ops_of[call].append(op)
    found = {call: ops_of[call] for call in order.tolist() if call in ops_of}
    if rank not in g.root or all(g.device[call] == g.device[g.root[rank]] for call in found):
        raise Infeasible(
            "the trace does not distinguish forward from backward",
            fix="give a PyTorch trace, in which a separate thread launches backward, or an .xplane.pb of jax.profiler, "
            "which contains the compiled program",
        )
    return found


def _label_calls(g: DataflowGraph, labels: _TaskSections, launched: dict[int, list[int]], main: int) -> None:
    """Sets the phase and the micro-batch of calls and of what they launch. main: the program's thread."""
    for call, (phase, turn) in _micro_batch_of_calls(g, list(launched), main).items():
        for i in (call, *launched[call]):
            labels.phase[i], labels.micro[i] = phase, turn


def _label_program(
    t: Timeline, g: DataflowGraph, labels: _TaskSections, ops: list[int], product: dict[int, ProductKey]
) -> None:
    """Sets the phase and the micro-batch of the ops of a compiled program, which records the part of each op."""
    for i in ops:
        labels.phase[i] = StepPhase[t.compiled[g.task_name(i)].part.upper()]
    if not any(labels.phase[i] == StepPhase.BACKWARD for i in product):
        raise Infeasible(
            "by the names that JAX gives its ops, no matrix product of the compiled program is in backward, so it is "
            "not a training step",
            fix="trace a training step",
        )
    labels.micro[ops] = _micro_batch_of_ops(labels.phase[ops], np.isin(ops, list(product)))


def _as_in_program(t: Timeline, g: DataflowGraph, order: np.ndarray, ops: dict[int, OpShape]) -> np.ndarray:
    """Returns the tasks with the compiled ops in the program's order, if each of them runs once.

    Ops that do not depend on each other run in any order on several threads or streams: a product of the next
    micro-batch may run before the last one of this micro-batch's backward. An op that runs more often is in a loop,
    whose turns follow each other.
    """
    place = {name: k for k, name in enumerate(t.compiled)}
    mine = [i for i in order.tolist() if i in ops]
    names = [g.task_name(i) for i in mine]
    if len(set(names)) < len(names):
        return order
    out = order.copy()
    out[np.isin(order, mine)] = sorted(mine, key=lambda i: place[g.task_name(i)])
    return out


def _micro_batch_of_ops(phase: np.ndarray, is_product: np.ndarray) -> np.ndarray:
    """Returns the micro-batch of each op of a compiled program, in order.

    A micro-batch begins with forward's first product after a product of backward, and with the ops of forward right
    before it. The update belongs to the last micro-batch.
    """
    out = np.zeros(len(phase), dtype=np.int64)
    turn, after_backward = 0, False
    for i, (p, product) in enumerate(zip(phase.tolist(), is_product.tolist(), strict=True)):
        forward = p == StepPhase.FORWARD
        out[i] = turn + int(after_backward and forward)
        if product and p != StepPhase.UPDATE:
            turn, after_backward = int(out[i]), not forward
    return np.where(phase == StepPhase.UPDATE, turn, np.minimum(out, turn))


def _micro_batch_of_calls(
    g: DataflowGraph, launching: list[int], main: int
) -> dict[int, tuple[StepPhase, int]]:
    """Returns launching call → (phase, micro-batch), from the alternation of the program's and autograd's threads."""
    out: dict[int, tuple[StepPhase, int]] = {}
    last = max(k for k, c in enumerate(launching) if int(g.device[c]) != main)
    micro, back = 0, False
    for k, c in enumerate(launching):
        of_main = int(g.device[c]) == main
        if back and of_main and k < last:
            micro += 1
        back = not of_main
        phase = StepPhase.BACKWARD if back else StepPhase.FORWARD if k < last else StepPhase.UPDATE
        out[c] = phase, micro
    return out


def _layers(labels: _TaskSections, ops: list[int], product: dict[int, ProductKey], micro_batches: int) -> int:
    """Sets the layers of the device's ops, which are given in order. Returns the number of layers."""
    sequence: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in ops:
        sequence[int(labels.phase[i]), int(labels.micro[i])].append(i)
    counts = [Counter(product[i] for i in v if i in product) for (p, _), v in sequence.items() if not p]
    if len(counts) != micro_batches or any(c != counts[0] for c in counts):
        raise Infeasible(
            f"the {micro_batches} alternations of forward and backward do not run the same products, so they are not "
            "micro-batches"
        )
    forward = next([product.get(i) for i in v] for (p, _), v in sequence.items() if not p)
    layers = _repeats([k for k in forward if k is not None])
    for (p, _), ops in sequence.items():
        turns = _micro_batch_of_products([product.get(i) for i in ops], layers)
        back = p == StepPhase.BACKWARD
        at = layers - 1 if back else 0
        for i, turn in zip(ops, turns, strict=True):
            if turn is not None and p != StepPhase.UPDATE:
                at = layers - 1 - turn if back else turn
            labels.layer[i] = at
    return layers


def _micro_batch_of_products(keys: list[ProductKey | None], turns: int) -> list[int | None]:
    """Returns the repetition to which each product belongs; None if repetitions do not have equally many of it.

    turns: the number of repetitions.
    """
    count, seen = Counter(keys), Counter[ProductKey | None]()
    out: list[int | None] = []
    for k in keys:
        inside = k is not None and count[k] % turns == 0
        out.append(seen[k] * turns // count[k] if inside else None)
        seen[k] += 1
    return out


def _repeats(keys: list[ProductKey]) -> int:
    """Returns the number of repetitions (layers) in a sequence of products.

    It is the largest number of non-overlapping repetitions that cover the most products.
    """
    count = Counter(keys)
    best, inside_best = 1, 0
    for n in range(2, max(count.values(), default=1) + 1):
        turns = [t for t in _micro_batch_of_products(list(keys), n) if t is not None]
        if turns == sorted(turns) and len(turns) >= inside_best:
            best, inside_best = n, len(turns)
    return best


def _label_rest(g: DataflowGraph, order: np.ndarray, labels: _TaskSections) -> None:
    """Labels host work, and calls that launch nothing, like the next launch of their thread, or else like the last."""
    for d in np.unique(g.device[order]).tolist():
        here = order[g.device[order] == d]
        known = np.flatnonzero(labels.phase[here] >= 0)
        if not len(known):
            labels.phase[here], labels.micro[here], labels.layer[here] = StepPhase.UPDATE, 0, 0
            continue
        # On a stream, an op that has no launch (an inserted collective) gets the labels of the previous op.
        if g.devices[d].kind == "thread":
            side = np.searchsorted(known, np.arange(len(here)), "left")
        else:
            side = np.searchsorted(known, np.arange(len(here)), "right") - 1
        nearest = known[np.clip(side, 0, len(known) - 1)]
        for x in (labels.phase, labels.micro, labels.layer):
            x[here] = x[here[nearest]]
