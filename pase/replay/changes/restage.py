"""Splits a measured graph into pipeline stages. A stage has the measured tasks of its layers, ordered by a schedule.

A stage's rank has the threads and streams of the measured rank. Its forward and backward actions are copies of the
tasks measured for that micro-batch and those layers, in sequence on each thread and stream. Data between stages is sent
by a transfer on a link. The gradient all-reduces and the update are scaled by the stage's fraction of the layers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from pase.errors import Infeasible
from pase.replay.graph import EDGE, Carried, DataflowGraph, TaskQueue
from pase.replay.simulation.sections import Sections, StepPhase
from pase.replay.types import COLLECTIVE, GPU_KINDS, OPERATIONS

__all__ = ["StageAction", "StageTransfer", "staged"]

_IN_ORDER = (EDGE["program"], EDGE["stream"])

StageAction = tuple[StepPhase, int]
"""(forward or backward, micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class StageTransfer:
    """The activation sent from a stage to the next (or its gradient sent back): bytes, and the time (ns) it takes."""

    nbytes: int
    duration_ns: float


def staged(
    g: DataflowGraph, s: Sections, orders: list[list[StageAction]], layers: list[int], sent: StageTransfer
) -> DataflowGraph:
    """Returns the graph of a pipeline with one rank per stage.

    orders: the ordered actions of each stage. layers: the number of layers of each stage. sent: a transfer between
    stages.

    Raises Infeasible if a stage would have no kernel in one of its actions.
    """
    made = _Pipelined(g, s, sent)
    first = np.concatenate([[0], np.cumsum(layers)])
    for stage, order in enumerate(orders):
        mine = (s.layer >= first[stage]) & (s.layer < first[stage + 1])
        made.stage(stage, order, mine, last=stage == len(orders) - 1, share=layers[stage] / s.layers)
    return made.graph()


@dataclass(eq=False)
class _Pipelined:
    """Builds the tasks and edges of a pipeline. of: new task → measured task; −1 for a transfer."""

    g: DataflowGraph
    s: Sections
    sent: StageTransfer
    of: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    edges: list[tuple[int, int, float, int]] = field(default_factory=list)
    devices: list[TaskQueue] = field(default_factory=list)
    sends: dict[tuple[StepPhase, int, int], int] = field(default_factory=dict)
    """(phase, sending stage, micro-batch) → its transfer."""
    awaited: list[tuple[tuple[StepPhase, int, int], int]] = field(default_factory=list)
    root: dict[int, int] = field(default_factory=dict)
    tail: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = self.g
        self.into: dict[int, list[int]] = defaultdict(list)
        for e, b in enumerate(g.dst.tolist()):
            self.into[b].append(e)
        self.on_host = np.array([d.kind == "thread" for d in g.devices])[g.device]

    def stage(
        self, stage: int, order: list[StageAction], mine: np.ndarray, *, last: bool, share: float
    ) -> None:
        """Adds a stage's rank: its actions, and then the update."""
        s = self.s
        rank = _StageRank(number=stage)
        for phase, micro in order:
            chosen = s.order[(mine & (s.phase == phase) & (s.micro == micro))[s.order]]
            kernels = [i for i in chosen.tolist() if self._computes(i)]
            if not kernels:
                raise Infeasible(
                    f"it would have no kernel in {phase.name.lower()} of micro-batch {micro}",
                    where=f"stage {stage}",
                    fix="give fewer stages",
                )
            new = self._copy(rank, chosen, 1.0)
            forward = phase == StepPhase.FORWARD
            if stage > 0 if forward else not last:
                self.awaited.append(((phase, stage - 1 if forward else stage + 1, micro), new[kernels[0]]))
            if not last if forward else stage > 0:
                send = self._task(-1, self._queue(rank, f"link {phase.name.lower()}", "link"), 1.0)
                self.edges.append((new[kernels[-1]], send, 0.0, EDGE["wait"]))
                self.sends[phase, stage, micro] = send
        self._copy(rank, s.order[(s.phase == StepPhase.UPDATE)[s.order]], share)
        if rank.first_host >= 0:  # the trace of a compiled program has no launching threads
            self.root[stage] = rank.first_host
            self.tail[stage] = rank.latest.get(self.g.tail[s.rank], rank.last_host)

    def _computes(self, i: int) -> bool:
        g = self.g
        return int(g.device[i]) == self.s.compute and g.kind[i] in GPU_KINDS and g.kind[i] != COLLECTIVE

    def _queue(self, rank: _StageRank, name: str, kind: str) -> int:
        if name not in rank.queue:
            rank.queue[name] = len(self.devices)
            self.devices.append(TaskQueue(rank=rank.number, name=name, kind=kind))
        return rank.queue[name]

    def _task(self, of: int, device: int, scale: float) -> int:
        self.of.append(of)
        self.device.append(device)
        self.scale.append(scale)
        return len(self.of) - 1

    def _copy(self, rank: _StageRank, chosen: np.ndarray, scale: float) -> dict[int, int]:
        """Adds copies of tasks after the rank's previous tasks. Returns measured task → its copy.

        scale: the factor for their durations.
        """
        g = self.g
        new: dict[int, int] = {}
        host_before = rank.last_host
        entered: set[int] = set()
        for i in chosen.tolist():
            q = g.devices[int(g.device[i])]
            here = self._queue(rank, q.name, q.kind)
            k = new[i] = self._task(i, here, scale)
            first = here not in entered
            entered.add(here)
            lag_in_order, ordered = 0.0, False
            for e in self.into[i]:
                a, kind, lag = int(g.src[e]), int(g.edge_kind[e]), float(g.lag_ns[e])
                if a in new:
                    self.edges.append((new[a], k, lag, kind))
                    ordered |= kind in _IN_ORDER
                elif kind in _IN_ORDER:
                    lag_in_order = lag
                elif a in rank.latest:
                    self.edges.append((rank.latest[a], k, lag, kind))
            # Keep the order on a thread or stream, even if the two tasks were not consecutive in the measured graph.
            if not ordered and here in rank.last:
                kind = EDGE["program" if self.on_host[i] else "stream"]
                self.edges.append((rank.last[here], k, lag_in_order, kind))
            if first and self.on_host[i] and host_before >= 0 and rank.last.get(here) != host_before:
                self.edges.append((host_before, k, 0.0, EDGE["handoff"]))
            rank.last[here] = k
            if self.on_host[i]:
                rank.last_host = k
                rank.first_host = k if rank.first_host < 0 else rank.first_host
        rank.latest |= new
        return new

    def graph(self) -> DataflowGraph:
        g = self.g
        edges = list(self.edges)
        edges += [(self.sends[key], k, 0.0, EDGE["wait"]) for key, k in self.awaited]
        of, scale = np.array(self.of), np.array(self.scale)
        sent = of < 0
        at = np.maximum(of, 0)
        src, dst, lag, kind = zip(*edges, strict=True)
        none = np.zeros(0, dtype=np.int64)
        names = (*g.names, "to the next stage")

        def picked(column: np.ndarray, other: float) -> np.ndarray:
            return np.where(sent, other, column[at]).astype(column.dtype)

        # Copies of one task need different keys.
        key = [("stage", n, i) for n, i in enumerate(self.of)]
        return replace(
            g,
            devices=tuple(self.devices),
            names=names,
            name=picked(g.name, len(names) - 1),
            kind=picked(g.kind, COLLECTIVE),
            device=np.array(self.device, dtype=np.int64),
            duration_ns=np.where(sent, self.sent.duration_ns, g.duration_ns[at] * scale),
            src=np.array(src, dtype=np.int64),
            dst=np.array(dst, dtype=np.int64),
            lag_ns=np.array(lag, dtype=np.float64),
            edge_kind=np.array(kind, dtype=np.uint8),
            gang=np.full(len(of), -1, dtype=np.int64),
            priority=np.zeros(len(of), dtype=np.int64),
            release_ns=np.zeros(len(of)),
            nbytes=picked(g.nbytes, self.sent.nbytes),
            operation=picked(g.operation, OPERATIONS.index("send_recv")),
            ways=picked(g.ways, 2),
            event=picked(g.event, -1),
            device_free_ns=np.zeros(len(self.devices)),
            key=tuple(key),
            root=self.root,
            tail=self.tail,
            gangs=0,
            carried=Carried(src=none, dst=none, lag_ns=np.zeros(0), kind=none.astype(np.uint8)),
        )


@dataclass(eq=False)
class _StageRank:
    """The state of a stage's rank. latest: measured task → its latest copy. last: device → its last task."""

    number: int
    queue: dict[str, int] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    last_host: int = -1
    first_host: int = -1
