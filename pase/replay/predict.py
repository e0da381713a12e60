"""How well the replay predicts: each iteration from the medians of the others, never from itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.model import Measured, estimate
from pase.replay.simulate import Replay, replay_graph
from pase.replay.types import GPU_KINDS

__all__ = ["HeldOut", "held_out", "rank_length_ns", "rank_lengths_ns"]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One iteration of one rank, predicted without looking at it. Times in ns."""

    rank: int
    iteration: int
    measured_ns: float
    replayed_ns: float
    others_median_ns: float
    """Median length of the iterations that the prediction was made from: the guess without any replay."""

    @property
    def error(self) -> float:
        return self.replayed_ns / self.measured_ns - 1


def rank_length_ns(g: DataflowGraph, r: Replay, rank: int) -> float:
    """Replayed length of a rank's iteration, by the same definition as its measured one.

    From the start of its root to the end of its tail where the step is marked on a thread, else from its
    first device op to its last.
    """
    if rank in g.root and rank in g.tail:
        return float(r.finish_ns[g.tail[rank]] - r.start_ns[g.root[rank]])
    mine = (g.rank == rank) & np.isin(g.kind, GPU_KINDS)
    return float(r.finish_ns[mine].max() - r.start_ns[mine].min()) if mine.any() else 0.0


def rank_lengths_ns(g: DataflowGraph, r: Replay) -> dict[int, float]:
    return {rank: rank_length_ns(g, r, rank) for rank in g.ranks}


def held_out(m: Measured, iterations: list[int] | None = None, folds: int = 10) -> list[HeldOut]:
    """Predictions of the steady iterations: times and structure from the others, then compared.

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
        g = estimate(m, rest)
        replayed = rank_lengths_ns(g, replay_graph(g))
        for rank, ns in replayed.items():
            others = [m.measured_ns[(rank, i)] for i in rest if (rank, i) in m.measured_ns]
            for k in left_out:
                if (rank, k) in m.measured_ns:
                    out.append(
                        HeldOut(
                            rank=rank,
                            iteration=k,
                            measured_ns=m.measured_ns[(rank, k)],
                            replayed_ns=ns,
                            others_median_ns=float(np.median(others)),
                        )
                    )
    return sorted(out, key=lambda p: (steady.index(p.iteration), p.rank))
