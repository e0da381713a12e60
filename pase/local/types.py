"""A local program: for each op, what one device holds and computes; for each edge, the moves forward and backward.

Layouts are written per mesh axis, as in ``pase.plan.accesses``: which digit of which tensor dim the axis selects. If a
value is *partial* over an axis, the devices along it hold summands (or, for a maximum, candidates).

Gradients follow one rule. An operand's gradient is partial over the axes that split iteration dims of the op which the
operand does not walk. It is replicated over the axes that split nothing of the op. The gradient of a partial sum is
the same on all its summands. So a backward pass needs only plain differentiation of the local computation and the
moves listed here.
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
from pase.tables.work import Phase

__all__ = [
    "AxisState",
    "Combine",
    "Extents",
    "GradientCarrier",
    "Layout",
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
    "local_shape",
]

AxisState: TypeAlias = "tuple[int, int] | Literal['partial'] | None"
"""What a mesh axis selects of a tensor: (dim, blocks that this and the more major axes cut it in); its devices hold
summands; or (None) all hold the same."""
Layout: TypeAlias = tuple[AxisState, ...]
"""A state for each axis of the mesh."""

Extents: TypeAlias = tuple[int, ...]
"""A shape in numbers."""

Combine = Literal["sum", "max", "min", "other"]
"""How partial values become one. other: by no collective that there is."""

GradientCarrier = Literal["value", "zeros"]
"""What a parameter's gradient is taken at on a device, where the gradient is split further than the parameter (ZeRO-2):
the device's part of the parameter, which is a slice of what it holds; or zeros of the same shape, if that part lies on
other devices. Zeros are right only in front of ops that are linear: the derivative of any other op depends on the
operand's value (``pase.ir.recompute.linear``)."""

LocalReshardKind = Literal[CollectiveKind, "slice", "own"]


@dataclass(frozen=True, kw_only=True)
class LocalReshardStep:
    """One collective, or a free step: a slice, or *own*, which makes a replicated value partial (the first device along
    each axis keeps it, the others take zero).

    axes: the mesh axes that it runs over, in the order of the mesh. nbytes: the larger local buffer; 0 for a free step.
    """

    kind: LocalReshardKind
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    nbytes: int = 0

    @property
    def free(self) -> bool:
        """Does it send nothing?"""
        return self.kind in ("slice", "own")


@dataclass(frozen=True, kw_only=True)
class LocalTransfer:
    """The moves of a tensor from the node that makes it to the ops of another node that read it in the same layout, and
    the moves of its gradient back.

    backward: None where no gradient comes back. combine: how its partial values are reduced. phase: the phase in which
    it is read; ops of a user's derivative rule read it in the backward phase. runs: how often a step runs the forward
    and the backward moves. hoisted: it carries a parameter, in a step that gathers these once
    (``LocalProgram.hoisted``).
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
    """A tensor as one device holds it: shape is the whole tensor's."""

    tensor: str
    shape: Extents
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class LocalOperand(LocalTensor):
    """What an op reads. transfer: the number of the transfer that brings it; None: an op of the same node makes it, or
    it is constant.

    gradient: the layout in which its gradient leaves the op. constant: known without data, so each device makes its
    shard. summed: the axes over which its gradient is all-reduced immediately. halo: the axes along which neighbours
    exchange the rows that a window needs.
    """

    gradient: Layout
    transfer: int | None = None
    constant: bool = False
    summed: tuple[str, ...] = ()
    halo: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalResult(LocalTensor):
    """What an op makes. summed: the axes over which it is all-reduced immediately, because its own node reads it.
    layout: after that sum. gradient: the layout in which its gradient arrives. gradient_carrier: of a parameter whose
    gradient has another layout."""

    gradient: Layout
    summed: tuple[str, ...] = ()
    gradient_carrier: GradientCarrier = "value"


@dataclass(frozen=True, kw_only=True)
class NodeCollective:
    """A collective inside a node: it belongs to one of its ops, or (the gather of an updated parameter) to none."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    nbytes: int
    tensor: str
    phase: Phase
    times: int


@dataclass(frozen=True, kw_only=True)
class LocalOp:
    """One op on one device. sent: the collectives inside it, which follow from ``summed`` and ``halo`` of its operands
    and results, or from its kind (a ring). combine: how its partial results are reduced."""

    node: str
    op: Op
    operands: tuple[LocalOperand, ...]
    results: tuple[LocalResult, ...]
    combine: Combine
    sent: tuple[NodeCollective, ...] = ()


TransferDirection = Literal["there", "back"]
"""A transfer's moves forward, or those of the gradient."""

TransferPart: TypeAlias = "tuple[int, int | None]"
"""What messages carry: the number of a transfer, and of which turn of the loops around its readers it is."""


@dataclass(frozen=True, kw_only=True)
class MessageChunk:
    """Bytes [begin, begin + nbytes) of what a move sends. transfer: its number. stage: which of the moves that send
    anything, from 0. iteration: of which turn of the loops around its readers, counted through, where gradients wait
    for a later step; None: of the turn that sends it, or there is no loop."""

    transfer: int
    stage: int
    begin: int
    nbytes: int
    iteration: int | None = None

    @property
    def part(self) -> TransferPart:
        """What it is a piece of."""
        return self.transfer, self.iteration


@dataclass(frozen=True, kw_only=True)
class LocalMessage:
    """Pieces that are sent as one collective, all equally often. A link sends the messages of a body that run equally
    often one after another, in the order of the program.

    way: of all its pieces. after: the node that must have begun before the message starts; "": none. update: whose
    gradients it carries; late: how many iterations after the last of them was made (``LocalProgram.updates``), at most
    in the one after that in which they are applied.
    """

    way: TransferDirection
    link: str
    chunks: tuple[MessageChunk, ...]
    after: str = ""
    update: int = 0
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """What each device of the mesh does in a step; ops are in the order of the graph.

    originals: copy -> the tensor that it is a copy of. hoisted: which moves of parameters run once a step. messages:
    how transfers of parameters are joined, cut and ordered. A transfer that is in none is sent by itself, where it is
    read.

    updates: which gradients are applied when, in iterations of a period that repeats. Unless each step sends and
    applies its own (``delayed``), the gradients in messages wait on their devices, unsummed, and messages are sent in
    later steps, outside of all loops; so are those of parameters, at the begin of each step.
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
        """Whether some of an update's messages are sent in the step after the one that it follows. It is then applied
        there, before that step's forward."""
        u = self.updates[update]
        return any(m.update == update and m.late > u.at - u.last for m in self.messages)

    def reshard_steps(self, transfer: int, way: TransferDirection) -> tuple[LocalReshardStep, ...]:
        """A transfer's moves there, or those of its gradient back."""
        t = self.transfers[transfer]
        return t.forward if way == "there" else t.backward or ()

    def stages(self, transfer: int, way: TransferDirection) -> tuple[LocalReshardStep, ...]:
        """The moves that send anything, as a plan lists them."""
        return tuple(m for m in self.reshard_steps(transfer, way) if m.nbytes and not m.free)

    def runs(self, transfer: int, way: TransferDirection) -> float:
        """How often a step runs a transfer's moves there, or back."""
        return self.transfers[transfer].runs[way == "back"]

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The nodes of parameters, with their views and casts."""
        return frozenset(op.node for op in self.ops if op.op.kind == "parameter")

    @cached_property
    def begins(self) -> Mapping[str, int]:
        """Node -> the number of its first op."""
        return {op.node: i for i, op in reversed(list(enumerate(self.ops)))}

    def can_wait(self, i: int, node: str) -> bool:
        """Whether a message can wait until a node begins: the node runs as often, and begins before whatever reads what
        the message or a later one of its link brings."""
        m = self.messages[i]
        later = [x for x in self.messages[i:] if (x.way, x.link) == (m.way, m.link)]
        readers = [op for x in later for p in x.chunks for op in self.users(p.transfer)]
        begun = self.begins.get(node)
        return begun is not None and all(
            begun < self.begins[op.node] and op.op.loops == self.ops[begun].op.loops for op in readers
        )

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
        """Place -> its ops that make nothing: they mark what leaves a loop's body, or the model."""
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


def digits_of(layout: Layout, dim: int) -> Iterator[tuple[int, int]]:
    """(axis, blocks) of the axes that split a tensor dim."""
    for axis, state in enumerate(layout):
        if isinstance(state, tuple) and state[0] == dim:
            yield axis, state[1]


def local_shape(shape: Extents, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one device's shard.

    >>> local_shape((8, 6), ((0, 4), None, (1, 6)), Mesh(names=("a", "b", "c"), sizes=(4, 2, 3)))
    (2, 2)
    """
    out = list(shape)
    for axis, state in enumerate(layout):
        if isinstance(state, tuple):
            out[state[0]] //= mesh.sizes[axis]
    return tuple(out)
