"""A local program: for each op, what one device holds and computes; for each edge, the reshard steps forward and back.

Gradients follow one rule. An operand's gradient is partial over the axes that split iteration dims of the op which the
operand does not walk. It is replicated over the axes that split nothing of the op. The gradient of a partial sum is
the same on all its summands. So a backward pass needs only plain differentiation of the local computation and the
reshard steps listed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from pase.ir import Op, Place
from pase.ir.blocks import Hoisted
from pase.machine import CollectiveKind, Mesh
from pase.schedule.plan import Update
from pase.tables.axis_layout import AxisLayout
from pase.tables.work import Phase

__all__ = [
    "Combine",
    "Extents",
    "GradientCarrier",
    "LocalMessage",
    "LocalOp",
    "LocalOperand",
    "LocalProgram",
    "LocalReshardStep",
    "LocalResult",
    "LocalTensor",
    "LocalTransfer",
    "MessageChunk",
    "NodeCollective",
    "TransferDirection",
    "TransferPart",
]

Extents: TypeAlias = tuple[int, ...]
"""A shape in numbers."""

Combine = Literal["sum", "max", "min", "other"]
"""How partial values are reduced. other: no collective can reduce them."""

GradientCarrier = Literal["value", "zeros"]
"""The array at which a device takes the gradient of a parameter whose gradient is split further than itself (ZeRO-2).
value: the device's part of the parameter, a slice of what the device holds. zeros: zeros of the same shape, because
that part is on other devices. Zeros are correct only if the ops that follow are linear: the derivative of any other op
depends on the operand's value (``pase.ir.recompute.linear``)."""

LocalReshardKind = Literal[CollectiveKind, "slice", "own"]


@dataclass(frozen=True, kw_only=True)
class LocalReshardStep:
    """One collective, or a free step: a slice, or *own*, which makes a replicated value partial (the first device along
    each axis keeps the value, the others take zero).

    axes: the mesh axes that it runs over, in the order of the mesh. nbytes: size of the larger local buffer; 0 for a
    free step.
    """

    kind: LocalReshardKind
    axes: tuple[str, ...]
    before: AxisLayout
    after: AxisLayout
    nbytes: int = 0

    @property
    def free(self) -> bool:
        """Whether it sends nothing."""
        return self.kind in ("slice", "own")


@dataclass(frozen=True, kw_only=True)
class LocalTransfer:
    """The reshard steps of a tensor from the node that makes it to the ops of another node that read it in the same
    layout, and the reshard steps of its gradient back.

    backward: None if no gradient comes back. combine: how partial values of the tensor are reduced. phase: the phase in
    which it is read; ops of a user's derivative rule read in the backward phase. runs: how often a training step runs
    the forward and the backward steps. hoisted: the tensor is a parameter, and parameters are gathered outside of the
    loop over micro-batches (``LocalProgram.hoisted``).
    """

    tensor: str
    src: str
    dst: str
    combine: Combine
    forward: tuple[LocalReshardStep, ...]
    backward: tuple[LocalReshardStep, ...] | None
    phase: Phase
    runs: tuple[float, float]
    hoisted: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """A tensor as one device holds it. shape: of the whole tensor."""

    tensor: str
    shape: Extents
    layout: AxisLayout


@dataclass(frozen=True, kw_only=True)
class LocalOperand(LocalTensor):
    """A tensor that an op reads.

    transfer: the number of the transfer that brings the tensor; None if an op of the same node makes it, or if it is
    constant. gradient: the layout in which its gradient leaves the op. constant: the value depends on no data, so each
    device makes its own shard. summed: the axes over which its gradient is all-reduced immediately. halo: the axes
    along which neighbours exchange the rows that a window needs.
    """

    gradient: AxisLayout
    transfer: int | None = None
    constant: bool = False
    summed: tuple[str, ...] = ()
    halo: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalResult(LocalTensor):
    """A tensor that an op makes.

    summed: the axes over which it is all-reduced immediately, because its own node reads it. layout: the layout after
    that sum. gradient: the layout in which its gradient arrives. gradient_carrier: what the gradient of a parameter is
    taken at if it has another layout than the parameter.
    """

    gradient: AxisLayout
    summed: tuple[str, ...] = ()
    gradient_carrier: GradientCarrier = "value"

    def partial_over(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which its op makes partial values: they are reduced immediately, or by the edge to a reader."""
        return (*self.summed, *self.layout.partial_axes(mesh))


@dataclass(frozen=True, kw_only=True)
class NodeCollective:
    """A collective inside a node. It belongs to one of the node's ops; the gather of an updated parameter to none."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    nbytes: int
    tensor: str
    phase: Phase
    times: int


@dataclass(frozen=True, kw_only=True)
class LocalOp:
    """One op on one device.

    combine: how partial results of the op are reduced. sent: the collectives inside the op. They follow from ``summed``
    and ``halo`` of its operands and results, or from its kind (a ring).
    """

    node: str
    op: Op
    operands: tuple[LocalOperand, ...]
    results: tuple[LocalResult, ...]
    combine: Combine
    sent: tuple[NodeCollective, ...] = ()


TransferDirection = Literal["there", "back"]
"""there: a transfer's forward reshard steps; back: those of its gradient."""

TransferPart: TypeAlias = "tuple[int, int | None]"
"""What messages carry: the number of a transfer, and the iteration of the loops around its readers."""


@dataclass(frozen=True, kw_only=True)
class MessageChunk:
    """Bytes [begin, begin + nbytes) of what a reshard step sends.

    transfer: the number of the transfer. stage: which of the transfer's steps that send anything, counted from 0.
    iteration: if gradients wait for a later training step, the iteration of the loops around the readers (one count for
    all nested loops); None for the iteration that sends the chunk, or if there is no loop.
    """

    transfer: int
    stage: int
    begin: int
    nbytes: int
    iteration: int | None = None

    @property
    def part(self) -> TransferPart:
        """The part that it is a chunk of."""
        return self.transfer, self.iteration


@dataclass(frozen=True, kw_only=True)
class LocalMessage:
    """Chunks that are sent as one collective, all equally often. A link sends the messages of a body that run equally
    often one after another, in the order of the program.

    way: the direction of all its chunks. after: the node that must have begun before the message starts; "" for none.
    update: the number of the update (``LocalProgram.updates``) whose gradients it carries. late: how many training
    steps after the last of these gradients was made the message is sent; at the latest, it is sent in the step after
    the one at whose end the update is due.
    """

    way: TransferDirection
    link: str
    chunks: tuple[MessageChunk, ...]
    after: str = ""
    update: int = 0
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """What each device of the mesh does in a training step. Ops are in the order of the graph.

    originals: copy -> the tensor that it is a copy of. hoisted: which reshard steps of parameters run outside of the
    loop over micro-batches. messages: how transfers of parameters are joined, cut and ordered. A transfer that no
    message carries is sent by itself, where it is read.

    period, updates: which gradients are applied when, in training steps of a period that repeats. If a gradient is sent
    or applied later than in its own step (``delayed``), the gradients that messages carry wait on their devices,
    unreduced. All messages are then sent outside of loops: those of gradients in later steps, those of parameters at
    the beginning of each step.
    """

    name: str
    mesh: Mesh
    ops: tuple[LocalOp, ...]
    transfers: tuple[LocalTransfer, ...]
    originals: Mapping[str, str] = field(default_factory=dict)
    hoisted: Hoisted = "none"
    messages: tuple[LocalMessage, ...] = ()
    period: int = 1
    updates: tuple[Update, ...] = (Update(),)

    @property
    def delayed(self) -> bool:
        """Whether any gradient is sent or applied in a later step than its own, or together with another step's."""
        late = any(m.late for m in self.messages)
        return late or self.period > 1 or any(u.staleness for u in self.updates)

    def behind(self, update: int) -> bool:
        """Whether some of an update's messages are sent in the step after the one at whose end the update is due. The
        update is then applied in that later step, before its forward pass."""
        u = self.updates[update]
        return any(m.update == update and m.late > u.at - u.last for m in self.messages)

    def reshard_steps(self, transfer: int, way: TransferDirection) -> tuple[LocalReshardStep, ...]:
        """A transfer's forward reshard steps, or those of its gradient."""
        t = self.transfers[transfer]
        return t.forward if way == "there" else t.backward or ()

    def whole_shape(self, transfer: int) -> Extents:
        """The shape of a transfer's whole tensor."""
        return self.result(self.transfers[transfer].tensor).shape

    def stages(self, transfer: int, way: TransferDirection) -> tuple[LocalReshardStep, ...]:
        """A transfer's reshard steps that send anything, as a plan lists them."""
        return tuple(m for m in self.reshard_steps(transfer, way) if m.nbytes and not m.free)

    def runs(self, transfer: int, way: TransferDirection) -> float:
        """How often a training step runs a transfer's forward reshard steps, or those of its gradient."""
        return self.transfers[transfer].runs[way == "back"]

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The nodes of parameters. Views and casts of a parameter belong to its node."""
        return frozenset(op.node for op in self.ops if op.op.kind == "parameter")

    @cached_property
    def begins(self) -> Mapping[str, int]:
        """Node -> the number of its first op."""
        return {op.node: i for i, op in reversed(list(enumerate(self.ops)))}

    def can_wait(self, i: int, node: str) -> bool:
        """Whether a message can wait until a node begins: the node runs equally often, and begins before all readers of
        what this message or a later one on its link brings."""
        m = self.messages[i]
        later = [x for x in self.messages[i:] if (x.way, x.link) == (m.way, m.link)]
        readers = [op for x in later for p in x.chunks for op in self.users(p.transfer)]
        begun = self.begins.get(node)
        return begun is not None and all(
            begun < self.begins[op.node] and op.op.loops == self.ops[begun].op.loops for op in readers
        )

    def before(self, transfer: int) -> int | None:
        """The transfer that brings the copy which a transfer sends; None if it sends another tensor."""
        tensor = self.transfers[transfer].tensor
        return self.maker[tensor].operands[0].transfer if tensor in self.originals else None

    def users(self, transfer: int) -> Iterator[LocalOp]:
        """The ops that read what a transfer brings, or a copy of it."""
        for op in self.readers.get(transfer, ()):
            copies = {r.tensor for r in op.results} & set(self.originals)
            if not copies:
                yield op
                continue
            for k, t in enumerate(self.transfers):
                if t.tensor in copies:
                    yield from self.users(k)

    @cached_property
    def readers(self) -> Mapping[int, tuple[LocalOp, ...]]:
        """Number of a transfer -> the ops that read what it brings."""
        found: dict[int, list[LocalOp]] = {}
        for op in self.ops:
            for k in dict.fromkeys(o.transfer for o in op.operands if o.transfer is not None):
                found.setdefault(k, []).append(op)
        return {k: tuple(ops) for k, ops in found.items()}

    @cached_property
    def uses(self) -> Mapping[str, tuple[tuple[LocalOp, LocalOperand], ...]]:
        """Tensor of the traced program -> the ops that read it or a copy of it, each with the operand."""
        found: dict[str, list[tuple[LocalOp, LocalOperand]]] = {}
        for op in self.ops:
            for o in op.operands:
                found.setdefault(self.original(o.tensor), []).append((op, o))
        return {t: tuple(uses) for t, uses in found.items()}

    @cached_property
    def maker(self) -> Mapping[str, LocalOp]:
        """Tensor -> the op that makes it."""
        return {r.tensor: op for op in self.ops for r in op.results}

    @cached_property
    def at(self) -> Mapping[Place, tuple[LocalOp, ...]]:
        """Place -> its ops. All ops of a call that is kept whole have the place of the call."""
        found: dict[Place, list[LocalOp]] = {}
        for op in self.ops:
            found.setdefault(op.op.eqn, []).append(op)
        return {at: tuple(ops) for at, ops in found.items()}

    @cached_property
    def takers(self) -> Mapping[Place, tuple[LocalOp, ...]]:
        """Place -> its ops without a result. They mark the values that leave a loop's body, or the model."""
        found: dict[Place, list[LocalOp]] = {}
        for op in self.ops:
            if not op.results:
                found.setdefault(op.op.eqn, []).append(op)
        return {at: tuple(ops) for at, ops in found.items()}

    @cached_property
    def outputs(self) -> Mapping[str, LocalOp]:
        """Tensor of the traced program -> the op that returns it from the model."""
        return {self.original(op.operands[0].tensor): op for op in self.ops if op.op.kind == "output"}

    def result(self, tensor: str) -> LocalResult:
        """The tensor in the layout in which its op makes it."""
        return next(r for r in self.maker[tensor].results if r.tensor == tensor)

    def original(self, tensor: str) -> str:
        """The tensor of the traced program."""
        return self.originals.get(tensor, tensor)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Number of devices along these axes together."""
        return self.mesh.ways(sum(1 << self.mesh.names.index(a) for a in axes))
