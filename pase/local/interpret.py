"""A whole local program in numpy, forward and backward, all devices in one process: an oracle for what runs programs.

An op is computed by what its maps say and no framework does: its operands are laid out over its iteration dims, its
function is applied point by point, and dims that the result does not walk are summed (or their maximum is taken). The
derivative is the same loop nest read the other way. What the graph alone does not determine (a number written into an
op, where a slice begins, a loop) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Graph, Op
from pase.ir.types import LEAF
from pase.local.simulate import DeviceParts, moved_all, part_of, places, whole_of
from pase.local.types import Extents, Layout, LocalMove, LocalOp, LocalOperand, LocalProgram, LocalResult
from pase.tables.layouts import number

__all__ = ["loss_and_gradients"]

PartsKey = TypeVar("PartsKey", bound=Hashable)
Pointwise = Callable[..., Any]

_FUNCTIONS: dict[str, tuple[Pointwise, tuple[Pointwise, ...]]] = {
    "add": (lambda a, b: a + b, (lambda a, b, y: 1.0, lambda a, b, y: 1.0)),
    "sub": (lambda a, b: a - b, (lambda a, b, y: 1.0, lambda a, b, y: -1.0)),
    "mul": (lambda a, b: a * b, (lambda a, b, y: b, lambda a, b, y: a)),
    "matmul": (lambda a, b: a * b, (lambda a, b, y: b, lambda a, b, y: a)),
    "div": (lambda a, b: a / b, (lambda a, b, y: 1 / b, lambda a, b, y: -y / b)),
    "neg": (lambda a: -a, (lambda a, y: -1.0,)),
    "exp": (np.exp, (lambda a, y: y,)),
    "log": (np.log, (lambda a, y: 1 / a,)),
    "tanh": (np.tanh, (lambda a, y: 1 - y * y,)),
    "square": (lambda a: a * a, (lambda a, y: 2 * a,)),
    "sqrt": (np.sqrt, (lambda a, y: 0.5 / y,)),
    **dict.fromkeys(
        ("copy", "move", "cast", "reduce_sum", "reduce_max", "reduce_min"),
        (lambda a: a, (lambda a, y: 1.0,)),
    ),
}
"""Function -> itself, and its derivative by each operand: of the operands and the result."""


_REDUCED: dict[str, Callable[..., np.ndarray]] = {"sum": np.sum, "max": np.max, "min": np.min}


def loss_and_gradients(
    program: LocalProgram, graph: Graph, given: Mapping[str, np.ndarray], loss: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(the tensor ``loss``, its gradient by each trained parameter), whole; graph: of which the program was lowered;
    given: the values of its parameters and inputs.

    PaseError where an op is not determined by the graph.
    """
    run = _NumpyRun(program=program, graph=graph)
    for op in program.ops:
        run.forward(op, given)
    r = program.result(loss)
    run.gradients[loss] = {at: np.ones(run.local(r.shape, r.gradient)) for at in places(program.mesh)}
    for op in reversed(program.ops):
        run.backward(op)
    value = run.whole(
        moved_all(run.values[loss], _settling(program, loss), r.shape, program.mesh), loss, False
    )
    trained = [t.name for t in graph.parameters if t.needs_grad]
    return value, {t: run.whole(run.gradients[t], t, True) for t in trained if t in run.gradients}


def _settling(program: LocalProgram, tensor: str) -> Sequence[LocalMove]:
    """The moves by which the model returns it."""
    op = program.outputs[program.original(tensor)]
    number = op.operands[0].transfer
    return () if number is None else program.transfers[number].forward


@dataclass(kw_only=True)
class _NumpyRun:
    """values: of tensors, as they are made. gradients: of tensors, as they arrive there. moved: by transfers, there;
    arriving: gradients on transfers, as they leave their readers."""

    program: LocalProgram
    graph: Graph
    values: dict[str, DeviceParts] = field(default_factory=dict)
    gradients: dict[str, DeviceParts] = field(default_factory=dict)
    moved: dict[int, DeviceParts] = field(default_factory=dict)
    arriving: dict[int, DeviceParts] = field(default_factory=dict)

    def local(self, shape: Extents, layout: Layout) -> Extents:
        return part_of(np.empty(shape), layout, places(self.program.mesh)[0], self.program.mesh).shape

    def whole(self, parts: DeviceParts, tensor: str, gradient: bool) -> np.ndarray:
        r = self.program.result(tensor)
        layout = r.gradient if gradient else tuple(None if s == "partial" else s for s in r.layout)
        return whole_of(parts, r.shape, layout, self.program.mesh)

    def read(self, o: LocalOperand) -> DeviceParts:
        """An operand as its op reads it."""
        if o.constant:
            raise PaseError(f"'{o.tensor}' is a constant, and the graph does not hold its value")
        if o.transfer is None:
            return self.values[o.tensor]
        if o.transfer not in self.moved:
            t = self.program.transfers[o.transfer]
            shape = self.program.result(t.tensor).shape
            self.moved[o.transfer] = moved_all(
                self.values[t.tensor], t.forward, shape, self.program.mesh, t.combine
            )
        return self.moved[o.transfer]

    def forward(self, op: LocalOp, given: Mapping[str, np.ndarray]) -> None:
        mesh = self.program.mesh
        if op.op.kind in LEAF:
            (r,) = op.results
            self.values[r.tensor] = {at: part_of(given[r.tensor], r.layout, at, mesh) for at in places(mesh)}
        elif op.results:
            nest, (r,) = _Nest.of(self, op, False), op.results
            read = [self.read(o) for o in op.operands]
            made = {at: nest.made([x[at] for x in read]) for at in places(mesh)}
            self.values[r.tensor] = self.joined(made, r.summed, op)

    def joined(self, parts: DeviceParts, axes: tuple[str, ...], op: LocalOp) -> DeviceParts:
        """All-reduced over axes, as partial results of the op become one."""
        nothing: Layout = (None,) * len(self.program.mesh.names)
        move = LocalMove(kind="all_reduce", axes=axes, before=nothing, after=nothing)
        return moved_all(parts, [move] if axes else [], (), self.program.mesh, op.combine)

    def backward(self, op: LocalOp) -> None:
        for r in op.results:
            for k, t in enumerate(self.program.transfers):
                if t.tensor == r.tensor and k in self.arriving:
                    home = moved_all(self.arriving[k], t.backward or (), r.shape, self.program.mesh)
                    _add(self.gradients, r.tensor, home)
        if op.op.kind in LEAF or not op.results or op.results[0].tensor not in self.gradients:
            return
        nest, (r,) = _Nest.of(self, op, True), op.results
        read = [self.read(o) for o in op.operands]
        if self.local(r.shape, r.layout) != self.local(
            r.shape, r.gradient
        ):  # a view of a parameter with a state
            kept = [self.program.result(o.tensor).gradient for o in op.operands]
            shapes = [self.local(o.shape, k) for o, k in zip(op.operands, kept, strict=True)]
            read = [{at: np.zeros(n) for at in places(self.program.mesh)} for n in shapes]
        g, top = self.gradients[r.tensor], self.values[r.tensor]
        shares = None
        if op.combine != "sum":
            over = r.summed or tuple(
                n for n, s in zip(self.program.mesh.names, r.layout, strict=True) if s == "partial"
            )
            top = self.joined(top, () if r.summed else over, op)
            reached = {at: nest.reached(read[0][at], top[at]) for at in places(self.program.mesh)}
            counts = {at: nest.collected(x, op.op.writes[0], "sum") for at, x in reached.items()}
            total = moved_all(
                counts,
                [LocalMove(kind="all_reduce", axes=over, before=r.gradient, after=r.gradient)]
                if over
                else [],
                r.shape,
                self.program.mesh,
            )
            shares = {at: x / nest.spread(total[at], op.op.writes[0]) for at, x in reached.items()}
        for i, o in enumerate(op.operands):
            if not (op.op.differentiable and self.graph.tensors[o.tensor].needs_grad):
                continue
            found = {
                at: nest.pulled(i, g[at], [x[at] for x in read], None if shares is None else shares[at])
                for at in places(self.program.mesh)
            }
            if o.transfer is not None:
                _add(self.arriving, o.transfer, found)
            else:
                nothing = o.gradient
                move = LocalMove(kind="all_reduce", axes=o.summed, before=nothing, after=nothing)
                _add(
                    self.gradients,
                    o.tensor,
                    moved_all(found, [move] if o.summed else [], o.shape, self.program.mesh),
                )


def _add(into: dict[PartsKey, DeviceParts], key: PartsKey, parts: DeviceParts) -> None:
    before = into.get(key)
    into[key] = parts if before is None else {at: before[at] + x for at, x in parts.items()}


@dataclass(frozen=True, kw_only=True)
class _Nest:
    """An op as a loop nest on one device. sizes: of its iteration dims there, in their order."""

    op: Op
    combine: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, run: _NumpyRun, local: LocalOp, back: bool) -> _Nest:
        """back: as its result's gradient lies."""
        op, space = local.op, run.graph.node[local.node].space
        if op.function.name not in _FUNCTIONS or len(_FUNCTIONS[op.function.name][1]) != len(op.reads):
            raise PaseError(f"'{op.name}' at {op.source} is not determined by the graph alone")
        sizes = {d: number(space[d].size, op.name) for d in op.dims}
        values: Sequence[LocalOperand | LocalResult] = (*local.operands, *local.results)
        ways = dict.fromkeys(sizes, 1)
        for a, v in zip((*op.reads, *op.writes), values, strict=True):
            if a.map.dims and any(w.window for w in a.map.walks):
                raise PaseError(f"'{op.name}' at {op.source} slides a window")
            for n, walk in zip(v.shape, a.map.walks, strict=True):
                if n != math.prod(sizes[d] for d in walk.dims):
                    raise PaseError(f"'{op.name}' at {op.source} takes a part of '{v.tensor}'")
            for dim, w in _splits(
                a,
                v.gradient if back and isinstance(v, LocalResult) else v.layout,
                sizes,
                run.program.mesh.sizes,
            ).items():
                ways[dim] = max(ways[dim], w)
        return cls(op=op, combine=local.combine, sizes={d: n // ways[d] for d, n in sizes.items()})

    def spread(self, x: np.ndarray, a: Access) -> np.ndarray:
        """An array with a dim for each iteration dim; of one element where its map does not walk it."""
        x = x.reshape([self.sizes[d] for d in a.map.dims])
        order = [a.map.dims.index(d) for d in self.sizes if d in a.map.dims]
        return x.transpose(order).reshape([n if d in a.map.dims else 1 for d, n in self.sizes.items()])

    def collected(self, full: np.ndarray, a: Access, combine: str) -> np.ndarray:
        """The inverse, of an array over all iteration dims: those that the map does not walk become one."""
        full = np.broadcast_to(full, tuple(self.sizes.values()))
        gone = tuple(i for i, d in enumerate(self.sizes) if d not in a.map.dims)
        full = _REDUCED[combine](full, axis=gone)
        kept = [d for d in self.sizes if d in a.map.dims]
        shape = [math.prod(self.sizes[d] for d in walk.dims) for walk in a.map.walks]
        return full.transpose([kept.index(d) for d in a.map.dims]).reshape(shape)

    def made(self, xs: Sequence[np.ndarray]) -> np.ndarray:
        """The op's result of its operands."""
        f, _ = _FUNCTIONS[self.op.function.name]
        wide = [self.spread(x, a) for x, a in zip(xs, self.op.reads, strict=True)]
        return self.collected(f(*wide), self.op.writes[0], self.combine)

    def reached(self, x: np.ndarray, top: np.ndarray) -> np.ndarray:
        """1 at the points that are the extreme, over all iteration dims."""
        return (self.spread(x, self.op.reads[0]) == self.spread(top, self.op.writes[0])).astype(float)

    def pulled(
        self, i: int, g: np.ndarray, xs: Sequence[np.ndarray], shares: np.ndarray | None
    ) -> np.ndarray:
        """The gradient of an operand, of the result's; shares: of an extreme, the part that each point gets."""
        f, by = _FUNCTIONS[self.op.function.name]
        wide = [self.spread(x, a) for x, a in zip(xs, self.op.reads, strict=True)]
        slope = by[i](*wide, f(*wide)) if shares is None else shares
        return self.collected(self.spread(g, self.op.writes[0]) * slope, self.op.reads[i], "sum")


def _splits(a: Access, layout: Layout, sizes: Mapping[str, int], ways: Sequence[int]) -> Mapping[str, int]:
    """Iteration dim -> into how many parts a layout of what this access walks splits it."""
    out: dict[str, int] = {}
    for axis, state in enumerate(layout):
        if not isinstance(state, tuple):
            continue
        major = 1
        for d in a.map.walks[state[0]].dims:
            if major <= state[1] // ways[axis] and state[1] <= major * sizes[d]:
                out[d] = out.get(d, 1) * ways[axis]
                break
            major *= sizes[d]
    return out
