"""From measured iterations to a graph that predicts one: durations and lags as medians, by task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pase.errors import PaseError
from pase.replay.graph import EDGES, DataflowGraph, Device
from pase.replay.matching import Match, match_collectives
from pase.replay.program import Program, extract
from pase.replay.types import COLLECTIVE, GPU_KINDS, Timeline

__all__ = ["Measured", "estimate", "measure"]

_E = {k: i for i, k in enumerate(EDGES)}
_STEADY = 1.05
"""An iteration longer than this times the median of the shorter two thirds, and past their noise, is not steady."""

_INTO_OP = (_E["launch"], _E["stream"], _E["wait"])
_DEFAULT_LAG_NS = {_E["launch"]: 8_000.0, _E["stream"]: 1_000.0, _E["wait"]: 4_000.0}
"""Seen on V100 and A100 traces; used only where a trace shows no instance."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A timeline taken apart: programs by (rank, iteration), and which collectives are shared."""

    timeline: Timeline
    programs: dict[tuple[int, int], Program]
    matches: list[Match]
    gang_of_event: dict[int, tuple[object, ...]]
    """Event → key of the collective that at least two traced ranks share."""
    wait_ns: dict[int, float]
    """Shared collective's event → how long its rank waited for the latest one."""
    measured_ns: dict[tuple[int, int], float]
    """(rank, iteration) → measured length."""
    start_ns: dict[tuple[int, int], float]
    """(rank, iteration) → start on the common clock."""

    def iterations(self) -> list[int]:
        """Iterations that every rank has whole, in order."""
        ranks = {r for r, _ in self.programs}
        count = Counter(i for _, i in self.programs)
        return sorted(i for i, n in count.items() if n == len(ranks))

    def steady(self) -> list[int]:
        """Iterations without those that are far longer than usual: warm-up, checkpoints, compiling."""
        every = self.iterations()
        if len(every) < 3:
            return every
        length = np.array([max(v for (_, i), v in self.measured_ns.items() if i == k) for k in every])
        short = np.sort(length)[: max(3, (2 * len(length) + 2) // 3)]
        middle = float(np.median(short))
        noise = 1.4826 * float(np.median(np.abs(short - middle)))
        limit = middle + max((_STEADY - 1) * middle, 3 * noise)
        keep = [k for k, v in zip(every, length, strict=True) if v <= limit]
        return keep if len(keep) >= 2 else every


def measure(t: Timeline) -> Measured:
    """Take an aligned timeline apart. PaseError where no rank has a whole iteration with device ops."""
    matches, _ = match_collectives(t)
    shared = [m for m in matches if len(m.members) > 1]
    start, end = t.to_global(t["start_ns"]), t.to_global(t.end_ns)
    wait: dict[int, float] = {}
    gang: dict[int, tuple[object, ...]] = {}
    for m in shared:
        events = list(m.members.values())
        latest = max(float(start[e]) for e in events)
        for e in events:
            gang[e] = m.key
            # A member cannot begin to work before the latest has come, nor after its own end.
            wait[e] = min(latest, float(end[e])) - float(start[e])
    programs: dict[tuple[int, int], Program] = {}
    measured: dict[tuple[int, int], float] = {}
    begins: dict[tuple[int, int], float] = {}
    gpu = np.isin(t["kind"], GPU_KINDS)
    has_ops = {(int(r), int(i)) for r, i in zip(t.rank_of[gpu], t["iteration"][gpu], strict=True)}
    for mark in t.marks:
        at = (mark.rank, mark.iteration)
        if not mark.complete or at in programs or at not in has_ops:
            continue
        p = programs[at] = extract(t, mark)
        measured[at] = float(mark.end_ns - mark.start_ns)
        if p.root < 0 or p.tail < 0:
            # No thread shows where the step begins and ends: it is as long as its device is at work.
            ops = [i for i, d in enumerate(p.device) if d[1] == "stream"]
            measured[at] = float(max(p.end[i] for i in ops) - min(p.start[i] for i in ops))
        begins[at] = float(t.clock(mark.rank).to_global(np.array([mark.start_ns]))[0])
    if not programs:
        raise PaseError("no rank has a whole iteration with device ops, so there is nothing to replay")
    return Measured(
        timeline=t,
        programs=programs,
        matches=shared,
        gang_of_event=gang,
        wait_ns=wait,
        measured_ns=measured,
        start_ns=begins,
    )


def estimate(m: Measured, iterations: Iterable[int], ranks: Iterable[int] | None = None) -> DataflowGraph:
    """The graph of one iteration, with times from the given iterations (medians by task) and no others.

    The structure is that of the given iteration with the most common set of tasks. PaseError where an
    iteration is missing on a rank.
    """
    chosen = list(iterations)
    if not chosen:
        have: dict[int, list[int]] = {}
        for r, i in sorted(m.programs):
            have.setdefault(r, []).append(i)
        listed = "; ".join(f"rank {r}: {v[:6]}" for r, v in list(have.items())[:4])
        raise PaseError(
            f"no iteration is whole on every rank; the ranks have {listed}. Where these are traces of different "
            "runs, give one run's folder, or one file"
        )
    ranks = sorted({r for r, _ in m.programs}) if ranks is None else sorted(ranks)
    parts = [_rank_graph(m, r, chosen) for r in ranks]
    return _join(m, parts, chosen, ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    template: Program
    duration: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    lag: np.ndarray
    kind: np.ndarray
    release: np.ndarray
    free: dict[str, float]


def _rank_graph(m: Measured, rank: int, chosen: list[int]) -> _Part:
    programs = [m.programs[(rank, i)] for i in chosen if (rank, i) in m.programs]
    if not programs:
        raise PaseError(f"rank {rank} has none of the iterations {chosen}")
    sets = [hash(frozenset(p.keys)) for p in programs]
    common = Counter(sets).most_common(1)[0][0]
    candidates = [p for p, s in zip(programs, sets, strict=True) if s == common]
    template = sorted(candidates, key=lambda p: m.measured_ns[(rank, p.iteration)])[
        (len(candidates) - 1) // 2
    ]
    row = {k: i for i, k in enumerate(template.keys)}
    n = len(row)
    start = np.full((len(programs), n), np.nan)
    end = np.full((len(programs), n), np.nan)
    own = np.full((len(programs), n), np.nan)
    for k, p in enumerate(programs):
        spot = [(row[key], i) for i, key in enumerate(p.keys) if key in row]
        to, of = np.array(spot, dtype=np.int64).reshape(-1, 2).T
        s, e = np.array(p.start, dtype=float), np.array(p.end, dtype=float)
        work = e - s
        for call, op in p.blocked.items():
            work[call] = e[call] - max(e[op], s[call])
        for i, event in enumerate(p.event):
            if event in m.wait_ns:
                work[i] -= m.wait_ns[event]
        start[k, to], end[k, to], own[k, to] = s[of], e[of], work[of]
    duration = np.maximum(_median(own), 0.0)
    src, dst, kind = _checked_edges(template, start, end)
    lag = _lags(template, start, end, src, dst, kind)
    duration = _match_sums(template, duration, own)
    has_pred = np.zeros(n, dtype=bool)
    has_pred[dst] = True
    release = np.where(has_pred, -np.inf, np.maximum(_median(start), 0.0))
    streams = {d for d, k in template.device if k == "stream"}
    free = {d: float(np.median([p.busy_until.get(d, 0) for p in programs])) for d in streams}
    return _Part(
        template=template, duration=duration, src=src, dst=dst, lag=lag, kind=kind, release=release, free=free
    )


def _median(x: np.ndarray) -> np.ndarray:
    """Median of each column over its finite entries; every column has one."""
    if len(x) == 1:
        return x[0]
    ordered = np.sort(x, axis=0)
    count = np.isfinite(x).sum(axis=0)
    at = np.arange(x.shape[1])
    return 0.5 * (ordered[(count - 1) // 2, at] + ordered[count // 2, at])


def _match_sums(p: Program, duration: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Scale the work of each thread and stream so that its sum is the median of the measured sums.

    Noise is skewed: a sum of medians lies below the median of sums, by percents on a launch-bound thread.
    """
    whole = np.isfinite(own).all(axis=0)
    device = _numbered(p.device)
    out = duration.copy()
    for d in np.unique(device):
        mine = whole & (device == d)
        total = float(duration[mine].sum())
        if total > 0 and len(own) > 1:
            target = float(np.median(np.maximum(own[:, mine], 0.0).sum(axis=1)))
            out[device == d] *= min(max(target / total, 0.8), 1.25)
    return out


def _numbered(things: list[tuple[str, str]]) -> np.ndarray:
    """A number for each thing, equal for equal ones."""
    numbers: dict[tuple[str, str], int] = {}
    return np.array([numbers.setdefault(x, len(numbers)) for x in things])


def _checked_edges(
    p: Program, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The template's edges, without inferred waits that any measured iteration contradicts."""
    src = np.array([a for a, _ in p.edges], dtype=np.int64)
    dst = np.array([b for _, b in p.edges], dtype=np.int64)
    kind = np.array(list(p.edges.values()), dtype=np.uint8)
    inferred = np.isin(kind, (_E["wait"], _E["depth"], _E["sync"]))
    late = np.where(kind == _E["wait"], start[:, dst], end[:, dst]) - end[:, src]
    broken = inferred & np.nan_to_num(late < -1000.0, nan=False).any(axis=0)
    return src[~broken], dst[~broken], kind[~broken]


def _lags(
    p: Program, start: np.ndarray, end: np.ndarray, src: np.ndarray, dst: np.ndarray, kind: np.ndarray
) -> np.ndarray:
    """Lag of each edge. An op's start is explained by the one edge that bound it; only that one is a sample.

    launch: from the begin of the call to the start of the op on an idle stream. stream: the gap between two
    ops back to back. wait: the cost of an event. An edge that never bound gets the typical lag of its kind,
    but no more than it was seen to leave. An iteration that lacks one of an op's predecessors (an op that ran on
    another lane there) cannot tell which edge bound it, and is no sample.
    """
    delay = start[:, dst] - end[:, src]
    into = np.isin(kind, _INTO_OP)
    lag = np.zeros(len(src))
    other = ~into & (kind == _E["handoff"])
    if other.any():
        lag[other] = np.maximum(_median(delay[:, other]), 0.0)
    if not into.any():
        return lag
    stream = _numbered(p.device)[dst]
    typical = np.zeros(len(src))
    for k in _INTO_OP:
        these = into & (kind == k)
        # What no stream shows by itself is taken from all streams, and what none shows, from experience.
        overall = _typical(delay, these, into, dst)
        overall = _DEFAULT_LAG_NS[k] if overall is None else overall
        for s in np.unique(stream[these]):
            mine = these & (stream == s)
            own = _typical(delay, mine, into & (stream == s), dst)
            typical[mine] = overall if own is None else own
    # The binding edge of each op and iteration: the one that predicts the latest start.
    predicted = np.where(into, end[:, src] + typical, -np.inf)
    predicted = np.where(np.isfinite(predicted), predicted, -np.inf)
    bound = np.full((len(start), start.shape[1]), -np.inf)
    for k in range(len(start)):
        np.maximum.at(bound[k], dst, predicted[k])
    lacking = np.zeros(start.shape, dtype=bool)
    for k in range(len(start)):
        np.logical_or.at(lacking[k], dst, into & ~np.isfinite(delay[k]))
    binding = into & ~lacking[:, dst] & (predicted >= bound[:, dst]) & np.isfinite(predicted)
    sample = np.where(binding, np.maximum(delay, 0.0), np.nan)
    seen = binding.any(axis=0)
    at_most = np.where(np.isfinite(delay), np.maximum(delay, 0.0), np.inf).min(axis=0)
    lag = np.where(into, np.minimum(typical, at_most), lag)
    if seen.any():
        lag[seen] = _median(sample[:, seen])
    return lag


def _typical(delay: np.ndarray, these: np.ndarray, group: np.ndarray, dst: np.ndarray) -> float | None:
    """Median delay of the edges ``these`` where they were the last to be satisfied; None where they never were.

    Delays past a millisecond are waits for something that the trace does not show.
    """
    if not these.any():
        return None
    nearest = np.full((len(delay), int(dst.max()) + 1), np.inf)
    for k in range(len(delay)):
        np.minimum.at(nearest[k], dst[group], np.nan_to_num(delay[k, group], nan=np.inf))
    mine = delay[:, these]
    last = np.isfinite(mine) & (mine <= nearest[:, dst[these]])
    values = np.maximum(mine[last & (mine < 1e6)], 0.0)
    return float(np.median(values)) if len(values) else None


def _join(m: Measured, parts: list[_Part], chosen: list[int], ranks: list[int]) -> DataflowGraph:
    names: dict[str, int] = {}
    devices: list[Device] = []
    gangs: dict[tuple[object, ...], int] = {}
    members: Counter[tuple[object, ...]] = Counter()
    columns: dict[str, list[np.ndarray]] = {
        k: [] for k in ("name", "kind", "device", "gang", "event", "release")
    }
    free: list[float] = []
    keys: list[object] = []
    edges: dict[str, list[np.ndarray]] = {k: [] for k in ("src", "dst", "lag", "kind")}
    root: dict[int, int] = {}
    tail: dict[int, int] = {}
    t = m.timeline
    for p in parts:
        for e in p.template.event:
            if e in m.gang_of_event:
                members[m.gang_of_event[e]] += 1
    skew = _skews(m, chosen, ranks)
    base = 0
    for r, p in zip(ranks, parts, strict=True):
        local: dict[tuple[str, str], int] = {}
        for d in p.template.device:
            if d not in local:
                local[d] = len(devices)
                devices.append(Device(rank=r, name=d[0], kind=d[1]))
                free.append(p.free.get(d[0], 0.0) + skew[r])
        n = len(p.template.keys)
        gang = np.full(n, -1, dtype=np.int64)
        for i, e in enumerate(p.template.event):
            key = m.gang_of_event.get(e)
            if key is not None and members[key] > 1:
                gang[i] = gangs.setdefault(key, len(gangs))
        columns["gang"].append(gang)
        columns["name"].append(
            np.array([names.setdefault(x, len(names)) for x in p.template.name], dtype=np.int32)
        )
        columns["kind"].append(np.array(p.template.kind, dtype=np.uint8))
        columns["device"].append(np.array([local[d] for d in p.template.device], dtype=np.int64))
        columns["event"].append(np.array(p.template.event, dtype=np.int64))
        columns["release"].append(np.where(np.isfinite(p.release), p.release + skew[r], 0.0))
        for k, v in (("src", p.src + base), ("dst", p.dst + base), ("lag", p.lag), ("kind", p.kind)):
            edges[k].append(v)
        if p.template.root >= 0:
            root[r] = base + p.template.root
        if p.template.tail >= 0:
            tail[r] = base + p.template.tail
        keys.extend(p.template.keys)
        base += n
    event = np.concatenate(columns["event"])
    known = event >= 0
    nbytes = np.where(known, t["nbytes"][event], -1)
    operation = np.where(known & (np.concatenate(columns["kind"]) == COLLECTIVE), t["operation"][event], 0)
    return DataflowGraph(
        devices=tuple(devices),
        names=tuple(names),
        name=np.concatenate(columns["name"]),
        kind=np.concatenate(columns["kind"]),
        device=np.concatenate(columns["device"]),
        duration_ns=np.concatenate([p.duration for p in parts]),
        src=np.concatenate(edges["src"]),
        dst=np.concatenate(edges["dst"]),
        lag_ns=np.concatenate(edges["lag"]),
        edge_kind=np.concatenate(edges["kind"]),
        gang=np.concatenate(columns["gang"]),
        priority=np.zeros(base, dtype=np.int64),
        release_ns=np.concatenate(columns["release"]),
        nbytes=nbytes.astype(np.int64),
        operation=operation.astype(np.uint8),
        ways=_ways(t, event, np.concatenate(columns["gang"])),
        event=event,
        device_free_ns=np.array(free),
        key=tuple(keys),
        root=root,
        tail=tail,
        gangs=len(gangs),
    )


def _ways(t: Timeline, event: np.ndarray, gang: np.ndarray) -> np.ndarray:
    """Ranks that each collective joins: as its group says, else as many as the trace shows; 0 where neither does."""
    stated = np.array([len(g.ranks) for g in t.groups] + [0], dtype=np.int32)
    seen = np.append(np.bincount(gang[gang >= 0]), 0)[gang]
    group = np.where((event >= 0) & (t["kind"][event] == COLLECTIVE), t["group"][event], -1)
    return np.maximum(stated[group], seen).astype(np.int32)


def _skews(m: Measured, chosen: list[int], ranks: list[int]) -> dict[int, float]:
    """How much later than the earliest each rank begins the iteration, median over the chosen ones."""
    tied = [r for r in ranks if math.isfinite(m.timeline.clock(r).uncertainty_ns)]
    late: dict[int, list[float]] = {r: [] for r in ranks}
    for i in chosen:
        at = {r: m.start_ns[(r, i)] for r in tied if (r, i) in m.start_ns}
        for r, s in at.items():
            late[r].append(s - min(at.values()))
    return {r: float(np.median(v)) if v else 0.0 for r, v in late.items()}
