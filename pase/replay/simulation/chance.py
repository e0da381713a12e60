"""What chance costs: each step waits for whichever of its ranks is slowest, so its mean is more than of medians.

A replay of medians knows no chance. Here many steps in a row are replayed, each rank's tasks as long in each step as
in an iteration of it drawn at random (all of a rank's tasks from one iteration, as what makes a step slow often lasts),
and the mean step is taken. More ranks than were traced are copies of those, each with draws of its own: the more of
them, the later the latest.
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
"""Steps until the first that counts, and steps that count."""


def spreads(m: Measured, g: DataflowGraph, chosen: Sequence[int]) -> np.ndarray:
    """Each task's time in each of these iterations over its median, float64 [iterations, tasks]; 1 where it was not
    measured.

    g: a graph that is estimated from some of the run's iterations. A collective's cost counts as its median: ranks
    share it, and what they wait for each other is what is asked for.
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
    """The mean step of so many ranks, in ns. None where chance cannot be told apart or the graph would be too large.

    spread: of ``spreads``, for this graph with whatever durations.
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
    """Tasks of a graph of so many ranks, which is made only if there are few enough."""
    each = [int((g.rank == r).sum()) for r in g.ranks]
    whole, rest = divmod(ranks, len(each))
    return whole * sum(each) + sum(each[:rest])


@dataclass(frozen=True, kw_only=True, eq=False)
class ManyRanks:
    """A graph whose rank k is a copy of a traced one. task: of each task, the one that it is a copy of."""

    graph: DataflowGraph
    task: np.ndarray


def with_ranks(g: DataflowGraph, ranks: int) -> ManyRanks | None:
    """So many ranks, in turns copies of the traced ones. None where ranks share no collective, or some of them only a
    part of all: whom a new rank would wait for is then not known."""
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
    """Ranks that are copies of traced ones. owner: of each, the traced rank; begin: its first task; place: of a traced
    task, which of its rank's it is."""

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
        """Every rank's edges, with what belongs to them."""
        rank_of = self.g.rank[src]
        columns: list[list[np.ndarray]] = [[] for _ in range(2 + len(more))]
        for first, owner in zip(self.begin[:-1], self.owner, strict=True):
            e = np.flatnonzero(rank_of == owner)
            ends = (first + self.place[src[e]], first + self.place[dst[e]])
            for column, x in zip(columns, (*ends, *(m[e] for m in more)), strict=True):
                column.append(x)
        return [np.concatenate(c) for c in columns]

    def devices(self) -> tuple[list[TaskQueue], np.ndarray, np.ndarray]:
        """Every rank's devices, when each is free, and the device of each task."""
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
        """Each rank's root or tail."""
        return {k: int(self.begin[k] + self.place[of[r]]) for k, r in enumerate(self.owner) if r in of}
