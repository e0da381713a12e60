"""Estimates the task graph of one iteration from measured iterations: durations and lags are medians for each task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pase.errors import PaseError
from pase.replay.graph import Carried, DataflowGraph, TaskQueue
from pase.replay.measurement.iterations import LONGER, Iteration, iterations, warm_up
from pase.replay.measurement.matching import Match, match_collectives
from pase.replay.measurement.program import RankProgram, extract
from pase.replay.measurement.times import RankTimes, rank_times
from pase.replay.types import COLLECTIVE, Timeline, on_stream

__all__ = ["Measured", "OwnTimes", "estimate", "measure", "own_times"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """An analysed timeline: programs by (rank, iteration), and the collectives that ranks share."""

    timeline: Timeline
    programs: dict[tuple[int, int], RankProgram]
    matches: list[Match]
    gang_of_event: dict[int, tuple[object, ...]]
    """Event → key of its collective, if at least two traced ranks share it."""
    wait_ns: dict[int, float]
    """Event of a shared collective → how long its rank waited for the latest rank."""
    iteration_of: dict[tuple[int, int], Iteration]
    """(rank, number) → that iteration's begin and end, and whether its length is a valid measurement."""
    start_ns: dict[tuple[int, int], float]
    """(rank, iteration) → start of its step on the common clock."""

    @cached_property
    def measured_ns(self) -> dict[tuple[int, int], float]:
        """(rank, iteration) → measured length in ns."""
        return {k: x.length_ns for k, x in self.iteration_of.items()}

    @cached_property
    def left_out(self) -> dict[int, str]:
        """Iteration → why it does not measure the steady run."""
        return warm_up(self.iteration_of)

    def iterations(self) -> list[int]:
        """Returns the iterations that every rank has, in order."""
        ranks = {r for r, _ in self.programs}
        count = Counter(i for _, i in self.programs)
        return sorted(i for i, n in count.items() if n == len(ranks))

    def steady(self) -> list[int]:
        """Returns the iterations that measure the steady run: no warm-up, checkpoints, compilation or cut ones."""
        return [i for i in self.iterations() if i not in self.left_out]

    def whole(self) -> list[int]:
        """Returns all well-measured iterations from the first steady one on, including much longer ones.

        They show the random variation of the step time.
        """
        first = min(self.steady(), default=0)
        late = [i for i, why in self.left_out.items() if why.endswith(LONGER) and i > first]
        return sorted([*self.steady(), *late])


def measure(t: Timeline) -> Measured:
    """Analyses an aligned timeline. Raises PaseError if no rank has a whole iteration with device ops."""
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
        raise _nothing(t)
    return Measured(
        timeline=t,
        programs=programs,
        matches=shared,
        gang_of_event=gang,
        wait_ns=wait,
        iteration_of=of,
        start_ns=begins,
    )


def _nothing(t: Timeline) -> PaseError:
    """Returns the error for a timeline without a usable iteration. What is wrong with its files may be the cause."""
    if on_stream(t["kind"]).any():
        what = "no rank has a complete iteration with device ops, so there is nothing to replay"
        fix = "record from before a step to after it"
    else:
        what = "the trace has no device op, so there is nothing to replay"
        fix = (
            "record the device too (torch.profiler: in addition to ProfilerActivity.CPU, the activity of your device, "
            "for example CUDA, XPU or MTIA; a run on CPUs needs its collectives)"
        )
    if t.problems:
        return PaseError(f"{what}; {t.problems[0]}", fix=f"mend that first; if it is not the cause, {fix}")
    return PaseError(what, fix=fix)


def _waits(t: Timeline, shared: list[Match]) -> tuple[dict[int, float], dict[int, tuple[object, ...]]]:
    """Returns how long each event of a shared collective waited for the latest member, and its collective's key."""
    start, end = t.to_global(t["start_ns"]), t.to_global(t.end_ns)
    wait: dict[int, float] = {}
    gang: dict[int, tuple[object, ...]] = {}
    for m in shared:
        events = list(m.members.values())
        latest = max(float(start[e]) for e in events)
        for e in events:
            gang[e] = m.key
            # A member begins its own work after the latest member has arrived, but before its own end.
            wait[e] = min(latest, float(end[e])) - float(start[e])
    return wait, gang


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnTimes:
    """The graph of one iteration, and the times of its tasks in each of the iterations from which it was made.

    own_ns: durations, float64 [iterations, tasks], in the order in which the iterations were given. If an iteration
    lacks a task, it has the median.
    own_lag_ns: lags, float64 [iterations, edges], likewise.
    plain_lag_ns: the same without delays whose cause is not in the trace.
    """

    graph: DataflowGraph
    own_ns: np.ndarray
    own_lag_ns: np.ndarray
    plain_lag_ns: np.ndarray


def estimate(m: Measured, iterations: Iterable[int], ranks: Iterable[int] | None = None) -> DataflowGraph:
    """Returns the graph of one iteration. Its times are medians over the given iterations only, for each task.

    The structure is that of a given iteration that has the most common set of tasks. Raises PaseError if a rank has
    none of the iterations.
    """
    return own_times(m, iterations, ranks).graph


def own_times(m: Measured, iterations: Iterable[int], ranks: Iterable[int] | None = None) -> OwnTimes:
    """Returns the graph as ``estimate`` does, with each iteration's own times."""
    chosen = list(iterations)
    if not chosen:
        have: dict[int, list[int]] = {}
        for r, i in sorted(m.programs):
            have.setdefault(r, []).append(i)
        listed = "; ".join(f"rank {r}: {v[:6]}" for r, v in list(have.items())[:4])
        raise PaseError(
            f"no iteration is complete on every rank; the ranks have {listed}",
            fix="if these are traces of different runs, give one run's folder, or one file",
        )
    ranks = sorted({r for r, _ in m.programs}) if ranks is None else sorted(ranks)
    parts = [rank_times(m.programs, m.wait_ns, m.measured_ns, r, chosen) for r in ranks]
    own = [_own(p.numbers, np.maximum(p.own, 0.0), p.duration, chosen) for p in parts]
    lags, plain = (
        [_own(p.numbers, x, p.lag, chosen)[:, ~p.edges.carried] for p, x in zip(parts, each, strict=True)]
        for each in ([p.own_lag for p in parts], [p.plain_lag for p in parts])
    )
    return OwnTimes(
        graph=_join(m, parts, chosen, ranks),
        own_ns=np.concatenate(own, axis=1),
        own_lag_ns=np.concatenate(lags, axis=1),
        plain_lag_ns=np.concatenate(plain, axis=1),
    )


def _own(numbers: tuple[int, ...], own: np.ndarray, usual: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Returns a rank's own values in each chosen iteration, or ``usual``. own: [numbers, values], NaN if unknown."""
    row = {i: k for k, i in enumerate(numbers)}
    known = np.array([own[row[i]] if i in row else usual for i in chosen])
    return np.where(np.isfinite(known), known, usual)


def _join(m: Measured, parts: list[RankTimes], chosen: list[int], ranks: list[int]) -> DataflowGraph:
    t, skew = m.timeline, _skews(m, chosen, ranks)
    joined = _JoinedRanks(m, parts)
    for r, p in zip(ranks, parts, strict=True):
        joined.add(r, p, skew[r])
    src, dst, lag, edge_kind, carried = (np.concatenate(x) for x in zip(*joined.edges, strict=True))
    gang, name, kind, device, event, release = (np.concatenate(x) for x in zip(*joined.tasks, strict=True))
    known = event >= 0
    operation = np.where(known & (kind == COLLECTIVE), t["operation"][event], 0)
    return DataflowGraph(
        devices=tuple(joined.devices),
        names=tuple(joined.names),
        name=name,
        kind=kind,
        device=device,
        duration_ns=np.concatenate([p.duration for p in parts]),
        src=src[~carried],
        dst=dst[~carried],
        lag_ns=lag[~carried],
        edge_kind=edge_kind[~carried],
        carried=Carried(src=src[carried], dst=dst[carried], lag_ns=lag[carried], kind=edge_kind[carried]),
        gang=gang,
        priority=np.zeros(len(event), dtype=np.int64),
        release_ns=release,
        nbytes=np.where(known, t["nbytes"][event], -1).astype(np.int64),
        operation=operation.astype(np.uint8),
        ways=_ways(t, event, gang),
        event=event,
        device_free_ns=np.array(joined.free),
        key=tuple(joined.keys),
        root=joined.root,
        tail=joined.tail,
        gangs=len(joined.gangs),
    )


class _JoinedRanks:
    """The tasks of all ranks under a common numbering.

    tasks: for each rank, its gangs, names, kinds, devices, events and release times.
    edges: for each rank, their sources, destinations, lags, kinds and whether they are carried over.
    """

    def __init__(self, m: Measured, parts: list[RankTimes]) -> None:
        self.gang_of_event = m.gang_of_event
        gangs = (m.gang_of_event[e] for p in parts for e in p.template.event if e in m.gang_of_event)
        self.members = Counter(gangs)
        self.names: dict[str, int] = {}
        self.gangs: dict[tuple[object, ...], int] = {}
        self.devices: list[TaskQueue] = []
        self.free: list[float] = []
        self.keys: list[object] = []
        self.root: dict[int, int] = {}
        self.tail: dict[int, int] = {}
        self.tasks: list[tuple[np.ndarray, ...]] = []
        self.edges: list[tuple[np.ndarray, ...]] = []

    def add(self, r: int, p: RankTimes, skew: float) -> None:
        """Adds a rank's tasks. skew: how much later than the earliest rank it begins, in ns."""
        own, base = p.template, len(self.keys)
        local: dict[tuple[str, str], int] = {}
        for d in own.device:
            if d not in local:
                local[d] = len(self.devices)
                self.devices.append(TaskQueue(rank=r, name=d[0], kind=d[1]))
                self.free.append(p.free.get(d[0], 0.0) + skew)
        gang = np.full(len(own.keys), -1, dtype=np.int64)
        for i, e in enumerate(own.event):
            key = self.gang_of_event.get(e)
            if key is not None and self.members[key] > 1:
                gang[i] = self.gangs.setdefault(key, len(self.gangs))
        names = [self.names.setdefault(x, len(self.names)) for x in own.name]
        self.tasks.append(
            (
                gang,
                np.array(names, dtype=np.int32),
                np.array(own.kind, dtype=np.uint8),
                np.array([local[d] for d in own.device], dtype=np.int64),
                np.array(own.event, dtype=np.int64),
                np.where(np.isfinite(p.release), p.release + skew, 0.0),
            )
        )
        self.edges.append((p.edges.src + base, p.edges.dst + base, p.lag, p.edges.kind, p.edges.carried))
        for ends, task in ((self.root, own.root), (self.tail, own.tail)):
            if task >= 0:
                ends[r] = base + task
        self.keys.extend(own.keys)


def _ways(t: Timeline, event: np.ndarray, gang: np.ndarray) -> np.ndarray:
    """Returns each collective's number of ranks: from its group, or the traced ranks that share it; 0 if unknown."""
    stated = np.array([len(g.ranks) for g in t.groups] + [0], dtype=np.int32)
    seen = np.append(np.bincount(gang[gang >= 0]), 0)[gang]
    group = np.where((event >= 0) & (t["kind"][event] == COLLECTIVE), t["group"][event], -1)
    return np.maximum(stated[group], seen).astype(np.int32)


def _skews(m: Measured, chosen: list[int], ranks: list[int]) -> dict[int, float]:
    """Returns how much later than the earliest rank each rank begins an iteration; median over the chosen ones."""
    tied = [r for r in ranks if math.isfinite(m.timeline.clock(r).uncertainty_ns)]
    late: dict[int, list[float]] = {r: [] for r in ranks}
    for i in chosen:
        at = {r: m.start_ns[(r, i)] for r in tied if (r, i) in m.start_ns}
        for r, s in at.items():
            late[r].append(s - min(at.values()))
    return {r: float(np.median(v)) if v else 0.0 for r, v in late.items()}
