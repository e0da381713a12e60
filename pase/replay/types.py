"""What a run did, when: events on lanes, gathered in a Timeline of plain columns.

Times are whole nanoseconds on the clock of the event's rank; ``Timeline.clocks`` says how to bring them
to one clock. A million events are a few numpy columns, and ``Timeline.event(i)`` is the readable form of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

__all__ = [
    "COLLECTIVE",
    "COLUMNS",
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
"""host: an op on a CPU thread; runtime: a driver call (launch, sync); the next four run on a stream."""

COLLECTIVE = KINDS.index("collective")
GPU_KINDS = tuple(KINDS.index(k) for k in ("kernel", "memcpy", "memset", "collective"))
_ON_DEVICE = np.isin(np.arange(len(KINDS)), GPU_KINDS)


def on_stream(kind: np.ndarray) -> np.ndarray:
    """Which of these kinds are of ops that run on a stream."""
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
"""What a collective event does; the empty name stands for every other event."""

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
"""Between a stream's name and a number: ops that overlap on one stream have lanes of their own."""

Shapes = tuple[tuple[int, ...], ...]
"""Extents of an op's operands, one tuple an operand; empty for one that is no tensor."""


@dataclass(frozen=True, kw_only=True)
class CompiledOp:
    """What a compiled program says of one of its ops.

    part: which part of a training step it belongs to, from the framework's name for where it comes from.
    operands: extents of what it reads. product: of the one matrix product that it is or holds, the extents of the two
    factors and of the result; empty where it holds none, or several. itemsize: bytes of an element of its result.
    """

    part: Literal["forward", "backward", "update"]
    operands: Shapes
    product: Shapes = ()
    itemsize: int = 4


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A queue that runs one thing at a time: a CPU thread or a device stream of one rank."""

    rank: int
    name: str
    device: bool
    """True for a device stream, False for a CPU thread."""

    @property
    def stream(self) -> str:
        """The name without what tells ops apart that overlap on one stream: which of them runs beside which differs
        from iteration to iteration, and from rank to rank."""
        return self.name.partition(BESIDE)[0]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that take part in a collective. An empty ``ranks`` means that the trace does not say."""

    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Global time = local time + offset + drift · (local time − reference).

    uncertainty_ns: one standard error of the offset at the reference time; inf where nothing ties this
    rank to the others.
    """

    rank: int
    offset_ns: float = 0.0
    drift: float = 0.0
    reference_ns: int = 0
    uncertainty_ns: float = 0.0

    def to_global(self, local_ns: np.ndarray) -> np.ndarray:
        """Local nanoseconds to global ones, float64 (or int64 where the correction is a whole offset)."""
        return local_ns + self.offset_ns + self.drift * (local_ns - self.reference_ns)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One iteration of one rank: [start_ns, end_ns) on that rank's clock."""

    rank: int
    iteration: int
    start_ns: int
    end_ns: int
    complete: bool = True
    """False where the trace cuts the iteration, so that its length is not a measurement."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that the trace got wrong, where, and what was done about it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event. nbytes and correlation are −1 where unknown; iteration is −1 outside every iteration.

    correlation: in a measured timeline, the same for a call and for what it launched; in a predicted one, for what was
    sent and for the work that needed it.
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
    """Events of all ranks as columns (one entry per event, types in COLUMNS), sorted by lane, then start."""

    columns: dict[str, np.ndarray]
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    groups: tuple[Group, ...] = ()
    clocks: tuple[Clock, ...] = ()
    marks: tuple[Mark, ...] = ()
    problems: tuple[Problem, ...] = ()
    hosts: dict[int, str] = field(default_factory=dict)
    """Machine of each rank, where known: ranks on one machine share a clock."""
    dataflow: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Op name → names of the ops whose results it reads, where the source states them (XLA's HLO does)."""
    shapes: tuple[Shapes, ...] = ()
    """What the column shape points into; −1 there where the source does not say."""
    compiled: dict[str, CompiledOp] = field(default_factory=dict)
    """Op name → what the compiled program says of it, where the trace holds that program (XLA's HLO)."""

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

    @cached_property
    def end_ns(self) -> np.ndarray:
        return self["start_ns"] + self["duration_ns"]

    def clock(self, rank: int) -> Clock:
        return next((c for c in self.clocks if c.rank == rank), Clock(rank=rank))

    def global_start_ns(self) -> np.ndarray:
        """Start of every event on the common clock, float64 [events]."""
        return self.to_global(self["start_ns"])

    def to_global(self, local_ns: np.ndarray) -> np.ndarray:
        """Per-event local times [events] on the common clock, float64."""
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
        """The same timeline with only the events where ``keep`` (bool or indices) holds."""
        return replace(self, columns={k: v[keep] for k, v in self.columns.items()})


def from_events(
    events: Iterable[Event],
    *,
    groups: tuple[Group, ...] = (),
    marks: tuple[Mark, ...] = (),
    clocks: tuple[Clock, ...] = (),
    dataflow: dict[str, tuple[str, ...]] | None = None,
) -> Timeline:
    """A Timeline from single events: for plans, tests and small traces; ingestion fills columns directly.

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
            raise ValueError(f"event '{e.name}': no kind '{e.kind}' or no operation '{e.operation}'")
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
