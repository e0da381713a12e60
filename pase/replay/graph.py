"""The global data-flow graph: the tasks of all ranks on their devices, and the tasks that each waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pase.errors import PaseError

__all__ = [
    "EDGE",
    "EDGES",
    "Carried",
    "DataflowGraph",
    "TaskQueue",
    "build_graph",
    "csr",
    "launching_calls",
    "twins",
]

EDGES = ("program", "launch", "stream", "wait", "sync", "handoff", "depth", "data")
"""The kinds of edges: CPU program order; launch of a device op; order on a stream; a stream that waits for another; a
call that blocks until the device is done; a thread that starts or awaits another; a full launch queue; data flow."""
EDGE = {kind: i for i, kind in enumerate(EDGES)}
"""Kind of edge -> its number in ``edge_kind``."""


@dataclass(frozen=True, kw_only=True)
class TaskQueue:
    """A resource that runs one task at a time."""

    rank: int
    name: str
    kind: str
    """"thread", "stream" or "link"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Carried:
    """Edges from tasks of one iteration to tasks of the next one, as columns. kind: an index in EDGES."""

    src: np.ndarray
    dst: np.ndarray
    lag_ns: np.ndarray
    kind: np.ndarray


def _nothing_carried() -> Carried:
    none = np.zeros(0, dtype=np.int64)
    return Carried(src=none, dst=none, lag_ns=np.zeros(0), kind=none.astype(np.uint8))


@dataclass(frozen=True, kw_only=True, eq=False)
class DataflowGraph:
    """Tasks as columns [tasks] and edges as columns [edges]. Times are in nanoseconds, float64.

    gang: the number of the collective to which a task belongs; −1 for none. The members of a collective run on
    different devices, and each ends ``duration_ns`` after the last member has started.
    priority: among the ready tasks of a device, the one with the smallest value runs first.
    release_ns: the earliest start.
    key: identifies the task; it is the same in every iteration.
    event: the index of its event in the timeline; −1 for none.
    """

    devices: tuple[TaskQueue, ...]
    names: tuple[str, ...]
    name: np.ndarray
    kind: np.ndarray
    device: np.ndarray
    duration_ns: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    lag_ns: np.ndarray
    edge_kind: np.ndarray
    gang: np.ndarray
    priority: np.ndarray
    release_ns: np.ndarray
    nbytes: np.ndarray
    operation: np.ndarray
    ways: np.ndarray
    """Number of ranks of a collective, including ranks without a trace; 0 for other tasks, or if unknown."""
    event: np.ndarray
    device_free_ns: np.ndarray
    key: tuple[object, ...] = ()
    root: dict[int, int] = field(default_factory=dict)
    """rank → the task whose start begins the rank's iteration, if that is not its first device op."""
    tail: dict[int, int] = field(default_factory=dict)
    """rank → the task whose end ends the rank's iteration, if that is not its last device op."""
    gangs: int = 0
    """Number of collectives that ranks of the graph share."""
    carried: Carried = field(default_factory=_nothing_carried)
    """Edges from the previous iteration. They matter if consecutive iterations are replayed."""
    even: bool = False
    """Whether no rank may be later or slower than the median rank, in every single iteration."""

    def __len__(self) -> int:
        return len(self.device)

    @cached_property
    def rank(self) -> np.ndarray:
        """The rank of each task, int32."""
        return np.array([d.rank for d in self.devices], dtype=np.int32)[self.device]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({d.rank for d in self.devices}))

    def task_name(self, i: int) -> str:
        return self.names[int(self.name[i])]

    def named(self, test: Callable[[str], object]) -> np.ndarray:
        """Whether the name of each task passes a test, bool [tasks]."""
        return np.array([bool(test(name)) for name in self.names], dtype=bool)[self.name]

    def edges_of(self, *kinds: str) -> np.ndarray:
        """Which edges are of these kinds, bool [edges]."""
        return np.isin(self.edge_kind, [EDGE[kind] for kind in kinds])

    @cached_property
    def before_on_thread(self) -> dict[int, int]:
        """Task of a thread → the task before it."""
        program = self.edges_of("program")
        return dict(zip(self.dst[program].tolist(), self.src[program].tolist(), strict=True))


def build_graph(
    tasks: list[dict[str, object]], edges: list[tuple[int, int, float]] | list[tuple[int, int]]
) -> DataflowGraph:
    """Builds a graph from plain dicts, for plans and tests.

    tasks: each has ``device`` (rank, name) and ``duration_ns``. Optional are name, kind, gang, priority, release_ns,
    nbytes, operation (an index in types.OPERATIONS) and ways.
    edges: (source, destination) or (source, destination, lag in ns).
    """
    devices: dict[tuple[int, str], int] = {}
    names: dict[str, int] = {}
    for t in tasks:
        devices.setdefault(t["device"], len(devices))  # type: ignore[arg-type]
        names.setdefault(str(t.get("name", "")), len(names))
    m = len(edges)
    column = {k: np.array([t.get(k, d) for t in tasks]) for k, d in _DEFAULTS.items()}
    sizes = np.append(np.bincount(column["gang"][column["gang"] >= 0].astype(np.int64)), 0)
    return DataflowGraph(
        devices=tuple(TaskQueue(rank=r, name=n, kind=_device_kind(n)) for r, n in devices),
        names=tuple(names),
        name=np.array([names[str(t.get("name", ""))] for t in tasks], dtype=np.int32),
        kind=column["kind"].astype(np.uint8),
        device=np.array([devices[t["device"]] for t in tasks], dtype=np.int64),  # type: ignore[index]
        duration_ns=np.array([t["duration_ns"] for t in tasks], dtype=np.float64),
        src=np.array([e[0] for e in edges], dtype=np.int64),
        dst=np.array([e[1] for e in edges], dtype=np.int64),
        lag_ns=np.array([e[2] if len(e) > 2 else 0.0 for e in edges], dtype=np.float64),
        edge_kind=np.full(m, EDGE["data"], dtype=np.uint8),
        gang=column["gang"].astype(np.int64),
        priority=column["priority"].astype(np.int64),
        release_ns=column["release_ns"].astype(np.float64),
        nbytes=column["nbytes"].astype(np.int64),
        operation=column["operation"].astype(np.uint8),
        ways=np.where(column["gang"] >= 0, sizes[column["gang"].astype(np.int64)], column["ways"]).astype(
            np.int32
        ),
        event=np.full(len(tasks), -1, dtype=np.int64),
        device_free_ns=np.zeros(len(devices)),
        key=tuple(range(len(tasks))),
        gangs=len(sizes) - 1,
    )


_DEFAULTS = {"kind": 2, "gang": -1, "priority": 0, "release_ns": 0.0, "nbytes": -1, "operation": 0, "ways": 0}


def _device_kind(name: str) -> str:
    return next((k for k in ("thread", "link") if name.startswith(k)), "stream")


def csr(g: DataflowGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (ptr [tasks + 1], dst, lag) with edges ordered by source. Raises PaseError if an edge is out of range."""
    n = len(g)
    if len(g.src) and (min(g.src.min(), g.dst.min()) < 0 or max(g.src.max(), g.dst.max()) >= n):
        raise PaseError(f"an edge of the graph has an end that is not one of its {n} tasks")
    order = np.argsort(g.src, kind="stable")
    ptr = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(g.src, minlength=n), out=ptr[1:])
    return ptr, g.dst[order], g.lag_ns[order]


def launching_calls(g: DataflowGraph) -> dict[int, int]:
    """Returns device task → the call that launches it.

    An op waits for the begin of its call, which is the end of the work before the call.
    """
    program, launch = g.edges_of("program"), g.edges_of("launch")
    called = {a: b for a, b in zip(g.src[program].tolist(), g.dst[program].tolist(), strict=True)}
    pairs = zip(g.src[launch].tolist(), g.dst[launch].tolist(), strict=True)
    return {op: called[work] for work, op in pairs if work in called}


def twins(g: DataflowGraph) -> dict[object, dict[int, int]]:
    """Returns, for each set of tasks that differ only in their rank, rank → task.

    The key of such a set is the tasks' key without the rank, which comes before names and counts in a task's key.
    """
    out: dict[object, dict[int, int]] = {}
    rank = g.rank.tolist()
    for i, key in enumerate(g.key):
        if isinstance(key, tuple):
            place = next((j for j, x in enumerate(key) if x == rank[i] and isinstance(x, int)), len(key))
            out.setdefault((*key[:place], *key[place + 1 :]), {})[rank[i]] = i
    return out
