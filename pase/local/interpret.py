"""Runs a whole local program in numpy, forward and backward, on all devices in one process: an oracle for the backends.

Each op is computed from its maps, without any framework (``pase.local.nests``). A loop runs as many iterations as the
graph says, starting at the first element of a stack. Of a conditional, only the branch that its index selects runs.
Recomputed regions have the same values as the first time, so they are computed only once here. Parameters and their
gradients are sent in the program's messages, those of a loop in each iteration.

Ops that work along a whole dim (slices, sorts) are computed from their parameters (``pase.local.op_rules``). The graph
does not determine what some ops compute (attention, a body of the user's). Their rules can be passed in addition to
the graph. A rule is applied to each device's part, because no split cuts a dim that such an op works
along; if a split does, as in a ring of keys and values, the op is refused. Ops that neither the graph nor a rule
determines are refused, too (the end of a while loop, an op with several results).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Graph, Node, Op, Place, Scope
from pase.ir.parameters import Iota, StackRow
from pase.ir.types import LEAF
from pase.local.functions import COMPUTED
from pase.local.halo import widened, widened_back
from pase.local.lower import between, program_of
from pase.local.messages import Sending, messages_among
from pase.local.nests import LocalNest, coordinates, refused
from pase.local.op_rules import OpRule, rule_of
from pase.local.reshard import resharded
from pase.local.simulate import AllDevices, part_of, places, whole_of
from pase.local.types import (
    LocalOp,
    LocalOperand,
    LocalProgram,
    LocalReshardStep,
    LocalResult,
    TransferDirection,
)
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from pase.tables.layouts import concrete_size

__all__ = ["OpRule", "OpRules", "known_values", "loss_and_gradients"]

PartsKey = TypeVar("PartsKey", bound=Hashable)
LoopIndices = tuple[int, ...]
"""The iteration of each surrounding loop, outermost first."""
TurnedTensor = tuple[str, LoopIndices]


OpRules = Mapping[Place, OpRule]


def loss_and_gradients(
    program: LocalProgram,
    graph: Graph,
    given: Mapping[str, np.ndarray],
    loss: str,
    rules: OpRules | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(the tensor ``loss``, its gradient by each trained parameter), unsharded.

    graph: the graph that the program was lowered from. given: the values of its parameters, inputs and constants.
    rules: place of an op -> its rule. Raises PaseError if the graph and the rules do not determine what an op
    computes, or if gradients wait for later steps.
    """
    if program.delayed:
        raise PaseError("gradients of a step are sent or applied in a later one", where=f"'{program.name}'")
    run = _NumpyRun(program=program, graph=graph, given=given, rules=rules or {})
    r = program.result(loss)
    made = run.value(loss, (), ())
    run.gradients[loss, ()] = np.ones((*program.mesh.sizes, *r.gradient.local_shape(r.shape, program.mesh)))
    # Messages join gradients of parameters, so all of these come last.
    for op, indices in sorted(reversed(run.tape), key=lambda made: made[0].node in program.parameters):
        run.backward(op, indices)
    returned = resharded(made, _output_steps(program, loss), r.shape, "sum", run.devices)
    value = run.whole(returned, loss, False)
    trained = [t.name for t in graph.parameters if t.needs_grad]
    found = {t: run.gradients[t, ()] for t in trained if (t, ()) in run.gradients}
    return value, {t: run.whole(parts, t, True) for t, parts in found.items()}


def known_values(graph: Graph, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of the tensors that depend on no data, as far as the graph and ``given`` determine them: masks, tables
    of positions. Values that change in a loop, and products, are left out.

    graph: raw, with one op in each node. given: the values of some of its constants.
    """
    nodes: list[Node] = []
    made: set[str] = set()
    for node in graph.nodes:
        (op, *others) = node.ops
        if not others and all(a.tensor in made for a in op.reads) and _determined(graph, op, given):
            nodes.append(node)
            made |= node.internal
    mesh = Mesh(names=("x",), sizes=(1,))
    part = Graph(name=graph.name, tensors=graph.tensors, nodes=tuple(nodes))
    program = program_of(part, mesh, {n.name: {} for n in nodes})
    run = _NumpyRun(program=program, graph=part, given=given, rules={})
    values: dict[str, np.ndarray] = {}
    for o in program.ops:
        (r,), loops = o.results, o.op.loops
        value = run.whole(run.value(r.tensor, (0,) * len(loops), loops), r.tensor, False)
        values[r.tensor] = value.astype(_numpy_dtype(graph.tensors[r.tensor].dtype))
    return values


def _determined(graph: Graph, op: Op, given: Mapping[str, np.ndarray]) -> bool:
    """Whether the graph and ``given`` determine what an op makes of operands that depend on no data."""
    if (
        len(op.writes) != 1
        or op.literals is None
        or op.function.name == "unstack"
        or op.name in ("cond", "stack")
    ):
        return False
    tensor = graph.tensors[op.writes[0].tensor]
    if op.kind in ("constant", "generate"):
        return isinstance(op.parameters, Iota) or tensor.name in given or tensor.number is not None
    shapes = [
        tuple(concrete_size(s, op.name) for s in graph.tensors[a.tensor].shape) for a in op.reads + op.writes
    ]
    if op.reads and rule_of(op, shapes[0], shapes[-1]) is not None:
        return True
    part = op.kind == "view" and set(op.reads[0].map.dims) - set(op.writes[0].map.dims)
    return op.function.name in COMPUTED and op.kind in ("elementwise", "reduce", "view", "copy") and not part


def _numpy_dtype(dtype: str) -> type:
    """The dtype of numpy's own that holds values of this dtype."""
    return np.dtype(dtype).type if hasattr(np, dtype) else np.float32


def _output_steps(program: LocalProgram, tensor: str) -> Sequence[LocalReshardStep]:
    """The reshard steps that bring the tensor to the layout in which the model returns it."""
    op = program.outputs[program.original(tensor)]
    number = op.operands[0].transfer
    return () if number is None else program.transfers[number].forward


@dataclass(kw_only=True)
class _NumpyRun:
    """One run of a program. An array has the parts of all devices (``AllDevices``).

    values: tensors in the layout in which they are made. tape: the ops that made them, in order. gradients: gradients
    of tensors, in the layout in which they arrive. resharded: values after the forward steps of a transfer. arriving:
    gradients on a transfer, in the layout in which they leave the reader. returned: gradients after the backward steps
    of a transfer.
    """

    program: LocalProgram
    graph: Graph
    given: Mapping[str, np.ndarray]
    rules: OpRules
    values: dict[TurnedTensor, np.ndarray] = field(default_factory=dict)
    tape: list[tuple[LocalOp, LoopIndices]] = field(default_factory=list)
    gradients: dict[TurnedTensor, np.ndarray] = field(default_factory=dict)
    resharded: dict[tuple[int, LoopIndices], np.ndarray] = field(default_factory=dict)
    arriving: dict[tuple[int, LoopIndices], np.ndarray] = field(default_factory=dict)
    returned: dict[tuple[int, LoopIndices], np.ndarray] = field(default_factory=dict)

    @cached_property
    def devices(self) -> AllDevices:
        return AllDevices(mesh=self.program.mesh)

    def whole(self, parts: np.ndarray, tensor: str, gradient: bool) -> np.ndarray:
        r = self.program.result(tensor)
        layout = r.gradient if gradient else r.layout.summed
        return whole_of(parts, r.shape, layout, self.program.mesh)

    # Which iteration of which loop.

    def _end(self, op: LocalOp) -> LocalOp:
        """The op at the end of a loop's body that reads a carry's next value."""
        return self.program.takers[op.op.eqn][0]

    def _length(self, op: LocalOp) -> int:
        """Number of iterations of the innermost loop around an op."""
        outer = [o for o in self.program.ops if o.op.loops == op.op.loops[:-1]]
        times = concrete_size(op.op.times, op.op.name)
        return times // (concrete_size(outer[0].op.times, op.op.name) if outer else 1)

    def _row(self, op: LocalOp, iteration: int) -> int:
        """The row of a stack that belongs to an iteration of the loop; also the iteration that belongs to a row."""
        reverse = isinstance(op.op.parameters, StackRow) and op.op.parameters.reverse
        return self._length(op) - 1 - iteration if reverse else iteration

    def key(self, tensor: str, indices: LoopIndices, loops: Sequence[Scope]) -> TurnedTensor:
        """The key of the value of a tensor that a reader gets in these iterations of these loops."""
        op = self.program.maker[tensor]
        if op.op.kind == "carry":
            inner = self._end(op).op.loops
            if tuple(loops[: len(inner)]) == inner:
                return tensor, indices[: len(inner)]
            return tensor, (*indices[: len(inner) - 1], self._length(self._end(op)))
        made = op.op.loops[:-1] if op.op.name == "stack" else op.op.loops
        if any(s.kind == "program" for s in op.op.loops) or tuple(loops[: len(made)]) != made:
            raise refused(op.op, "the graph does not determine whether it runs")
        return tensor, indices[: len(made)]

    # Forward.

    def value(self, tensor: str, indices: LoopIndices, loops: Sequence[Scope]) -> np.ndarray:
        """A tensor in the layout in which it is made, for a reader in these iterations of these loops."""
        key = self.key(tensor, indices, loops)
        if key not in self.values:
            op = self.program.maker[tensor]
            self.values[key] = self._made(op, key)
            self.tape.append((op, key[1]))
        return self.values[key]

    def read(self, o: LocalOperand, indices: LoopIndices, loops: Sequence[Scope]) -> np.ndarray:
        """An operand in the layout in which its op reads it."""
        if o.constant:
            return self._parts(o.tensor, o.layout)
        if o.transfer is None:
            return self.value(o.tensor, indices, loops)
        at = self.key(self.program.transfers[o.transfer].tensor, indices, loops)[1]
        if (o.transfer, at) not in self.resharded:
            beside = self._sent_beside(o.transfer)
            given = {k: self.value(self.program.transfers[k].tensor, indices, loops) for k in beside}
            self.resharded |= {(k, at): x for k, x in self._sent("there", given).items()}
        return self.resharded[o.transfer, at]

    def _sent_beside(self, transfer: int) -> list[int]:
        """The transfers that are sent in messages together with this one, itself included."""
        return next((ks for ks in self._carried.values() if transfer in ks), [transfer])

    @cached_property
    def _carried(self) -> Mapping[tuple[Scope, ...], list[int]]:
        """The transfers of parameters that messages carry, by the loops in which their tensors are made."""
        program, found = self.program, dict[tuple[Scope, ...], list[int]]()
        for k in {p.transfer for m in program.messages for p in m.chunks}:
            t = program.transfers[k]
            if t.src in program.parameters:
                found.setdefault(program.maker[t.tensor].op.loops, []).append(k)
        return found

    def _sent(self, way: TransferDirection, given: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The values of transfers after their reshard steps, in messages if there are any. given: before the steps."""
        sending = Sending(
            program=self.program,
            arrays=self.devices,
            way=way,
            values={(k, None): x for k, x in given.items()},
            messages=messages_among(self.program, way, given),
        )
        return {k: sending.finished((k, None)) for k in given}

    def _source(self, op: LocalOp, indices: LoopIndices) -> tuple[LocalOperand, LoopIndices, Sequence[Scope]]:
        """The source of a carry's value in an iteration: (operand, in which iterations, of which loops)."""
        if indices[-1] == 0:
            return op.operands[0], indices[:-1], op.op.loops
        end = self._end(op)
        return end.operands[0], (*indices[:-1], indices[-1] - 1), end.op.loops

    def _taken(self, op: LocalOp, indices: LoopIndices) -> tuple[LocalOperand, LoopIndices, Sequence[Scope]]:
        """The result of the branch that a conditional takes: (operand, in which iterations, of which loops)."""
        *branches, index = op.operands
        chosen = int(self.read(index, indices, op.op.loops).flat[0])
        o = branches[min(max(chosen, 0), len(branches) - 1)]
        return o, (*indices, 0), self.program.maker[o.tensor].op.loops

    def _parts(self, tensor: str, layout: AxisLayout) -> np.ndarray:
        """Each device's part of a value that is given, or that the graph holds."""
        whole = self.held(tensor)
        return self.devices.each(lambda at: part_of(whole, layout, at, self.program.mesh))

    def held(self, tensor: str) -> np.ndarray:
        """What is given, a constant of one number, or an iota."""
        if (given := self.given.get(tensor)) is not None:
            return given
        t, node = self.graph.tensors[tensor], self.graph.producer.get(tensor)
        shape = tuple(concrete_size(s, tensor) for s in t.shape)
        if t.number is not None:
            return np.full(shape, t.number)
        p = node.write_of(tensor)[0].parameters if node is not None else None
        if not isinstance(p, Iota):
            raise PaseError(f"the value of '{tensor}' is not in the graph", fix="pass it in `given`")
        along = np.arange(shape[p.axis]) * p.step + p.start
        return np.broadcast_to(along.reshape([-1 if i == p.axis else 1 for i in range(len(shape))]), shape)

    def _made(self, op: LocalOp, key: TurnedTensor) -> np.ndarray:
        indices, loops, lead = key[1], op.op.loops, len(self.program.mesh.sizes)
        if op.op.kind in LEAF or op.op.kind == "generate":
            return self._parts(key[0], self.program.result(key[0]).layout)
        if op.op.kind == "carry":
            return self.read(*self._source(op, indices))
        if op.op.name == "cond":
            return self.read(*self._taken(op, indices))
        if op.op.name == "stack":
            turns = (self._row(op, k) for k in range(self._length(op)))
            return np.stack([self.read(op.operands[0], (*indices, k), loops) for k in turns], lead)
        read = [self.read(o, indices, loops) for o in op.operands]
        if op.op.function.name == "unstack":
            return read[0].take(self._row(op, indices[-1]), lead)
        if (rule := self._rule(op)) is not None:
            if op.sent:  # such as a ring of keys and values: no part can be computed by itself
                kinds = ", ".join(dict.fromkeys(c.kind for c in op.sent))
                what = (
                    f"it sends data while it computes ({kinds}), so its rule cannot be applied part by part"
                )
                raise refused(op.op, what)
            return self.devices.each(lambda at: rule.made([x[at] for x in read]))
        nest, (r,) = self._nest(op, False), op.results
        read[0] = self._widened(nest, op.operands[0], read[0])
        made = self.devices.each(
            lambda at: nest.made([x[at] for x in read], self._where(nest, op, at), self._first(op, at))
        )
        return self.devices.all_reduce(made, r.summed, nest.joins) if r.summed else made

    def _rule(self, op: LocalOp) -> OpRule | None:
        given = self.rules.get(op.op.eqn)
        if given is not None or not op.operands:
            return given
        return rule_of(op.op, op.operands[0].shape, op.results[0].shape)

    def _nest(self, op: LocalOp, back: bool) -> LocalNest:
        dtype = self.graph.tensors[op.op.writes[0].tensor].dtype
        return LocalNest.of(op, self.graph.node[op.node], self.program.mesh.sizes, dtype, back)

    def _where(self, nest: LocalNest, op: LocalOp, at: tuple[int, ...]) -> np.ndarray | None:
        """For a lookup or an update by index, the index of each of the nest's points on this device; otherwise None."""
        if nest.looked is None:
            return None
        table: tuple[LocalOperand | LocalResult, Access] = (op.operands[0], op.op.reads[0])
        space = self.graph.node[op.node].space
        sizes = {d: concrete_size(space[d].size, op.node) for d in op.op.dims}
        every = coordinates(table[0].shape, table[1], nest.looked, sizes)
        return nest.spread(part_of(every, table[0].layout, at, self.program.mesh), table[1])

    def _first(self, op: LocalOp, at: tuple[int, ...]) -> bool:
        """Whether this device contributes the array that partial updates are added to."""
        (r,), mesh = op.results, self.program.mesh
        return not any(at[mesh.names.index(axis)] for axis in r.partial_over(mesh))

    # Windows that cross the border of a shard.

    def _borders(self, nest: LocalNest, o: LocalOperand) -> Mapping[int, tuple[int, int]]:
        """Dim under a window -> how many rows before and after a shard the windows read. PaseError if a window reads a
        neighbour's rows that the program does not send."""
        for dim, s in nest.sliding.items():
            split = any(self.program.mesh.sizes[axis] > 1 for _, axis in o.layout.along(dim))
            if split and max(s.before, s.behind) > (s.rows if o.halo else 0):
                raise refused(nest.op, "its window reads rows that no device sends")
        return {dim: (s.before, s.behind) for dim, s in nest.sliding.items()}

    def _widened(self, nest: LocalNest, o: LocalOperand, parts: np.ndarray) -> np.ndarray:
        """Each shard with the rows before and after it that its windows read."""
        return widened(parts, self._borders(nest, o), o.layout, nest.neutral, self.devices)

    def _narrowed(self, nest: LocalNest, o: LocalOperand, parts: np.ndarray) -> np.ndarray:
        """The transpose: gradients of rows return to the devices that the rows came from."""
        return widened_back(parts, self._borders(nest, o), o.layout, self.devices)

    # Backward.

    def backward(self, op: LocalOp, indices: LoopIndices) -> None:
        """Propagate the gradient of an op's results in these iterations to its operands."""
        for r in op.results:
            for k, t in enumerate(self.program.transfers):
                if t.tensor == r.tensor and (k, indices) in self.arriving:
                    _add(self.gradients, (r.tensor, indices), self._returned(k, indices))
        if op.op.kind in LEAF or (op.results[0].tensor, indices) not in self.gradients:
            return
        g, lead = self.gradients[op.results[0].tensor, indices], len(self.program.mesh.sizes)
        if op.op.kind == "carry":
            o, before, loops = self._source(op, indices)
            self._hand(o, g, before, loops)
        elif op.op.name == "cond":
            o, inside, loops = self._taken(op, indices)
            self._hand(o, g, inside, loops)
        elif op.op.name == "stack":
            for k in range(self._length(op)):
                self._hand(op.operands[0], g.take(self._row(op, k), lead), (*indices, k), op.op.loops)
        elif op.op.function.name == "unstack":
            (o,) = op.operands
            layout = o.gradient if o.transfer is not None else self.program.result(o.tensor).gradient
            out = np.zeros((*self.program.mesh.sizes, *layout.local_shape(o.shape, self.program.mesh)))
            np.moveaxis(out, lead, 0)[self._row(op, indices[-1])] = g
            self._hand(o, out, indices, op.op.loops)
        else:
            self._pulled(op, g, indices)

    def _returned(self, transfer: int, indices: LoopIndices) -> np.ndarray:
        """The gradient of a transfer where its tensor is made."""
        if (transfer, indices) not in self.returned:
            beside = [k for k in self._sent_beside(transfer) if (k, indices) in self.arriving]
            sent = self._sent("back", {k: self.arriving[k, indices] for k in beside})
            self.returned |= {(k, indices): x for k, x in sent.items()}
        return self.returned[transfer, indices]

    def _at(self, op: LocalOp, indices: LoopIndices) -> list[np.ndarray]:
        """The operands at which the derivative is taken: as they are read, or in the layout in which the gradient of a
        parameter's view is kept (``GradientCarrier``)."""
        read = [self.read(o, indices, op.op.loops) for o in op.operands]
        r, mesh, out = op.results[0], self.program.mesh, []
        if r.layout.local_shape(r.shape, mesh) == r.gradient.local_shape(r.shape, mesh):
            return read
        for o, x in zip(op.operands, read, strict=True):
            kept = self.program.result(o.tensor)
            steps = between(kept.layout, kept.gradient, mesh)
            out.append(resharded(x, steps, kept.shape, "sum", self.devices))
        return out

    def _by_rule(self, op: LocalOp, rule: OpRule, g: np.ndarray, indices: LoopIndices) -> None:
        read = self._at(op, indices)
        found = [rule.pulled([x[at] for x in read], g[at]) for at in places(self.program.mesh)]
        for o, parts in zip(op.operands, zip(*found, strict=True), strict=True):
            self._hand(o, self.devices.together(parts), indices, op.op.loops)

    def _pulled(self, op: LocalOp, g: np.ndarray, indices: LoopIndices) -> None:
        if (rule := self._rule(op)) is not None:
            return self._by_rule(op, rule, g, indices)
        nest, (r,), read = self._nest(op, True), op.results, self._at(op, indices)
        read[0] = self._widened(nest, op.operands[0], read[0])
        shares = (
            self._shares(nest, op, read[0], self.values[r.tensor, indices]) if nest.combine != "sum" else None
        )

        def pulled(i: int, at: tuple[int, ...]) -> np.ndarray:
            share = None if shares is None else shares[at]
            where, first = self._where(nest, op, at), self._first(op, at)
            return nest.pulled(i, g[at], [x[at] for x in read], share, where, first)

        for i, o in enumerate(op.operands):
            if op.op.differentiable and self.graph.tensors[o.tensor].needs_grad:
                found = self.devices.each(partial(pulled, i))
                self._hand(o, self._narrowed(nest, o, found) if i == 0 else found, indices, op.op.loops)

    def _shares(self, nest: LocalNest, op: LocalOp, x: np.ndarray, top: np.ndarray) -> np.ndarray:
        """For a maximum or minimum, each point's share of the gradient. All points that attain it share equally."""
        (r,), write, devices = op.results, op.op.writes[0], self.devices
        over = r.partial_over(self.program.mesh)
        top = top if r.summed else devices.all_reduce(top, over, nest.joins)
        reached = devices.each(lambda at: nest.reached(x[at], top[at]))
        counts = devices.each(lambda at: nest.collected(reached[at], write, "sum"))
        total = devices.all_reduce(counts, over)
        return devices.each(lambda at: reached[at] / nest.spread(total[at], write))

    def _hand(self, o: LocalOperand, g: np.ndarray, indices: LoopIndices, loops: Sequence[Scope]) -> None:
        """Add the gradient of an operand to its transfer, or to the tensor itself if the same node makes it."""
        if not self.graph.tensors[o.tensor].needs_grad:
            return
        key = self.key(o.tensor, indices, loops)
        if o.transfer is not None:
            _add(self.arriving, (o.transfer, key[1]), g)
            return
        _add(self.gradients, key, self.devices.all_reduce(g, o.summed))


def _add(into: dict[PartsKey, np.ndarray], key: PartsKey, parts: np.ndarray) -> None:
    into[key] = into[key] + parts if key in into else parts
