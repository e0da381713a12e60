"""Changes a measured graph: another network, faster ops, a faster host, more ranks, or no stragglers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pase.errors import Infeasible, PaseError, did_you_mean
from pase.replay.graph import EDGES, DataflowGraph, twins
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, OPERATIONS, on_stream

__all__ = [
    "KNOBS",
    "CollectiveParts",
    "WireLine",
    "apply",
    "balanced_rows",
    "collective_line",
    "parse_knob",
    "split_cost",
]

KNOBS = {
    "bandwidth": "bandwidth=2: collectives send bytes twice as fast",
    "latency": "latency=0.5: the fixed part of a collective halves",
    "ranks": "ranks=128: collectives over 128 ranks, by the rules of a ring",
    "data": "data=128: 128 data-parallel ranks, each with as many examples as now",
    "host": "host=0.5: CPU work and driver calls take half the time",
    "op": "op:REGEX=0.5: device ops whose name matches take half the time",
    "balance": "balance=1: no rank is later or slower than the median rank",
}

_SMALL_NS = 20_000.0

_HOST_KINDS = (KINDS.index("host"), KINDS.index("runtime"))


def parse_knob(text: str) -> tuple[str, str, float]:
    """Parses a knob: "op:gemm=0.5" becomes ("op", "gemm", 0.5). Raises PaseError if the text is not a knob.

    >>> parse_knob("bandwidth=2")
    ('bandwidth', '', 2.0)
    """
    head, eq, value = text.rpartition("=")
    name, _, pattern = head.partition(":")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    whole = name not in ("ranks", "data") or (number >= 1 and number == int(number))
    if (
        not eq
        or name not in KNOBS
        or not whole
        or not 0 < number < float("inf")
        or (name == "op") != bool(pattern)
    ):
        others = (
            "stages=P: P pipeline stages; tensor=N: tensor parallelism over N devices; "
            "bucket-plan=POLICY: gradients sent by that policy; strategy=LAYOUT: another strategy"
        )
        if name in KNOBS and number <= 0:
            raise PaseError(
                f"{value} is no factor: a time is multiplied or divided by a number above 0",
                where=f"what-if '{text}'",
                fix="give a small number instead, such as 0.001",
            )
        raise PaseError(
            f"not a known change{did_you_mean(name, KNOBS)}",
            where=f"what-if '{text}'",
            fix=f"give one of {'; '.join(KNOBS.values())}; {others}",
        )
    if name == "op":
        try:
            re.compile(pattern)
        except re.error as e:
            raise PaseError(
                f"'{pattern}' is not a regular expression ({e})", where=f"what-if '{text}'"
            ) from e
    return name, pattern, number


def _longest(g: DataflowGraph, among: np.ndarray) -> str:
    """An example for a message: the three names that take longest in all. among: which tasks count."""
    total = np.bincount(g.name[among], g.duration_ns[among], len(g.names))
    order = [k for k in np.argsort(-total, kind="stable")[:3].tolist() if total[k]]
    names = ", ".join(f"'{textwrap.shorten(g.names[k], 60)}'" for k in order)
    return f", such as {names}" if names else ""


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


def apply(
    g: DataflowGraph, knobs: Iterable[tuple[str, str, float]], wire_bytes_per_s: float | None = None
) -> DataflowGraph:
    """Returns the graph with the knobs applied, one after another. wire_bytes_per_s: see ``split_cost``.

    Raises PaseError if a knob matches no op or the numbers of ranks are unknown. Raises Infeasible if the change cannot
    be predicted from the trace.
    """
    for name, pattern, value in knobs:
        duration = g.duration_ns.copy()
        lag = g.lag_ns
        comm = g.kind == COLLECTIVE
        if name == "data":
            _check_one_group(g)
        if name in ("bandwidth", "latency", "ranks", "data"):
            parts = split_cost(g, wire_bytes_per_s)
            if name == "bandwidth":
                duration += parts.link_ns * (1 / value - 1)
            elif name == "latency":
                duration += parts.fixed_ns * (value - 1)
            else:
                more, steps = _ring_growth(g, value)
                grown = parts.fixed_ns * steps + (duration - parts.fixed_ns) * more
                duration = np.where(comm, grown, duration)
        elif name == "host":
            duration[np.isin(g.kind, _HOST_KINDS)] *= value
            hand = EDGES.index("handoff")
            lag = np.where(g.edge_kind == hand, lag * value, lag)
            c = g.carried
            g = replace(g, carried=replace(c, lag_ns=np.where(c.kind == hand, c.lag_ns * value, c.lag_ns)))
        elif name == "op":
            found = np.array([bool(re.search(pattern, n)) for n in g.names])[g.name]
            device = on_stream(g.kind)
            mine = found & device
            if not mine.any():
                raise PaseError(
                    "no device op has a name that matches",
                    where=f"what-if op:{pattern}",
                    fix=f"give a regular expression that matches a name in the trace{_longest(g, device)}",
                )
            duration[mine] *= value
        elif name == "balance":
            g = _balanced(g)
            continue
        g = replace(g, duration_ns=duration, lag_ns=lag)
    return g


def _check_one_group(g: DataflowGraph) -> None:
    """Raises Infeasible if collectives have different numbers of ranks, because some are then not over replicas."""
    ways = np.unique(g.ways[(g.kind == COLLECTIVE) & (g.ways > 1)])
    if len(ways) > 1:
        raise Infeasible(
            f"the run's collectives have groups of {', '.join(map(str, ways))} ranks, and the trace does not show "
            "which of them are replicas",
            where="what-if data",
            fix="give ranks= to change all of them",
        )


def _ring_growth(g: DataflowGraph, ranks: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of the bytes' part and of the fixed part if a collective's group changes to ``ranks`` ranks.

    A ring sends n−1 of n chunks (twice in an all-reduce), in n−1 steps. The larger buffer of an all-gather or a
    reduce-scatter keeps its size.
    """
    more, steps = np.ones(len(g)), np.ones(len(g))
    mine = g.ways > 1
    n = np.where(mine, g.ways, 2).astype(np.float64)
    if (g.kind == COLLECTIVE).any() and not mine.any():
        raise PaseError(
            "the trace does not have the number of ranks of any collective", where="what-if ranks"
        )
    ring = mine & np.isin(g.operation, [OPERATIONS.index(o) for o in OPERATIONS[1:5]])
    more[ring] = ((ranks - 1) / ranks) / ((n[ring] - 1) / n[ring])
    steps[ring] = (ranks - 1) / (n[ring] - 1)
    return more, steps


def _balanced(g: DataflowGraph) -> DataflowGraph:
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
        _balanced(replace(g, duration_ns=own, lag_ns=lag))
        for own, lag in zip(own_ns, own_lag_ns, strict=True)
    ]
    return np.array([b.duration_ns for b in rows]), np.array([b.lag_ns for b in rows])
