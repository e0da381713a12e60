"""A run without stragglers: no rank is later or slower than the median rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pase.replay.graph import EDGES, DataflowGraph, twins
from pase.replay.types import COLLECTIVE, GPU_KINDS

__all__ = ["balanced", "balanced_rows"]


def balanced(g: DataflowGraph) -> DataflowGraph:
    """Returns the graph in which no rank takes longer than the median rank, and none starts later than the first.

    A rank is slow if the sum of its tasks, on its host or its device, is longer than the median rank's. It is late if
    the sum of its delays is. Then its tasks (delays) that are longer than the median are shortened, so that their sum
    equals the median rank's. Sums are used because the shorter of two noisy times of a single task is not typical of
    any rank. For an even number of ranks, the median is the lower one of the two in the middle.
    """
    free, release = g.device_free_ns.copy(), g.release_ns.copy()
    groups = twins(g)
    of = np.full(len(g), -1, dtype=np.int64)
    work: _RankSums = {}
    for n, by_rank in enumerate(groups.values()):
        members = list(by_rank.values())
        of[members] = n
        if g.kind[members[0]] != COLLECTIVE:
            part = "device" if g.kind[members[0]] in GPU_KINDS else "host"
            work.setdefault((part, *sorted(by_rank)), []).append({r: [i] for r, i in by_rank.items()})
        release[members] = np.minimum(release[members], g.release_ns[members].min())

    def evened(dst: np.ndarray, kind: np.ndarray, lag: np.ndarray) -> np.ndarray:
        # Group by the waiting task, not by the awaited one, because a late rank may wait for another earlier op.
        into: dict[tuple[int, int], dict[int, list[int]]] = {}
        for e, (task, why) in enumerate(zip(dst.tolist(), kind.tolist(), strict=True)):
            if of[task] >= 0:
                into.setdefault((int(of[task]), why), {}).setdefault(int(g.rank[task]), []).append(e)
        waits: _RankSums = {}
        for (_, why), by in into.items():
            waits.setdefault((EDGES[why], *sorted(by)), []).append(by)
        return _as_the_median_rank(lag, waits)

    by_name: dict[str, list[int]] = {}
    for i, d in enumerate(g.devices):
        by_name.setdefault(d.name, []).append(i)
    for same in by_name.values():
        free[same] = g.device_free_ns[same].min()
    c = g.carried
    return replace(
        g,
        duration_ns=_as_the_median_rank(g.duration_ns, work),
        device_free_ns=free,
        release_ns=release,
        lag_ns=evened(g.dst, g.edge_kind, g.lag_ns),
        carried=replace(c, lag_ns=evened(c.dst, c.kind, c.lag_ns)),
        even=True,
    )


_RankSums = dict[tuple[object, ...], list[dict[int, list[int]]]]
"""(kind of time, ranks that have it) → a list of parts. A part maps each rank to the indices of its times, of which the
longest counts. The sums over all parts are compared between ranks."""


def _as_the_median_rank(ns: np.ndarray, shares: _RankSums) -> np.ndarray:
    """Returns the times, reduced so that no rank's sum exceeds the median rank's. No time increases."""
    out = ns.copy()
    for parts in shares.values():
        ranks = list(parts[0])
        if len(ranks) < 2:
            continue
        own = np.array([[ns[by[r]].max() for r in ranks] for by in parts])  # [parts, ranks]
        middle = (len(ranks) - 1) // 2
        usual, total = np.sort(own, axis=1)[:, middle], float(np.sort(own.sum(axis=0))[middle])
        for k in np.flatnonzero(own.sum(axis=0) > total).tolist():
            for by, most in zip(parts, _cut(own[:, k], usual, total), strict=True):
                out[by[ranks[k]]] = np.minimum(out[by[ranks[k]]], most)
    return out


def _cut(own: np.ndarray, usual: np.ndarray, total: float) -> np.ndarray:
    """Returns min(own, s · usual) with the s for which the sum is ``total``, which must be less than the sum of
    ``own``.

    >>> _cut(np.array([10.0, 4.0]), np.array([2.0, 4.0]), 9.0)
    array([5., 4.])
    """
    times = np.divide(own, usual, out=np.full(len(own), np.inf), where=usual > 0)
    order = np.argsort(times)
    below = np.concatenate(
        [[0.0], np.cumsum(own[order])[:-1]]
    )  # the sum of uncut times, if all from here on are cut
    rest = np.cumsum(usual[order][::-1])[::-1]
    s = np.divide(total - below, rest, out=np.full(len(own), np.inf), where=rest > 0)
    at = int(np.argmax(s <= times[order])) if (s <= times[order]).any() else len(own) - 1
    return np.minimum(own, np.multiply(usual, s[at], out=np.zeros(len(own)), where=usual > 0))


def balanced_rows(
    g: DataflowGraph, own_ns: np.ndarray, own_lag_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times of iterations, each balanced separately, because ranks that are late in turn are not late in
    the medians.

    own_ns: float64 [iterations, tasks]. own_lag_ns: float64 [iterations, edges].
    """
    rows = [
        balanced(replace(g, duration_ns=own, lag_ns=lag)) for own, lag in zip(own_ns, own_lag_ns, strict=True)
    ]
    return np.array([b.duration_ns for b in rows]), np.array([b.lag_ns for b in rows])
