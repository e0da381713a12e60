"""How well the replay predicts: each iteration from the others, never from itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pase.replay.graph import DataflowGraph, twins
from pase.replay.model import Measured, OwnTimes, own_times
from pase.replay.steady import evaluate, lengths_in_a_row

__all__ = ["HeldOut", "held_out", "held_out_ranks", "mean_lengths", "typical"]


_BETTER = 1.5


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One iteration of one rank, predicted without looking at it. Times in ns."""

    rank: int
    iteration: int
    measured_ns: float
    replayed_ns: float
    naive_ns: float
    """Mean length of the iterations that the prediction was made from: the guess without any replay."""

    @property
    def error(self) -> float:
        return self.replayed_ns / self.measured_ns - 1

    @property
    def naive_error(self) -> float:
        return self.naive_ns / self.measured_ns - 1


def held_out(m: Measured, iterations: list[int] | None = None, folds: int = 10) -> list[HeldOut]:
    """Predictions of the steady iterations: times and structure from the others, then compared.

    What is predicted of an iteration is the typical one of the others, each replayed with its own times (``typical``).
    Up to ``folds`` iterations each is predicted from all others; of more, each from those outside its fold (every
    folds-th iteration). With one iteration there is nothing to hold out, and the list is empty.
    """
    steady = m.steady() if iterations is None else iterations
    out: list[HeldOut] = []
    if len(steady) < 2:
        return out
    for fold in range(min(folds, len(steady))):
        left_out = steady[fold::folds]
        rest = [i for i in steady if i not in left_out]
        for rank, ns in _lengths(own_times(m, rest), typical).items():
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
    """Rank → mean length (ns) of the iterations replayed one after the other, each with its own times."""
    return _lengths(e, lambda of: float(of.mean()))


def _lengths(e: OwnTimes, one: Callable[[np.ndarray], float]) -> dict[int, float]:
    lengths = lengths_in_a_row(e.graph, e.own_ns, e.own_lag_ns)
    if lengths is None:
        return evaluate(e.graph)
    present = [r for r in e.graph.ranks if (e.graph.rank == r).any()]
    return {r: one(of) for r, of in zip(present, lengths.T, strict=True)}


def typical(lengths: np.ndarray) -> float:
    """What one more iteration is expected to take: the mean of those there are, or their median if that tells each of
    them better from the others by half (in the median of errors). A single long one pulls the mean; iterations of
    two kinds have no middle one.

    >>> typical(np.array([10.0, 10.1, 9.9, 10.0, 16.0])), typical(np.array([1.0, 3.0, 1.0, 3.0]))
    (10.0, 2.0)
    """
    others = [np.delete(lengths, k) for k in range(len(lengths))] if len(lengths) > 2 else []
    mean, median = (
        float(np.median(np.abs([one(x) for x in others] / lengths - 1))) if others else 0.0
        for one in (np.mean, np.median)
    )
    return float(np.median(lengths) if _BETTER * median < mean else lengths.mean())


def held_out_ranks(m: Measured, g: DataflowGraph, iterations: list[int]) -> list[HeldOut]:
    """Each rank predicted with the times of the other ranks only, over the mean of the iterations; empty for one rank.

    g: the graph of these iterations. What a rank alone does keeps its own times.
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
