"""Finds the steady iteration: replays several consecutive iterations and measures the last one.

The length of an iteration is defined as in ``iterations``: the time from the end of the previous iteration, on the
rank's thread and device, to the end of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.simulation.analyse import PathStep, path_steps
from pase.replay.simulation.simulate import Replay, replay_graph
from pase.replay.types import on_stream

__all__ = ["MAX_TASKS", "Steady", "evaluate", "lengths_in_a_row", "steady", "stretched", "unroll"]

_ROW = 4
"""The number of consecutive iterations. How far the CPU is ahead of its device is steady by then."""

_WARM_UP = 3
"""The number of warm-up iterations, which have median times, before iterations with their own times."""
MAX_TASKS = 4_000_000
"""Fewer consecutive iterations are replayed if there would be more tasks than this in total."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Steady:
    """The last of several iterations. ``graph`` repeats the tasks: task i of iteration k has number i + k · tasks."""

    graph: DataflowGraph
    replay: Replay
    tasks: int
    """The number of tasks of one iteration."""
    begin_ns: dict[int, float]
    """Rank → the end of the previous iteration."""
    length_ns: dict[int, float]
    """Rank → the length of the iteration."""

    @property
    def iteration_ns(self) -> float:
        """The length of the run's iteration, which is that of the slowest rank."""
        return max(self.length_ns.values(), default=0.0)

    def path(self) -> list[PathStep]:
        """Returns the critical path of the slowest rank's last iteration. The added times sum to its length."""
        rank = max(self.length_ns, key=lambda r: self.length_ns[r])
        g, r = self.graph, self.replay
        mine = np.flatnonzero(g.rank == rank)
        end = int(mine[np.argmax(r.finish_ns[mine])])
        begin = at = self.begin_ns[rank]
        out: list[PathStep] = []
        for s in path_steps(g, r, end):
            finish = float(r.finish_ns[s.task]) if not out else at + s.added_ns
            if finish <= begin:
                continue
            # A step that crosses the iteration's beginning counts from there.
            added = finish - at if not out else s.added_ns
            out.append(PathStep(task=s.task, added_ns=added, lag_ns=min(s.lag_ns, added)))
            at += added
        return out


def steady(g: DataflowGraph, times: int = _ROW, before: DataflowGraph | None = None) -> Steady:
    """Replays ``times`` consecutive iterations, or only one if the graph does not define how iterations follow.

    before: a graph with the same tasks and waits but other times. Each device runs its tasks in the order in which it
    runs them in the replay of that graph.
    """
    times = times if g.root or len(g.carried.src) else 1
    if before is None:
        long = unroll(g, times)
    else:
        long = _in_order(unroll(g, times, before), unroll(before, times))
    r = replay_graph(long)
    finish = r.finish_ns.reshape(times, len(g))
    length: dict[int, float] = {}
    begin: dict[int, float] = {}
    for k in g.ranks:
        mine = g.rank == k
        if not mine.any():  # a subgraph keeps all devices, even those of ranks without tasks
            continue
        if times > 1:
            begin[k] = float(finish[-2, mine].max())
        elif (mine & on_stream(g.kind)).any():
            begin[k] = float(r.start_ns[mine & on_stream(g.kind)].min())
        else:
            continue
        length[k] = float(finish[-1, mine].max()) - begin[k]
    return Steady(graph=long, replay=r, tasks=len(g), begin_ns=begin, length_ns=length)


def evaluate(g: DataflowGraph, before: DataflowGraph | None = None) -> dict[int, float]:
    """Returns the length (ns) of each rank's steady iteration. before: see ``steady``."""
    return steady(g, before=before).length_ns


_InARow = tuple[DataflowGraph, np.ndarray, np.ndarray]
"""A graph, and the times of its tasks and the lags of its edges in each iteration."""


def lengths_in_a_row(
    g: DataflowGraph, own_ns: np.ndarray, own_lag_ns: np.ndarray, before: _InARow | None = None
) -> np.ndarray | None:
    """Returns the length (ns) of each iteration on each rank, float64 [iterations, ranks].

    The iterations are replayed consecutively, each with its own times. They follow warm-up iterations with median
    times, because a single iteration does not determine how far a CPU is ahead of its device.

    own_ns: durations, float64 [iterations, tasks].
    own_lag_ns: lags, float64 [iterations, edges].
    before: a graph with the same tasks and waits but other times, as in ``steady``.

    If the graph is so large that not all iterations fit, only the first ones are replayed. Returns None if fewer than
    two fit, or if the graph does not define how iterations follow.
    """
    fit = min(len(own_ns), MAX_TASKS // max(len(g), 1) - _WARM_UP)
    if fit < 2 or not (g.root or len(g.carried.src)):
        return None
    if before is None:
        long = _with_own(unroll(g, _WARM_UP + fit), own_ns[:fit], own_lag_ns[:fit])
    else:
        usual, *times = before
        then = _with_own(unroll(usual, _WARM_UP + fit), *(own[:fit] for own in times))
        long = _with_own(unroll(g, _WARM_UP + fit, usual), own_ns[:fit], own_lag_ns[:fit])
        long = _in_order(long, then)
    r = replay_graph(long)
    finish = r.finish_ns.reshape(-1, len(g))
    ranks = [g.rank == k for k in g.ranks]
    done = np.stack([finish[:, mine].max(axis=1) for mine in ranks if mine.any()], axis=1)
    return np.diff(done, axis=0)[_WARM_UP - 1 :]


def _with_own(long: DataflowGraph, own_ns: np.ndarray, own_lag_ns: np.ndarray) -> DataflowGraph:
    """Returns the unrolled graph with median times in the warm-up iterations and own times in the others."""
    duration, lag = (
        np.concatenate([np.tile(np.median(own, axis=0), _WARM_UP), own.ravel()])
        for own in (own_ns, own_lag_ns)
    )
    # The edges between iterations follow those within iterations.
    return replace(long, duration_ns=duration, lag_ns=np.concatenate([lag, long.lag_ns[len(lag) :]]))


def _in_order(g: DataflowGraph, before: DataflowGraph) -> DataflowGraph:
    """Returns the graph with the tasks of each device in the order in which they run in the replay of ``before``."""
    order = replay_graph(before).order
    order = order[np.argsort(g.device[order], kind="stable")]
    same = g.device[order[1:]] == g.device[order[:-1]]
    src, dst = order[:-1][same], order[1:][same]
    return replace(
        g,
        src=np.concatenate([g.src, src]),
        dst=np.concatenate([g.dst, dst]),
        lag_ns=np.concatenate([g.lag_ns, np.zeros(len(src))]),
        edge_kind=np.concatenate([g.edge_kind, np.zeros(len(src), dtype=g.edge_kind.dtype)]),
    )


def stretched(g: DataflowGraph, by: float) -> DataflowGraph:
    """Returns the graph with all times multiplied by ``by``, which multiplies its replay by the same factor."""
    c = g.carried
    return replace(
        g,
        duration_ns=g.duration_ns * by,
        lag_ns=g.lag_ns * by,
        release_ns=g.release_ns * by,
        device_free_ns=g.device_free_ns * by,
        carried=replace(c, lag_ns=c.lag_ns * by),
    )


def unroll(g: DataflowGraph, times: int, before: DataflowGraph | None = None) -> DataflowGraph:
    """Returns the graph of ``times`` consecutive iterations.

    Each thread and stream continues with the next iteration after its last task of this one (the last in the replay of
    ``before``, if given; see ``steady``). The carried edges connect an iteration with the next one.
    """
    if times < 2:
        return g
    n = len(g)
    src, dst, lag, kind = _between(g, replay_graph(before or g).order)
    steps = range(times - 1)
    copies: dict[str, Any] = {
        f: np.tile(getattr(g, f), times) for f in ("name", "kind", "device", "duration_ns", "priority")
    }
    copies |= {f: np.tile(getattr(g, f), times) for f in ("nbytes", "operation", "ways", "event")}
    release = np.zeros(n * times)
    release[:n] = g.release_ns
    return replace(
        g,
        **copies,
        gang=np.concatenate([np.where(g.gang >= 0, g.gang + k * g.gangs, -1) for k in range(times)]),
        release_ns=release,
        src=np.concatenate([g.src + k * n for k in range(times)] + [src + k * n for k in steps]),
        dst=np.concatenate([g.dst + k * n for k in range(times)] + [dst + (k + 1) * n for k in steps]),
        lag_ns=np.concatenate([np.tile(g.lag_ns, times), np.tile(lag, times - 1)]),
        edge_kind=np.concatenate([np.tile(g.edge_kind, times), np.tile(kind, times - 1)]),
        key=g.key * times,
        gangs=g.gangs * times,
    )


def _between(g: DataflowGraph, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the edges from one iteration to the next: (source, destination, lag, kind).

    order: the tasks in the order in which they start.
    """
    # The order of tasks respects the edges, so it gives the first and last task of each device.
    first, last = (dict(zip(g.device[o].tolist(), o.tolist(), strict=True)) for o in (order[::-1], order))
    known = set(zip(g.carried.src.tolist(), g.carried.dst.tolist(), strict=True))
    extra = [(last[d], first[d], 0.0) for d in sorted(first) if (last[d], first[d]) not in known]
    free = np.flatnonzero(np.bincount(g.dst, minlength=len(g)) == 0)
    for rank, root in g.root.items():
        tail = g.tail.get(rank)
        if tail is None:
            continue
        begin = float(g.release_ns[root])
        extra.append((tail, root, 0.0))
        for i in free[g.rank[free] == rank].tolist():
            if i != root:
                extra.append((tail, i, max(0.0, float(g.release_ns[i]) - begin)))
    link = np.array([(a, b) for a, b, _ in extra], dtype=np.int64).reshape(-1, 2)
    return (
        np.concatenate([link[:, 0], g.carried.src]),
        np.concatenate([link[:, 1], g.carried.dst]),
        np.concatenate([[x[2] for x in extra], g.carried.lag_ns]),
        np.concatenate([np.zeros(len(extra), dtype=np.uint8), g.carried.kind]),
    )
