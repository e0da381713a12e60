"""Tests how well the replay predicts: each iteration is predicted from the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pase.replay.graph import DataflowGraph, twins
from pase.replay.measurement.model import Measured, OwnTimes, own_times
from pase.replay.simulation.steady import evaluate, lengths_in_a_row

__all__ = ["HeldOut", "held_out", "held_out_ranks", "mean_lengths"]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One iteration of one rank, predicted from other iterations or ranks. Times are in ns."""

    rank: int
    iteration: int
    measured_ns: float
    replayed_ns: float
    naive_ns: float
    """The naive prediction without a replay: the mean length of the iterations from which the prediction was made."""

    @property
    def error(self) -> float:
        """The relative error of the replay; positive if it predicts too long a time."""
        return self.replayed_ns / self.measured_ns - 1

    @property
    def naive_error(self) -> float:
        return self.naive_ns / self.measured_ns - 1


def held_out(m: Measured, iterations: list[int] | None = None, folds: int = 10) -> list[HeldOut]:
    """Predicts the steady iterations, with times and structure from the other iterations.

    Up to ``folds`` iterations are each predicted from all others. If there are more, each is predicted from those
    outside its fold, which consists of every folds-th iteration. The list is empty if there is only one iteration.
    """
    steady = m.steady() if iterations is None else iterations
    out: list[HeldOut] = []
    if len(steady) < 2:
        return out
    for fold in range(min(folds, len(steady))):
        left_out = steady[fold::folds]
        rest = [i for i in steady if i not in left_out]
        for rank, ns in mean_lengths(own_times(m, rest)).items():
            others = [m.measured_ns[(rank, i)] for i in rest if (rank, i) in m.measured_ns]
            for k in left_out:
                if (rank, k) in m.measured_ns:
                    out.append(
                        HeldOut(
                            rank=rank,
                            iteration=k,
                            measured_ns=m.measured_ns[(rank, k)],
                            replayed_ns=ns,
                            naive_ns=float(np.mean(others)),
                        )
                    )
    return sorted(out, key=lambda p: (steady.index(p.iteration), p.rank))


def mean_lengths(e: OwnTimes) -> dict[int, float]:
    """Returns rank → mean length (ns) of the iterations, replayed consecutively, each with its own times.

    If they cannot be replayed so (``lengths_in_a_row``), it is the length of one iteration with median times.
    """
    lengths = lengths_in_a_row(e.graph, e.own_ns, e.own_lag_ns)
    if lengths is None:
        return evaluate(e.graph)
    present = [r for r in e.graph.ranks if (e.graph.rank == r).any()]
    return dict(zip(present, lengths.mean(axis=0).tolist(), strict=True))


def held_out_ranks(m: Measured, g: DataflowGraph, iterations: list[int]) -> list[HeldOut]:
    """Predicts the mean iteration of each rank from the times of the other ranks; empty if there is only one rank.

    Each task of the rank gets the median time of its twins, the same task on the other ranks. Tasks that only one rank
    has keep their own times. ``HeldOut.iteration`` is the first of the iterations.

    g: the graph of these iterations.
    """
    if len(g.ranks) < 2:
        return []
    groups = twins(g)
    mean = {r: float(np.mean([m.measured_ns[r, i] for i in iterations])) for r in g.ranks}
    out = []
    for rank in g.ranks:
        duration = g.duration_ns.copy()
        for by_rank in groups.values():
            others = [g.duration_ns[i] for r, i in by_rank.items() if r != rank]
            if rank in by_rank and others:
                duration[by_rank[rank]] = np.median(others)
        length = evaluate(replace(g, duration_ns=duration)).get(rank)
        if length is not None:
            naive = float(np.mean([v for r, v in mean.items() if r != rank]))
            out.append(
                HeldOut(
                    rank=rank,
                    iteration=iterations[0],
                    measured_ns=mean[rank],
                    replayed_ns=length,
                    naive_ns=naive,
                )
            )
    return out
