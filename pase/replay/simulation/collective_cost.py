"""The parts of a measured collective's time: what is fixed, what the link takes, and the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE, OPERATIONS

__all__ = ["CollectiveParts", "WireLine", "collective_line", "split_cost"]

_SMALL_NS = 20_000.0


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveParts:
    """The parts of each collective's time, float64 [tasks] in ns; 0 for other tasks.

    The rest of the time is in neither part. It grows with the bytes, but a faster link does not shorten it: copies,
    reductions, and bandwidth that the collective does not use.
    """

    fixed_ns: np.ndarray
    """The startup, which is the time of a collective without bytes."""
    link_ns: np.ndarray
    """The part that is inversely proportional to the link's bandwidth."""


def split_cost(g: DataflowGraph, wire_bytes_per_s: float | None = None) -> CollectiveParts:
    """Returns the fixed part and the link's part of each collective's time.

    If bytes are known and differ, the fixed part comes from a line through (bytes, duration) of the smaller collectives
    of that operation, and is at most the shortest of them. Otherwise the trace cannot separate the two parts, and the
    fixed part is the shortest duration, but at most 20 µs, which is the time of small NCCL messages. It never exceeds
    the duration itself. All the rest is the link's part.

    wire_bytes_per_s: the bandwidth of a rank's link in each direction, if known. The link's part is then only the time
    for the bytes that a collective sends over the link (by the rules of a ring). Collectives of a rank that run at the
    same time share its link, and each gets the same fraction of its time.
    """
    fixed = np.zeros(len(g))
    for operation in np.unique(g.operation[g.kind == COLLECTIVE]).tolist():
        mine = np.flatnonzero((g.kind == COLLECTIVE) & (g.operation == operation))
        d, b = g.duration_ns[mine], g.nbytes[mine].astype(np.float64)
        base = min(float(d.min()), _SMALL_NS)
        known = b >= 0
        if known.sum() >= 3 and np.unique(b[known]).size >= 3:
            small = known & (b <= np.median(b[known]))
            if np.ptp(b[small]) < 0.5 * b[small].max():
                small = known
            # If sizes hardly differ, noise can make the intercept larger than the durations themselves.
            base = min(_intercept(b[small], d[small], base), float(d[known].min()))
        fixed[mine] = np.minimum(d, max(base, 0.0))
    link = np.where(g.kind == COLLECTIVE, g.duration_ns - fixed, 0.0)
    if wire_bytes_per_s:
        part = _on_the_wire(g, wire_bytes_per_s)
        link = np.where(np.isfinite(part), g.duration_ns * np.nan_to_num(part), link)
        fixed = np.minimum(fixed, np.where(g.kind == COLLECTIVE, g.duration_ns - link, 0.0))
    return CollectiveParts(fixed_ns=fixed, link_ns=link)


@dataclass(frozen=True, kw_only=True)
class WireLine:
    """The time of a message, from the run's own collectives."""

    step_ns: float
    """The fixed part of each step of a ring, from a rank to the next."""
    ns_per_wire_byte: float
    """The time per byte on a rank's link."""

    def all_reduce_ns(self, nbytes: float, ways: int) -> float:
        """Returns the time (ns) of a ring all-reduce."""
        return (ways - 1) * (self.step_ns + 2 * nbytes / ways * self.ns_per_wire_byte)


def collective_line(g: DataflowGraph) -> WireLine | None:
    """Fits the time of a message to the run's all-reduces whose size and ranks are known; None if there are none."""
    sent = _sent_bytes(g)
    of_sum = g.operation == OPERATIONS.index("all_reduce")
    mine = np.flatnonzero((g.kind == COLLECTIVE) & of_sum & np.isfinite(sent) & (np.nan_to_num(sent) > 0))
    if not len(mine):
        return None
    fixed = split_cost(g).fixed_ns[mine]
    per_byte = (g.duration_ns[mine] - fixed) / sent[mine]
    step = fixed / (g.ways[mine] - 1)
    return WireLine(step_ns=float(np.median(step)), ns_per_wire_byte=float(np.median(per_byte)))


def _on_the_wire(g: DataflowGraph, bytes_per_s: float) -> np.ndarray:
    """Returns the fraction of each collective's time that is due to bytes on its rank's link.

    It is NaN for other tasks, or if sizes or ranks are unknown.
    """
    part = np.full(len(g), np.nan)
    sent = _sent_bytes(g)
    r = replay_graph(g)
    for rank in g.ranks:
        mine = np.flatnonzero((g.kind == COLLECTIVE) & (g.rank == rank) & (g.duration_ns > 0))
        if not len(mine):
            continue
        begin = r.finish_ns[mine] - g.duration_ns[mine]
        order = np.argsort(begin, kind="stable")
        mine, begin, end = mine[order], begin[order], r.finish_ns[mine[order]]
        # Divide time into intervals in which at least one collective is always running.
        fresh = np.append(True, begin[1:] >= np.maximum.accumulate(end)[:-1])
        stretch = np.cumsum(fresh) - 1
        span = np.maximum.reduceat(end, np.flatnonzero(fresh)) - begin[fresh]
        load = np.bincount(stretch, weights=sent[mine]) / bytes_per_s * 1e9
        part[mine] = np.minimum(load / span, 1.0)[stretch]
    return part


def _sent_bytes(g: DataflowGraph) -> np.ndarray:
    """Returns the bytes of each collective on a rank's link per direction, for a ring; NaN if unknown."""
    n = np.where(g.ways > 1, g.ways, np.nan).astype(np.float64)
    passes = np.full(len(g), 1.0)
    for operation, times in (
        ("all_reduce", 2.0),
        ("all_gather", 1.0),
        ("reduce_scatter", 1.0),
        ("all_to_all", 1.0),
    ):
        passes = np.where(g.operation == OPERATIONS.index(operation), times * (n - 1) / n, passes)
    return np.where(g.nbytes >= 0, g.nbytes * passes, np.nan)


def _intercept(b: np.ndarray, d: np.ndarray, default: float) -> float:
    slope, at0 = np.polyfit(b, d, 1)
    return float(at0) if slope >= 0 and at0 >= 0 else default
