"""Estimates the mean step under random variation: each step waits for its slowest rank.

A replay of medians ignores random variation and is too short. Here, many consecutive steps are replayed, and their mean
is returned. In each step, each rank has the times of one of its iterations, drawn at random. (All tasks of a rank take
their times from the same iteration, because the cause of a slow step often affects all of it.) Ranks that were not
traced are copies of traced ones, with independent draws. The more ranks there are, the later is the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.replay.graph import Carried, DataflowGraph, TaskQueue
from pase.replay.measurement.model import Measured, own_times
from pase.replay.simulation.simulate import replay_graph
from pase.replay.simulation.steady import MAX_TASKS, unroll
from pase.replay.types import COLLECTIVE

__all__ = ["mean_iteration_ns", "spreads", "with_ranks"]

_WARM_UP, _STEPS = 4, 40
"""The number of warm-up steps, and of steps that count."""


def spreads(m: Measured, g: DataflowGraph, chosen: Sequence[int]) -> np.ndarray:
    """Returns the ratio of each task's time in each iteration to its median; float64 [iterations, tasks].

    g: a graph that is estimated from some of the run's iterations.

    The ratio is 1 if the task was not measured. It is also 1 for collectives, because ranks share them, and waiting for
    other ranks is an outcome of the simulation.
    """
    made = own_times(m, chosen)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = made.own_ns / made.graph.duration_ns
    ratio[:, made.graph.kind == COLLECTIVE] = 1.0
    place = {key: i for i, key in enumerate(made.graph.key)}
    at = np.array([place.get(key, -1) for key in g.key], dtype=np.int64)
    ratio = np.concatenate([ratio, np.ones((len(ratio), 1))], axis=1)[:, at]
    return np.where(np.isfinite(ratio), ratio, 1.0)


def mean_iteration_ns(g: DataflowGraph, spread: np.ndarray, ranks: int, seed: int = 0) -> float | None:
    """Returns the mean step of ``ranks`` ranks, in ns; None if variation is unknown or the graph would be too large.

    spread: the result of ``spreads`` for this graph, whose durations may have changed.
    """
    steps = min(_STEPS, MAX_TASKS // max(_tasks_of(g, ranks), 1) - _WARM_UP)
    if steps < 2 or len(spread) < 2:
        return None
    many = with_ranks(g, ranks)
    if many is None:
        return None
    rng = np.random.default_rng(seed)
    long = unroll(many.graph, _WARM_UP + steps)
    drawn = rng.integers(len(spread), size=(_WARM_UP + steps, ranks))
    of_rank = many.graph.rank
    ratio = np.concatenate([spread[row[of_rank], many.task] for row in drawn])
    r = replay_graph(replace(long, duration_ns=long.duration_ns * ratio))
    done = r.finish_ns.reshape(_WARM_UP + steps, len(many.graph)).max(axis=1)
    return float(done[-1] - done[_WARM_UP - 1]) / steps


def _tasks_of(g: DataflowGraph, ranks: int) -> int:
    """Returns the number of tasks that a graph with ``ranks`` ranks would have."""
    each = [int((g.rank == r).sum()) for r in g.ranks]
    whole, rest = divmod(ranks, len(each))
    return whole * sum(each) + sum(each[:rest])


@dataclass(frozen=True, kw_only=True, eq=False)
class ManyRanks:
    """A graph whose ranks are copies of traced ones. task: for each task, the traced task that it copies."""

    graph: DataflowGraph
    task: np.ndarray


def with_ranks(g: DataflowGraph, ranks: int) -> ManyRanks | None:
    """Returns a graph with ``ranks`` ranks, which are copies of the traced ranks in round-robin order.

    None unless all traced ranks share all collectives, because otherwise it is unknown for whom a new rank waits.
    """
    traced = list(g.ranks)
    size = np.bincount(g.gang[g.gang >= 0], minlength=1)
    if len(traced) < 2 or not g.gangs or (size[: g.gangs] != len(traced)).any():
        return None
    copies = _RankCopies(g, traced, ranks)
    c = g.carried
    src, dst, lag, kind = copies.edges(g.src, g.dst, g.lag_ns, g.edge_kind)
    c_src, c_dst, c_lag, c_kind = copies.edges(c.src, c.dst, c.lag_ns, c.kind)
    devices, free, device = copies.devices()
    columns = (
        "name",
        "kind",
        "duration_ns",
        "gang",
        "priority",
        "release_ns",
        "nbytes",
        "operation",
        "event",
    )
    graph = replace(
        g,
        **{f: getattr(g, f)[copies.task] for f in (*columns, "ways")},
        devices=tuple(devices),
        device=device,
        src=src,
        dst=dst,
        lag_ns=lag,
        edge_kind=kind,
        carried=Carried(src=c_src, dst=c_dst, lag_ns=c_lag, kind=c_kind),
        device_free_ns=free,
        key=(),
        root=copies.ends(g.root),
        tail=copies.ends(g.tail),
    )
    return ManyRanks(graph=graph, task=copies.task)


class _RankCopies:
    """Builds ranks that are copies of traced ones.

    owner: the traced rank of each rank. begin: the first task of each rank. place: the position of each traced task
    among those of its rank.
    """

    def __init__(self, g: DataflowGraph, traced: list[int], ranks: int) -> None:
        self.g = g
        self.owner = [traced[k % len(traced)] for k in range(ranks)]
        where = {r: np.flatnonzero(g.rank == r) for r in traced}
        self.of = [where[r] for r in self.owner]
        self.begin = np.concatenate([[0], np.cumsum([len(x) for x in self.of])])
        self.task = np.concatenate(self.of)
        self.place = np.full(len(g), -1, dtype=np.int64)
        for x in where.values():
            self.place[x] = np.arange(len(x))

    def edges(self, src: np.ndarray, dst: np.ndarray, *more: np.ndarray) -> list[np.ndarray]:
        """Returns the edges of all ranks as columns: sources, destinations, and the further columns given."""
        rank_of = self.g.rank[src]
        columns: list[list[np.ndarray]] = [[] for _ in range(2 + len(more))]
        for first, owner in zip(self.begin[:-1], self.owner, strict=True):
            e = np.flatnonzero(rank_of == owner)
            ends = (first + self.place[src[e]], first + self.place[dst[e]])
            for column, x in zip(columns, (*ends, *(m[e] for m in more)), strict=True):
                column.append(x)
        return [np.concatenate(c) for c in columns]

    def devices(self) -> tuple[list[TaskQueue], np.ndarray, np.ndarray]:
        """Returns the devices of all ranks, when each is first free, and the device of each task."""
        g = self.g
        devices: list[TaskQueue] = []
        free: list[float] = []
        device = np.zeros(len(self.task), dtype=np.int64)
        for k, owner in enumerate(self.owner):
            mine = [d for d, q in enumerate(g.devices) if q.rank == owner]
            number = np.full(len(g.devices), -1, dtype=np.int64)
            number[mine] = np.arange(len(devices), len(devices) + len(mine))
            devices += [replace(g.devices[d], rank=k) for d in mine]
            free += [float(g.device_free_ns[d]) for d in mine]
            device[self.begin[k] : self.begin[k + 1]] = number[g.device[self.of[k]]]
        return devices, np.array(free), device

    def ends(self, of: dict[int, int]) -> dict[int, int]:
        """Returns the root or tail task of each rank."""
        return {k: int(self.begin[k] + self.place[of[r]]) for k, r in enumerate(self.owner) if r in of}
