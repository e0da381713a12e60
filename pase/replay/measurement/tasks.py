"""The tasks of one iteration of one rank, with their edges. ``program`` extracts them and ``model`` measures them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pase.replay.graph import EDGE

__all__ = ["RankProgram", "Thread"]


@dataclass(kw_only=True)
class RankProgram:
    """Tasks of one rank and iteration. Times are in ns, relative to the iteration's start on the rank's clock."""

    rank: int
    iteration: int
    keys: list[tuple[object, ...]] = field(default_factory=list)
    device: list[tuple[str, str]] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
    edges: dict[tuple[int, int], int] = field(default_factory=dict)
    blocked: dict[int, int] = field(default_factory=dict)
    """Call task → the time, in this iteration, at which the task that it waited for ended."""
    root: int = -1
    tail: int = -1
    _taken: set[tuple[object, ...]] = field(default_factory=set)
    busy_until: dict[str, int] = field(default_factory=dict)
    """Stream → when the previous iteration's last op on it ended, if that is after this one's start."""
    zero_ns: int = 0
    """The iteration's start on the rank's clock."""
    carried: dict[tuple[tuple[object, ...], int], int] = field(default_factory=dict)
    """(key of a task of the previous iteration, task) → kind of the edge between them."""

    def task(
        self,
        key: tuple[object, ...],
        device: tuple[str, str],
        name: str,
        kind: int,
        start: int,
        end: int,
        event: int = -1,
    ) -> int:
        while key in self._taken:
            key = (*key, "again")
        self._taken.add(key)
        self.keys.append(key)
        self.device.append(device)
        self.name.append(name)
        self.kind.append(kind)
        self.start.append(start)
        self.end.append(max(start, end))
        self.event.append(event)
        return len(self.keys) - 1

    def edge(self, src: int, dst: int, kind: str) -> None:
        if src >= 0 and dst >= 0 and src != dst:
            self.edges.setdefault((src, dst), EDGE[kind])


@dataclass(frozen=True, kw_only=True)
class Thread:
    lane: int
    label: str
    calls: np.ndarray
    """Events of the relevant calls, in order of time."""
    busy: np.ndarray
    """Disjoint intervals of activity, int64 [k, 2]."""
