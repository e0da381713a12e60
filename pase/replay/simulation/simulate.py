"""Replays the data-flow graph on its devices, and finds the critical path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pase.errors import PaseError
from pase.replay.graph import Carried, DataflowGraph, csr

__all__ = [
    "Replay",
    "Tasks",
    "critical_path",
    "replay_graph",
    "subgraph",
]


class Tasks(NamedTuple):
    """What is simulated, as arrays. Times are float64, in ns; all other arrays are int64.

    device, duration, priority, release, gang: [n], one entry for each task; gang −1: it is in no collective.
    gang_size: [gangs]. ptr, dst, lag: the successors of each task, and how long after it they may start.
    device_free: [devices], when each device first becomes free.
    """

    device: np.ndarray
    duration: np.ndarray
    priority: np.ndarray
    release: np.ndarray
    gang: np.ndarray
    gang_size: np.ndarray
    ptr: np.ndarray
    dst: np.ndarray
    lag: np.ndarray
    device_free: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """When each task ran, in ns.

    cause: for each task, the task that determined its start; −1 for none. latest: for each gang, the member that
    started last. order: the tasks in the order in which they started.
    """

    start_ns: np.ndarray
    finish_ns: np.ndarray
    ready_ns: np.ndarray
    cause: np.ndarray
    latest: np.ndarray
    order: np.ndarray

    @property
    def makespan_ns(self) -> float:
        return float(self.finish_ns.max()) if len(self.finish_ns) else 0.0


def replay_graph(g: DataflowGraph) -> Replay:
    """Simulates the graph.

    Raises PaseError if a duration is invalid, or if tasks wait for each other; the message names some of them.
    """
    if len(g) and not (np.isfinite(g.duration_ns).all() and float(g.duration_ns.min()) >= 0):
        bad = int(np.flatnonzero(~(np.isfinite(g.duration_ns) & (g.duration_ns >= 0)))[0])
        raise PaseError(
            f"{g.duration_ns[bad]} ns is not a valid duration", where=f"task '{g.task_name(bad)}'"
        )
    from pase.replay.simulation import _kernels

    ptr, dst, lag = csr(g)
    size = np.bincount(g.gang[g.gang >= 0], minlength=0).astype(np.int64)
    if (size == 0).any():
        size[size == 0] = 1
    tasks = Tasks(
        device=g.device.astype(np.int64),
        duration=g.duration_ns.astype(np.float64),
        priority=g.priority.astype(np.int64),
        release=g.release_ns.astype(np.float64),
        gang=g.gang.astype(np.int64),
        gang_size=size,
        ptr=ptr,
        dst=dst,
        lag=lag.astype(np.float64),
        device_free=g.device_free_ns.astype(np.float64),
    )
    start, finish, ready, cause, latest, order, done = _kernels.simulate(tasks)
    stuck = np.flatnonzero(np.isnan(finish))
    if len(stuck):
        shown = "; ".join(f"'{g.task_name(int(i))}' on rank {int(g.rank[i])}" for i in stuck[:4])
        raise PaseError(
            f"{len(stuck)} of {len(g)} tasks wait for each other ({shown}): either the graph has a cycle, or ranks "
            "issue collectives in different orders, which is a deadlock in a real run"
        )
    return Replay(
        start_ns=start, finish_ns=finish, ready_ns=ready, cause=cause, latest=latest, order=order[:done]
    )


def critical_path(g: DataflowGraph, r: Replay, end: int | None = None) -> list[int]:
    """Returns the tasks on the longest chain of the execution graph that ends at ``end`` or the last task, in order.

    The execution graph is the data-flow graph plus the order in which devices ran their tasks. At a collective, the
    chain goes through the member that started last.
    """
    if not len(g):
        return []
    i = int(np.argmax(r.finish_ns)) if end is None else end
    path = [i]
    while True:
        if g.gang[i] >= 0:
            last = int(r.latest[g.gang[i]])
            if last != i:
                path.append(last)
                i = last
        i = int(r.cause[i])
        if i < 0:
            return path[::-1]
        path.append(i)


def subgraph(g: DataflowGraph, keep: np.ndarray) -> DataflowGraph:
    """Returns the graph of the tasks selected by the mask ``keep`` [tasks], with the edges between them."""
    index = np.cumsum(keep) - 1
    edges = keep[g.src] & keep[g.dst]
    gangs, gang = np.unique(g.gang[keep], return_inverse=True)
    gang = gang - int(len(gangs) > 0 and gangs[0] < 0)
    picked = np.flatnonzero(keep)
    c = g.carried
    held = keep[c.src] & keep[c.dst]
    return replace(
        g,
        **{
            f: getattr(g, f)[keep]
            for f in ("name", "kind", "device", "duration_ns", "priority", "release_ns")
        },
        **{f: getattr(g, f)[keep] for f in ("nbytes", "operation", "ways", "event")},
        gang=gang.astype(np.int64),
        src=index[g.src[edges]],
        dst=index[g.dst[edges]],
        lag_ns=g.lag_ns[edges],
        edge_kind=g.edge_kind[edges],
        key=tuple(g.key[i] for i in picked) if g.key else (),
        root={r: int(index[i]) for r, i in g.root.items() if keep[i]},
        tail={r: int(index[i]) for r, i in g.tail.items() if keep[i]},
        gangs=int((gangs >= 0).sum()),
        carried=Carried(
            src=index[c.src[held]], dst=index[c.dst[held]], lag_ns=c.lag_ns[held], kind=c.kind[held]
        ),
    )
