"""The events of a run: a Timeline stores them as numpy columns, and an Event is the readable form of one.

Times are integer nanoseconds on the clock of the event's rank. ``Timeline.clocks`` maps them to a common clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

__all__ = [
    "COLLECTIVE",
    "COLUMNS",
    "CPU",
    "GPU_KINDS",
    "KINDS",
    "OPERATIONS",
    "Clock",
    "CompiledOp",
    "Event",
    "Group",
    "Lane",
    "Mark",
    "Problem",
    "Shapes",
    "Timeline",
    "from_events",
    "on_stream",
]

KINDS = ("host", "runtime", "kernel", "memcpy", "memset", "collective", "annotation", "memory")
"""The kinds of events. host: an op on a CPU thread. runtime: a driver call (launch, sync). The next four run on a
stream."""

COLLECTIVE = KINDS.index("collective")
GPU_KINDS = tuple(KINDS.index(k) for k in ("kernel", "memcpy", "memset", "collective"))
_ON_DEVICE = np.isin(np.arange(len(KINDS)), GPU_KINDS)


def on_stream(kind: np.ndarray) -> np.ndarray:
    """Returns a mask of the kinds whose ops run on a stream."""
    out: np.ndarray = _ON_DEVICE[kind]
    return out


OPERATIONS = (
    "",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "permute",
    "broadcast",
    "reduce",
    "send_recv",
    "barrier",
)
"""The operations of collectives. The empty name stands for all other events."""

COLUMNS: dict[str, type[np.generic]] = {
    "lane": np.int32,
    "kind": np.uint8,
    "name": np.int32,
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "correlation": np.int64,
    "nbytes": np.int64,
    "operation": np.uint8,
    "group": np.int32,
    "iteration": np.int32,
    "shape": np.int32,
}

BESIDE = " beside "
"""Separates a stream's name from a number in a lane's name: ops that overlap on one stream have separate lanes."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of an op's operands; empty for an operand that is not a tensor."""


@dataclass(frozen=True, kw_only=True)
class CompiledOp:
    """Facts about an op from its compiled program.

    part: the part of the training step to which it belongs, from the framework's name of the source op.
    operands: the shapes of its operands.
    product: the shapes of the two factors and the result, if it is or contains exactly one matrix product; else empty.
    itemsize: bytes per element of its result.
    work: the kind of its work, as ``pase.hlo.work`` says; "" in files of earlier versions.
    flops: 0 if it has no product. nbytes: what it reads and writes at least; −1 if unknown.
    dtype: the element type of a product's first factor, or of the result.
    op_name, source: the framework's name of the op and the user's line; "" if the program has none.
    kernel: the name of the longest kernel that runs it; "" if kernels have the op's own name.
    """

    part: Literal["forward", "backward", "update"]
    operands: Shapes
    product: Shapes = ()
    itemsize: int = 4
    work: str = ""
    flops: int = 0
    nbytes: int = -1
    dtype: str = ""
    op_name: str = ""
    source: str = ""
    kernel: str = ""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A queue that runs one op at a time: a CPU thread or a device stream of one rank."""

    rank: int
    name: str
    device: bool
    """True for a device stream, False for a CPU thread."""

    @property
    def stream(self) -> str:
        """The name of the stream, without the number of the lane.

        Which overlapping ops share a lane differs between iterations and ranks.
        """
        return self.name.partition(BESIDE)[0]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that take part in a collective. ``ranks`` is empty if they are not in the trace."""

    name: str
    ranks: tuple[int, ...] = ()


CPU = "CPU"
"""The name of the device of a compiled program that runs on the host (``Timeline.devices``)."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A rank's clock: global time = local time + offset + drift · (local time − reference).

    uncertainty_ns: one standard error of the offset at the reference time; inf if nothing connects this rank to the
    others.
    """

    rank: int
    offset_ns: float = 0.0
    drift: float = 0.0
    reference_ns: int = 0
    uncertainty_ns: float = 0.0

    def to_global(self, local_ns: np.ndarray) -> np.ndarray:
        """Converts local to global times in ns."""
        return local_ns + self.offset_ns + self.drift * (local_ns - self.reference_ns)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One iteration of one rank: [start_ns, end_ns) on that rank's clock."""

    rank: int
    iteration: int
    start_ns: int
    end_ns: int
    complete: bool = True
    """False if the trace cuts the iteration, so that its length is not a valid measurement."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A fault of a trace: where it is, what it is, and what was done about it.

    is_cut: the file ends early, so that ops are missing from all parts of the run, not only from its end: profilers do
    not write events in the order of time.
    """

    where: str
    what: str
    is_cut: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event. nbytes and correlation are −1 if unknown; iteration is −1 if the event is in no iteration.

    correlation: in a measured timeline, a call and the op that it launched have the same number. In a predicted one, a
    transfer and the work that needed it have the same number.
    """

    rank: int
    lane: str
    device: bool
    kind: str
    name: str
    start_ns: int
    duration_ns: int
    correlation: int = -1
    nbytes: int = -1
    operation: str = ""
    group: str = ""
    iteration: int = -1
    shapes: Shapes | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Events of all ranks as columns (one entry per event, types in COLUMNS), sorted by lane and start."""

    columns: dict[str, np.ndarray]
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    groups: tuple[Group, ...] = ()
    clocks: tuple[Clock, ...] = ()
    marks: tuple[Mark, ...] = ()
    problems: tuple[Problem, ...] = ()
    hosts: dict[int, str] = field(default_factory=dict)
    """The machine of each rank, if known. Ranks on one machine share a clock."""
    dataflow: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Op name → names of the ops whose results it reads, if the source records them (XLA's HLO does)."""
    shapes: tuple[Shapes, ...] = ()
    """The values of the column "shape", which has an index into this tuple; −1 if the shape is unknown."""
    compiled: dict[str, CompiledOp] = field(default_factory=dict)
    """Op name → facts from the compiled program, if the trace contains that program (XLA's HLO)."""
    widths: tuple[tuple[int, ...], ...] = ()
    """Bytes per element of each operand in ``shapes``, 0 if unknown; empty if no width is known."""
    flops: tuple[int, ...] = ()
    """FLOPs of an op with each of ``shapes``, if its arguments state more than the dims do (a convolution's stride); 0
    if they do not; empty if none do."""
    devices: dict[int, str] = field(default_factory=dict)
    """The name of each rank's device, if known ("NVIDIA H100 80GB HBM3")."""

    def __post_init__(self) -> None:
        if set(self.columns) != set(COLUMNS):
            raise ValueError(f"a timeline needs the columns {sorted(COLUMNS)}, got {sorted(self.columns)}")
        if len({len(c) for c in self.columns.values()}) != 1:
            raise ValueError("the columns of a timeline must have one length")

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({lane.rank for lane in self.lanes}))

    @cached_property
    def rank_of(self) -> np.ndarray:
        """The rank of each event, int32."""
        table = np.array([lane.rank for lane in self.lanes], dtype=np.int32)
        return table[self["lane"]] if len(self.lanes) else np.zeros(0, np.int32)

    def named(self, test: Callable[[str], object], events: np.ndarray | None = None) -> np.ndarray:
        """Whether the name of each event passes a test, bool [events]. events: only of these."""
        passes = np.array([bool(test(name)) for name in self.names], dtype=bool)
        return passes[self["name"] if events is None else self["name"][events]]

    @cached_property
    def end_ns(self) -> np.ndarray:
        return self["start_ns"] + self["duration_ns"]

    def clock(self, rank: int) -> Clock:
        return next((c for c in self.clocks if c.rank == rank), Clock(rank=rank))

    def global_start_ns(self) -> np.ndarray:
        """Start of every event on the common clock, float64 [events]."""
        return self.to_global(self["start_ns"])

    def to_global(self, local_ns: np.ndarray) -> np.ndarray:
        """Converts local times of the events, [events], to the common clock; float64."""
        ranks = self.rank_of
        out = local_ns.astype(np.float64)
        for rank in self.ranks:
            here = ranks == rank
            out[here] = self.clock(rank).to_global(local_ns[here])
        return out

    def event(self, i: int) -> Event:
        c = {k: v[i].item() for k, v in self.columns.items()}
        lane = self.lanes[c["lane"]]
        return Event(
            rank=lane.rank,
            lane=lane.name,
            device=lane.device,
            kind=KINDS[c["kind"]],
            name=self.names[c["name"]],
            start_ns=c["start_ns"],
            duration_ns=c["duration_ns"],
            correlation=c["correlation"],
            nbytes=c["nbytes"],
            operation=OPERATIONS[c["operation"]],
            group=self.groups[c["group"]].name if c["group"] >= 0 else "",
            iteration=c["iteration"],
            shapes=self.shapes[c["shape"]] if c["shape"] >= 0 else None,
        )

    def __iter__(self) -> Iterator[Event]:
        return (self.event(i) for i in range(len(self)))

    def select(self, keep: np.ndarray) -> Timeline:
        """Returns the timeline with the selected events only. keep: a mask or indices."""
        return replace(self, columns={k: v[keep] for k, v in self.columns.items()})


def from_events(
    events: Iterable[Event],
    *,
    groups: tuple[Group, ...] = (),
    marks: tuple[Mark, ...] = (),
    clocks: tuple[Clock, ...] = (),
    dataflow: dict[str, tuple[str, ...]] | None = None,
) -> Timeline:
    """Builds a Timeline from single events, for plans, tests and small traces. The readers of traces fill columns
    directly.

    >>> t = from_events([Event(rank=0, lane="s7", device=True, kind="kernel", name="gemm",
    ...                        start_ns=5, duration_ns=10)])
    >>> len(t), t.event(0).name, t.end_ns.tolist()
    (1, 'gemm', [15])
    """
    names: dict[str, int] = {}
    lanes: dict[Lane, int] = {}
    shapes: dict[Shapes, int] = {}
    known = {g.name: i for i, g in enumerate(groups)}
    every = list(groups)
    rows: list[tuple[int, ...]] = []
    for e in events:
        if e.kind not in KINDS or e.operation not in OPERATIONS:
            raise ValueError(f"event '{e.name}': unknown kind '{e.kind}' or operation '{e.operation}'")
        if e.group and e.group not in known:
            known[e.group] = len(every)
            every.append(Group(name=e.group))
        lane = lanes.setdefault(Lane(rank=e.rank, name=e.lane, device=e.device), len(lanes))
        name = names.setdefault(e.name, len(names))
        group = known[e.group] if e.group else -1
        row = (lane, KINDS.index(e.kind), name, e.start_ns, e.duration_ns, e.correlation, e.nbytes)
        shape = -1 if e.shapes is None else shapes.setdefault(e.shapes, len(shapes))
        rows.append((*row, OPERATIONS.index(e.operation), group, e.iteration, shape))
    table = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
    order = np.lexsort((table[:, 3], table[:, 0]))
    columns = {c: table[order, i].astype(t) for i, (c, t) in enumerate(COLUMNS.items())}
    return Timeline(
        columns=columns,
        names=tuple(names),
        lanes=tuple(lanes),
        groups=tuple(every),
        marks=marks,
        clocks=clocks,
        dataflow=dataflow or {},
        shapes=tuple(shapes),
    )
