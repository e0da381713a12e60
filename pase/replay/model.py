"""From measured iterations to a graph that predicts one: durations and lags as medians, by task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pase.errors import PaseError
from pase.replay.graph import Carried, DataflowGraph, TaskQueue
from pase.replay.iterations import Iteration, iterations, warm_up
from pase.replay.matching import Match, match_collectives
from pase.replay.program import RankProgram, extract
from pase.replay.times import RankTimes, rank_times
from pase.replay.types import COLLECTIVE, Timeline

__all__ = ["Measured", "estimate", "measure"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A timeline taken apart: programs by (rank, iteration), and which collectives are shared."""

    timeline: Timeline
    programs: dict[tuple[int, int], RankProgram]
    matches: list[Match]
    gang_of_event: dict[int, tuple[object, ...]]
    """Event → key of the collective that at least two traced ranks share."""
    wait_ns: dict[int, float]
    """Shared collective's event → how long its rank waited for the latest one."""
    iteration_of: dict[tuple[int, int], Iteration]
    """(rank, number) → when that iteration began and ended, and whether its length is a measurement."""
    start_ns: dict[tuple[int, int], float]
    """(rank, iteration) → start of its step on the common clock."""

    @cached_property
    def measured_ns(self) -> dict[tuple[int, int], float]:
        """(rank, iteration) → measured length."""
        return {k: x.length_ns for k, x in self.iteration_of.items()}

    @cached_property
    def left_out(self) -> dict[int, str]:
        """Iteration → why it is no measurement of the steady run."""
        return warm_up(self.iteration_of)

    def iterations(self) -> list[int]:
        """Iterations that every rank has, in order."""
        ranks = {r for r, _ in self.programs}
        count = Counter(i for _, i in self.programs)
        return sorted(i for i, n in count.items() if n == len(ranks))

    def steady(self) -> list[int]:
        """Iterations that are measurements of the steady run: without warm-up, checkpoints, compiling, cut ones."""
        return [i for i in self.iterations() if i not in self.left_out]


def measure(t: Timeline) -> Measured:
    """Take an aligned timeline apart. PaseError where no rank has a whole iteration with device ops."""
    matches, _ = match_collectives(t)
    shared = [m for m in matches if len(m.members) > 1]
    wait, gang = _waits(t, shared)
    of = iterations(t)
    programs: dict[tuple[int, int], RankProgram] = {}
    begins: dict[tuple[int, int], float] = {}
    for mark in sorted(t.marks, key=lambda m: (m.rank, m.start_ns)):
        at = (mark.rank, mark.iteration)
        if at not in of or at in programs:
            continue
        programs[at] = extract(t, mark, programs.get((mark.rank, mark.iteration - 1)))
        begins[at] = float(t.clock(mark.rank).to_global(np.array([mark.start_ns]))[0])
    if not programs:
        raise PaseError(
            "no rank has a whole iteration with device ops, so there is nothing to replay; record the device as well "
            "(torch.profiler: ProfilerActivity.CUDA), from before a step to after it"
        )
    return Measured(
        timeline=t,
        programs=programs,
        matches=shared,
        gang_of_event=gang,
        wait_ns=wait,
        iteration_of=of,
        start_ns=begins,
    )


def _waits(t: Timeline, shared: list[Match]) -> tuple[dict[int, float], dict[int, tuple[object, ...]]]:
    """Of the events of shared collectives: how long each waited for the latest member, and which collective it is."""
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
    return wait, gang


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
    parts = [rank_times(m.programs, m.wait_ns, m.measured_ns, r, chosen) for r in ranks]
    return _join(m, parts, chosen, ranks)


def _join(m: Measured, parts: list[RankTimes], chosen: list[int], ranks: list[int]) -> DataflowGraph:
    names: dict[str, int] = {}
    devices: list[TaskQueue] = []
    gangs: dict[tuple[object, ...], int] = {}
    members: Counter[tuple[object, ...]] = Counter()
    columns: dict[str, list[np.ndarray]] = {
        k: [] for k in ("name", "kind", "device", "gang", "event", "release")
    }
    free: list[float] = []
    keys: list[object] = []
    edges: dict[str, list[np.ndarray]] = {k: [] for k in ("src", "dst", "lag", "kind", "carried")}
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
                devices.append(TaskQueue(rank=r, name=d[0], kind=d[1]))
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
        own = p.edges
        for k, v in (("src", own.src + base), ("dst", own.dst + base), ("lag", p.lag), ("kind", own.kind)):
            edges[k].append(v)
        edges["carried"].append(own.carried)
        if p.template.root >= 0:
            root[r] = base + p.template.root
        if p.template.tail >= 0:
            tail[r] = base + p.template.tail
        keys.extend(p.template.keys)
        base += n
    src, dst, lag, kind, carried = (np.concatenate(edges[k]) for k in edges)
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
        src=src[~carried],
        dst=dst[~carried],
        lag_ns=lag[~carried],
        edge_kind=kind[~carried],
        carried=Carried(src=src[carried], dst=dst[carried], lag_ns=lag[carried], kind=kind[carried]),
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
