"""What if: the same iteration on another network, with faster ops, a lighter host, more ranks, no straggler."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pase.errors import PaseError
from pase.replay.graph import EDGES, DataflowGraph
from pase.replay.predict import rank_lengths_ns
from pase.replay.simulate import replay_graph
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, OPERATIONS

__all__ = ["KNOBS", "apply", "evaluate", "parse_knob", "split_cost", "unroll"]

KNOBS = {
    "bandwidth": "bandwidth=2: collectives move bytes twice as fast",
    "latency": "latency=0.5: the fixed part of a collective halves",
    "ranks": "ranks=128: collectives over as many ranks as that, ring rules",
    "host": "host=0.5: CPU work and driver calls take half the time",
    "op": "op:REGEX=0.5: device ops whose name matches take half the time",
    "balance": "balance=1: every rank computes as fast as the median rank",
}

_SMALL_NS = 20_000.0

_HOST_KINDS = (KINDS.index("host"), KINDS.index("runtime"))


def parse_knob(text: str) -> tuple[str, str, float]:
    """("op", "gemm", 0.5) from "op:gemm=0.5". PaseError where it is no knob.

    >>> parse_knob("bandwidth=2")
    ('bandwidth', '', 2.0)
    """
    head, eq, value = text.rpartition("=")
    name, _, pattern = head.partition(":")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not eq or name not in KNOBS or not 0 < number < float("inf") or (name == "op") != bool(pattern):
        others = "bucket-plan=POLICY: gradients as that policy sends them; strategy=LAYOUT: another strategy"
        raise PaseError(f"what-if '{text}': expected one of {'; '.join(KNOBS.values())}; {others}")
    if name == "op":
        try:
            re.compile(pattern)
        except re.error as e:
            raise PaseError(f"what-if '{text}': '{pattern}' is no regular expression ({e})") from e
    return name, pattern, number


def split_cost(g: DataflowGraph, wire_bytes_per_s: float | None = None) -> np.ndarray:
    """The fixed part (ns) of each collective's duration, 0 for other tasks; the rest scales with bytes.

    wire_bytes_per_s: what a rank's link carries each way, where that is known: the bytes that a collective puts on it,
    by ring rules, take so long; startups, copies and sums on the CPU are the rest. Collectives of a rank that run at
    the same time share its link: each scales by the part that the link's bytes have in the time of all of them.

    Else from a line through (bytes, duration) of the smaller collectives of that operation, where bytes are known
    and differ, and no more than the shortest of them takes. Else the trace cannot tell the two parts apart, and the
    shortest duration stands for the fixed part, but no more than 20 µs, which is what small NCCL messages take. At
    most the duration itself.
    """
    fixed = np.zeros(len(g))
    known_part = _on_the_wire(g, wire_bytes_per_s) if wire_bytes_per_s else np.full(len(g), np.nan)
    for operation in np.unique(g.operation[g.kind == COLLECTIVE]).tolist():
        mine = np.flatnonzero((g.kind == COLLECTIVE) & (g.operation == operation))
        d, b = g.duration_ns[mine], g.nbytes[mine].astype(np.float64)
        base = min(float(d.min()), _SMALL_NS)
        known = b >= 0
        if known.sum() >= 3 and np.unique(b[known]).size >= 3:
            small = known & (b <= np.median(b[known]))
            if np.ptp(b[small]) < 0.5 * b[small].max():
                small = known
            # Noise on sizes that hardly differ can put the line's start above what it was drawn through.
            base = min(_intercept(b[small], d[small], base), float(d[known].min()))
        fixed[mine] = np.minimum(d, max(base, 0.0))
    return np.where(np.isfinite(known_part), g.duration_ns * (1.0 - np.nan_to_num(known_part)), fixed)


def _on_the_wire(g: DataflowGraph, bytes_per_s: float) -> np.ndarray:
    """The part of each collective's time that bytes on its rank's link account for; NaN where sizes or ranks are not
    known, and for other tasks."""
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
        # A stretch without a moment at which none of them runs.
        fresh = np.append(True, begin[1:] >= np.maximum.accumulate(end)[:-1])
        stretch = np.cumsum(fresh) - 1
        span = np.maximum.reduceat(end, np.flatnonzero(fresh)) - begin[fresh]
        load = np.bincount(stretch, weights=sent[mine]) / bytes_per_s * 1e9
        part[mine] = np.minimum(load / span, 1.0)[stretch]
    return part


def _sent_bytes(g: DataflowGraph) -> np.ndarray:
    """What each collective puts on a rank's link, each way, by ring rules; NaN where its size or ranks are unknown."""
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
    """The graph with the knobs turned, one after the other. wire_bytes_per_s: see ``split_cost``."""
    for name, pattern, value in knobs:
        duration = g.duration_ns.copy()
        lag = g.lag_ns
        comm = g.kind == COLLECTIVE
        if name in ("bandwidth", "latency", "ranks"):
            fixed = split_cost(g, wire_bytes_per_s)
            moved = duration - fixed
            if name == "bandwidth":
                moved = moved / value
            elif name == "latency":
                fixed = fixed * value
            else:
                more, steps = _ring_growth(g, value)
                moved, fixed = moved * more, fixed * steps
            duration[comm] = (fixed + moved)[comm]
        elif name == "host":
            mine = np.isin(g.kind, _HOST_KINDS)
            duration[mine] *= value
            lag = np.where(g.edge_kind == EDGES.index("handoff"), lag * value, lag)
        elif name == "op":
            found = np.array([bool(re.search(pattern, n)) for n in g.names])[g.name]
            mine = found & np.isin(g.kind, GPU_KINDS)
            if not mine.any():
                raise PaseError(f"what-if op:{pattern}: no device op has a name that matches")
            duration[mine] *= value
        elif name == "balance":
            duration = _balanced(g)
        g = replace(g, duration_ns=duration, lag_ns=lag)
    return g


def _ring_growth(g: DataflowGraph, ranks: float) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the moved and the fixed part when a collective's group grows to ``ranks`` ranks.

    Ring: n−1 of n parts are moved (twice in an all-reduce), in n−1 steps. An all-gather and a
    reduce-scatter keep the size of their larger buffer.
    """
    more, steps = np.ones(len(g)), np.ones(len(g))
    mine = g.ways > 1
    n = np.where(mine, g.ways, 2).astype(np.float64)
    if (g.kind == COLLECTIVE).any() and not mine.any():
        raise PaseError("what-if ranks: the trace does not say how many ranks a collective joins")
    ring = mine & np.isin(g.operation, [OPERATIONS.index(o) for o in OPERATIONS[1:5]])
    more[ring] = ((ranks - 1) / ranks) / ((n[ring] - 1) / n[ring])
    steps[ring] = (ranks - 1) / (n[ring] - 1)
    return more, steps


def _balanced(g: DataflowGraph) -> np.ndarray:
    """Durations where each compute task takes the median of its twins on the other ranks."""
    twins: dict[object, list[int]] = {}
    for i, key in enumerate(g.key):
        if g.kind[i] != COLLECTIVE and isinstance(key, tuple):
            rank = int(g.devices[int(g.device[i])].rank)
            place = next((j for j, x in enumerate(key) if isinstance(x, int) and x == rank), -1)
            twins.setdefault((*key[:place], *key[place + 1 :]) if place >= 0 else key, []).append(i)
    duration = g.duration_ns.copy()
    for members in twins.values():
        duration[members] = np.median(g.duration_ns[members])
    return duration


def unroll(g: DataflowGraph, times: int) -> DataflowGraph:
    """``times`` iterations one after the other, where steps are marked on threads; else the graph itself.

    Each thread and stream goes on with the next iteration after the last task of this one.
    """
    if times < 2 or not g.root:
        return g
    n = len(g)
    offsets = np.arange(times)
    has_pred = np.zeros(n, dtype=bool)
    has_pred[g.dst] = True
    # Order within a device by the template's own replay.
    order = np.argsort(replay_graph(g).start_ns, kind="stable")
    device = g.device[order]
    first = {int(d): int(order[np.argmax(device == d)]) for d in np.unique(device)}
    last = {int(d): int(order[len(order) - 1 - np.argmax(device[::-1] == d)]) for d in np.unique(device)}
    extra: list[tuple[int, int, float]] = [(last[d], first[d], 0.0) for d in first]
    for rank, root in g.root.items():
        tail = g.tail.get(rank)
        if tail is None:
            continue
        begin = float(g.release_ns[root])
        extra.append((tail, root, 0.0))
        for i in np.flatnonzero(~has_pred & (g.rank == rank)).tolist():
            if i != root:
                extra.append((tail, i, max(0.0, float(g.release_ns[i]) - begin)))
    link = np.array([(a, b) for a, b, _ in extra], dtype=np.int64).reshape(-1, 2)
    cross = [(link + k * n) + [0, n] for k in range(times - 1)]
    src = np.concatenate([g.src + k * n for k in offsets] + [c[:, 0] for c in cross])
    dst = np.concatenate([g.dst + k * n for k in offsets] + [c[:, 1] for c in cross])
    lag = np.concatenate([np.tile(g.lag_ns, times), np.tile([x[2] for x in extra], times - 1)])
    kind = np.concatenate([np.tile(g.edge_kind, times), np.zeros(len(extra) * (times - 1), dtype=np.uint8)])
    copies: dict[str, Any] = {
        f: np.tile(getattr(g, f), times) for f in ("name", "kind", "device", "duration_ns", "priority")
    }
    copies |= {f: np.tile(getattr(g, f), times) for f in ("priority", "nbytes", "operation", "ways", "event")}
    release = np.zeros(n * times)
    release[:n] = g.release_ns
    return replace(
        g,
        **copies,
        gang=np.concatenate([np.where(g.gang >= 0, g.gang + k * g.gangs, -1) for k in offsets]),
        release_ns=release,
        src=src,
        dst=dst,
        lag_ns=lag,
        edge_kind=kind,
        key=g.key * times,
        gangs=g.gangs * times,
    )


def evaluate(g: DataflowGraph, times: int = 4) -> dict[int, float]:
    """Steady length (ns) of each rank's iteration: of the last of several in a row where steps are marked on
    threads, else of one on its own.

    In a row, an iteration ends when both its thread and its device are done, so that neither a CPU that runs
    ahead nor a device that lags behind hides the other.
    """
    long = unroll(g, times)
    if long is g:
        return rank_lengths_ns(g, replay_graph(g))
    r = replay_graph(long)
    finish = r.finish_ns.reshape(times, len(g))
    rank = g.rank
    out = {}
    for k in g.ranks:
        mine = rank == k
        if k in g.root and k in g.tail:
            out[k] = float(finish[-1, mine].max() - finish[-2, mine].max())
    return out
