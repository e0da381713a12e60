"""Models contention on CPUs: communication takes cores and memory bandwidth from compute, even if it overlaps.

gloo's workers copy, reduce and send on the cores that compute. The slowdown is measured in the trace, by comparing ops
of the same name and shape that run during a collective of their rank with ops that run without one. If a collective
becomes shorter, the ops that overlap with it become faster.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.measurement.breakdown import union
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE, KINDS, Timeline

__all__ = ["relieved", "slowdowns"]

_HOST = KINDS.index("host")
_INSIDE, _OUTSIDE = 0.9, 0.1
"""Limits on the fraction of an op's time that overlaps with collectives. From the first limit on, an op counts as
overlapped; up to the second one, it counts as alone."""
_SHORT_NS = 20_000
"""Shorter ops are ignored, because their times depend on the resolution of the clock."""
_SAMPLES = 3
"""The smallest number of ops of a name and shape, both overlapped and alone, that is used."""


def slowdowns(t: Timeline) -> dict[int, float]:
    """Returns rank → slowdown factor (at least 1) of its ops while gloo works for it.

    Ranks with a separate device are absent. So are ranks whose trace has no op of equal shape both overlapped with a
    collective and alone.
    """
    out: dict[int, float] = {}
    gloo = t.named(lambda name: name.startswith("gloo:"))
    for rank in t.ranks:
        mine = t.rank_of == rank
        sent = np.flatnonzero(mine & (t["kind"] == COLLECTIVE) & gloo)
        ops = np.flatnonzero(
            mine & (t["kind"] == _HOST) & (t["shape"] >= 0) & (t["duration_ns"] >= _SHORT_NS)
        )
        if not len(sent) or not len(ops):
            continue
        overlapped = _overlap(t["start_ns"][ops], t.end_ns[ops], union(t["start_ns"][sent], t.end_ns[sent]))
        share = overlapped / t["duration_ns"][ops]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for k, key in enumerate(zip(t["name"][ops].tolist(), t["shape"][ops].tolist(), strict=True)):
            groups[key].append(k)
        together = alone = 0.0
        for found in groups.values():
            length, of = t["duration_ns"][ops[found]], share[found]
            inside, outside = length[of >= _INSIDE], length[of <= _OUTSIDE]
            if min(len(inside), len(outside)) >= _SAMPLES:
                together += len(inside) * float(np.median(inside))
                alone += len(inside) * float(np.median(outside))
        if alone:
            out[rank] = max(together / alone, 1.0)
    return out


def relieved(t: Timeline, g: DataflowGraph, changed: DataflowGraph) -> DataflowGraph:
    """Returns ``changed`` (``g`` with other times of collectives) with the durations of overlapping ops adjusted.

    An op that runs at 1/s of its speed for o ns, because it overlaps with collectives, loses o(1 − 1/s) ns.
    """
    slow = slowdowns(t)
    if not any(s > 1 for s in slow.values()):
        return changed
    r = replay_graph(g)
    duration = changed.duration_ns.copy()
    for rank, s in slow.items():
        sent = np.flatnonzero((g.rank == rank) & (g.kind == COLLECTIVE) & (g.duration_ns > 0))
        work = np.flatnonzero((g.rank == rank) & (g.kind == _HOST) & (g.duration_ns > 0))
        if not len(sent) or not len(work):
            continue
        begin, end = r.finish_ns[sent] - g.duration_ns[sent], r.finish_ns[sent]
        any_of = _overlap(r.start_ns[work], r.finish_ns[work], union(begin, end))
        each = np.maximum(
            np.minimum(r.finish_ns[work][:, None], end) - np.maximum(r.start_ns[work][:, None], begin), 0.0
        )
        ratio = changed.duration_ns[sent] / g.duration_ns[sent]
        total = each.sum(axis=1)
        kept = np.where(total > 0, (each @ ratio) / np.where(total > 0, total, 1.0), 1.0)
        duration[work] = np.maximum(duration[work] - any_of * (1 - kept) * (1 - 1 / s), 0.0)
    return replace(changed, duration_ns=duration)


def _overlap(start: np.ndarray, end: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Returns the length of each [start, end) that overlaps with the disjoint sorted spans."""
    if not len(spans):
        return np.zeros(len(start))
    reached = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])

    def until(at: np.ndarray) -> np.ndarray:
        k = np.searchsorted(spans[:, 0], at, side="right")
        last = np.maximum(k - 1, 0)
        inside = np.minimum(at, spans[last, 1]) - spans[last, 0]
        return np.where(k > 0, reached[last] + inside, 0.0)

    return until(end) - until(start)
