"""Analyses a replayed iteration: overlaps, waits in collectives, and the critical path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.simulation.simulate import Replay, critical_path
from pase.replay.types import KINDS, Event, Group, Mark, Timeline, from_events

__all__ = [
    "PathStep",
    "merged",
    "overlap_ns",
    "path_steps",
    "to_timeline",
    "waits_ns",
]


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """A task on the critical path. added_ns: the time that it adds to the path, including its lag."""

    task: int
    added_ns: float
    lag_ns: float


def merged(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns the union of intervals as sorted disjoint intervals, float64 [k, 2]."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.zeros((0, 2))
    order = np.argsort(start, kind="stable")
    s, reach = start[order], np.maximum.accumulate(end[order])
    first = np.r_[True, s[1:] > reach[:-1]]
    return np.stack([s[first], reach[np.r_[first[1:], True]]], axis=1).astype(np.float64)


def _length(x: np.ndarray) -> float:
    return float((x[:, 1] - x[:, 0]).sum())


def overlap_ns(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the length of the intersection of two unions of intervals."""
    both = merged(np.r_[a[:, 0], b[:, 0]], np.r_[a[:, 1], b[:, 1]])
    return _length(a) + _length(b) - _length(both)


def waits_ns(g: DataflowGraph, r: Replay) -> np.ndarray:
    """Returns how long each task waited in its collective for the last member; 0 for other tasks. float64 [tasks]."""
    out = np.zeros(len(g))
    in_gang = g.gang >= 0
    if in_gang.any():
        out[in_gang] = r.start_ns[r.latest[g.gang[in_gang]]] - r.start_ns[in_gang]
    return out


def path_steps(g: DataflowGraph, r: Replay, end: int | None = None) -> list[PathStep]:
    """Returns the critical path with the time that each task adds. These times sum to the end of the path."""
    path = critical_path(g, r, end)
    out: list[PathStep] = []
    before = 0.0
    for i in path:
        if g.gang[i] >= 0 and int(r.latest[g.gang[i]]) == i and len(path) > len(out) + 1:
            nxt = path[len(out) + 1]
            if g.gang[nxt] == g.gang[i]:
                # The path changes members at the start of the latest one, and the collective's work counts for the
                # other member.
                out.append(PathStep(task=i, added_ns=float(r.start_ns[i]) - before, lag_ns=0.0))
                before = float(r.start_ns[i])
                continue
        added = float(r.finish_ns[i]) - before
        out.append(PathStep(task=i, added_ns=added, lag_ns=max(0.0, float(r.start_ns[i]) - before)))
        before = float(r.finish_ns[i])
    return out


def to_timeline(g: DataflowGraph, r: Replay) -> Timeline:
    """Returns the replayed iteration as a timeline, on a common clock that starts at 0."""
    groups: dict[int, str] = {}
    events = []
    for i in np.argsort(r.start_ns, kind="stable").tolist():
        device = g.devices[int(g.device[i])]
        gang = int(g.gang[i])
        if gang >= 0:
            groups[gang] = f"collective {gang}"
        start = round(float(r.start_ns[i]))
        events.append(
            Event(
                rank=device.rank,
                lane=device.name,
                device=device.kind != "thread",
                kind=KINDS[int(g.kind[i])],
                name=g.task_name(i),
                start_ns=start,
                duration_ns=max(0, round(float(r.finish_ns[i])) - start),
                nbytes=int(g.nbytes[i]),
                iteration=0,
            )
        )
    marks = []
    for rank in g.ranks:
        mine = np.flatnonzero(g.rank == rank)
        if len(mine):
            first = g.root.get(rank, int(mine[np.argmin(r.start_ns[mine])]))
            begin, end = float(r.start_ns[first]), float(r.finish_ns[mine].max())
            marks.append(Mark(rank=rank, iteration=0, start_ns=round(begin), end_ns=round(end)))
    return from_events(events, groups=tuple(Group(name=n) for n in groups.values()), marks=tuple(marks))
