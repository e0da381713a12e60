"""Why a run is slow: findings in plain words, each with what it costs and where to see it.

The cost of a finding is a counterfactual: the replayed iteration minus the replayed iteration without the cause.
Costs of different findings overlap, so they do not add up.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from pase.replay.analyse import RankUse, merged, overlap_ns, path_steps, rank_uses, waits_ns
from pase.replay.graph import EDGES, DataflowGraph
from pase.replay.model import Measured, estimate
from pase.replay.simulate import Replay, replay_graph
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, OPERATIONS
from pase.replay.whatif import apply, evaluate, split_cost

__all__ = ["Diagnosis", "Evidence", "Finding", "diagnose_run"]

_WORTH = 0.005
"""Findings that cost less than this share of the iteration are left out."""
_ALLOCATION = re.compile(r"^(cuda|hip)(Malloc|Free)(Async|Host)?$")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A stretch of the timeline to look at. Times in ns on the common clock."""

    rank: int
    name: str
    start_ns: float
    duration_ns: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One reason. cost_ns: how much shorter the iteration would be without it; 0 for a remark."""

    kind: str
    title: str
    detail: str
    cost_ns: float
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """All findings of a run, dearest first, with the replay that they rest on."""

    iteration_ns: float
    findings: tuple[Finding, ...]
    graph: DataflowGraph
    replay: Replay
    uses: tuple[RankUse, ...] = field(default=())


def diagnose_run(m: Measured) -> Diagnosis:
    """Findings about the steady iterations of a measured run."""
    g = estimate(m, m.steady())
    r = replay_graph(g)
    base = max(evaluate(g).values())
    uses = rank_uses(g, r)
    found: list[Finding] = []
    for look in (_launch_bound, _blocking, _exposed, _stragglers, _small_collectives, _hot_ops):
        found.extend(look(m, g, r, uses, base))
    found = [f for f in found if f.cost_ns >= _WORTH * base]
    found.sort(key=lambda f: -f.cost_ns)
    found.extend(_remarks(m, g))
    return Diagnosis(iteration_ns=base, findings=tuple(found), graph=g, replay=r, uses=tuple(uses))


def _saved(g: DataflowGraph, base: float) -> float:
    return max(0.0, base - max(evaluate(g).values()))


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f} ms"


def _event(m: Measured, g: DataflowGraph, task: int, name: str = "") -> Evidence | None:
    """Where the task's event stands in the trace; None for a task without one."""
    e = int(g.event[task])
    if e < 0:
        return None
    t = m.timeline
    clock = t.clock(int(g.rank[task]))
    a, b = clock.to_global(np.array([t["start_ns"][e], t.end_ns[e]], dtype=np.int64)).tolist()
    return Evidence(
        rank=int(g.rank[task]), name=name or g.task_name(task)[:120], start_ns=a, duration_ns=b - a
    )


def _some(evidence: list[Evidence | None]) -> tuple[Evidence, ...]:
    return tuple(e for e in evidence if e is not None)


def _launch_bound(
    m: Measured, g: DataflowGraph, r: Replay, uses: list[RankUse], base: float
) -> list[Finding]:
    launches = np.bincount(g.rank[g.dst[g.edge_kind == EDGES.index("launch")]], minlength=max(g.ranks) + 1)
    on_device = np.isin(g.kind, GPU_KINDS) & (g.kind != COLLECTIVE)
    if not launches.any() or not on_device.any():  # a run on CPUs launches nothing but collectives
        return []
    free = apply(g, [("host", "", 1e-6)])
    free = replace(free, lag_ns=np.where(g.edge_kind == EDGES.index("launch"), 0.0, free.lag_ns))
    cost = _saved(free, base)
    worst = max(uses, key=lambda u: u.idle_ns)
    # The device ops that waited longest for their launch.
    ops = np.flatnonzero(np.isin(g.kind, GPU_KINDS) & (g.rank == worst.rank))
    order = ops[np.argsort(r.start_ns[ops], kind="stable")]
    busy = np.maximum.accumulate(r.finish_ns[order])
    gaps = r.start_ns[order[1:]] - busy[:-1]
    top = order[1:][np.argsort(-gaps)[:3]]
    n = int(launches[worst.rank])
    busy_ns = worst.length_ns - worst.idle_ns
    return [
        Finding(
            kind="launch-bound",
            title=f"The CPU cannot launch fast enough: the device of rank {worst.rank} idles {_ms(worst.idle_ns)}",
            detail=(
                f"{n} launches an iteration, one every {worst.length_ns / max(n, 1) / 1e3:.0f} µs; the device "
                f"works {_ms(busy_ns)} of {_ms(worst.length_ns)}. With launches for free an iteration would take "
                f"{_ms(base - cost)}. Fuse small ops (torch.compile, fused optimizers), or capture a CUDA graph."
            ),
            cost_ns=cost,
            evidence=_some([_event(m, g, int(i), "idle before: " + g.task_name(int(i))[:80]) for i in top]),
        )
    ]


def _blocking(m: Measured, g: DataflowGraph, r: Replay, uses: list[RankUse], base: float) -> list[Finding]:
    sync = g.edge_kind == EDGES.index("sync")
    if not sync.any():
        return []
    keep = ~sync
    without = replace(g, src=g.src[keep], dst=g.dst[keep], lag_ns=g.lag_ns[keep], edge_kind=g.edge_kind[keep])
    calls = np.unique(g.dst[sync])
    names = Counter(g.task_name(int(i)) for i in calls)
    listed = ", ".join(f"{n} × {name}" for name, n in names.most_common(3))
    return [
        Finding(
            kind="blocking-calls",
            title=f"The CPU waits for the device {len(calls)} times an iteration",
            detail=(
                f"{listed}. Every wait drains the launch queue. Keep losses and metrics on the device "
                "(no .item(), no print), copy with non_blocking=True from pinned memory, read them some steps later."
            ),
            cost_ns=_saved(without, base),
            evidence=_some([_event(m, g, int(i)) for i in calls[:3]]),
        )
    ]


def _exposed(m: Measured, g: DataflowGraph, r: Replay, uses: list[RankUse], base: float) -> list[Finding]:
    comm = np.flatnonzero(g.kind == COLLECTIVE)
    if not len(comm):
        return []
    none = g.duration_ns.copy()
    none[comm] = 0.0
    cost = _saved(replace(g, duration_ns=none), base)
    slowest = max(uses, key=lambda u: u.exposed_ns)
    work = {
        k: merged(r.start_ns[w], r.finish_ns[w])
        for k in g.ranks
        for w in [np.isin(g.kind, GPU_KINDS) & (g.kind != COLLECTIVE) & (g.rank == k)]
    }
    exposed = np.zeros(len(comm))
    for j, i in enumerate(comm.tolist()):
        own = np.array([[r.start_ns[i], r.finish_ns[i]]])
        exposed[j] = r.finish_ns[i] - r.start_ns[i] - overlap_ns(own, work[int(g.rank[i])])
    exposed -= np.minimum(exposed, waits_ns(g, r)[comm])
    # One line for a collective, not one for each of its ranks.
    order = [int(i) for i in np.argsort(-exposed) if exposed[i] > 0]
    labels = dict.fromkeys(_label(g, int(comm[i])) for i in order)
    first = [next(i for i in order if _label(g, int(comm[i])) == name) for name in list(labels)[:3]]
    top = comm[first]
    which = "; ".join(f"{_label(g, int(comm[i]))} {_ms(float(exposed[i]))}" for i in first)
    return [
        Finding(
            kind="exposed-communication",
            title=(
                f"{_ms(slowest.exposed_ns)} of {_ms(slowest.communication_ns)} communication on rank "
                f"{slowest.rank} is not hidden behind compute"
            ),
            detail=(
                f"Exposed most: {which}. {slowest.overlapped:.0%} is hidden. Were all collectives free, an "
                f"iteration would take {_ms(base - cost)}. Start them earlier (smaller first buckets, prefetch), "
                "or move fewer bytes."
            ),
            cost_ns=cost,
            evidence=_some([_event(m, g, int(i)) for i in top]),
        )
    ]


def _label(g: DataflowGraph, i: int) -> str:
    name = g.task_name(i)
    short = OPERATIONS[int(g.operation[i])] if "ccl" in name else name
    size = f" of {g.nbytes[i] / 1e6:.1f} MB" if g.nbytes[i] >= 0 else ""
    mine = np.flatnonzero((g.kind == COLLECTIVE) & (g.rank == g.rank[i]))
    return f"{short} {int(np.searchsorted(mine, i)) + 1} of {len(mine)}{size}"


def _stragglers(m: Measured, g: DataflowGraph, r: Replay, uses: list[RankUse], base: float) -> list[Finding]:
    gangs = np.flatnonzero(r.latest >= 0)
    if not len(gangs) or len(g.ranks) < 2:
        return []
    last = g.rank[r.latest[gangs]]
    wait = waits_ns(g, r)
    caused: defaultdict[int, float] = defaultdict(float)
    for k, rank in zip(gangs.tolist(), last.tolist(), strict=True):
        caused[rank] += float(wait[g.gang == k].sum())
    rank, total = max(caused.items(), key=lambda x: x[1])
    share = total / max(sum(caused.values()), 1.0)
    cost = _saved(apply(g, [("balance", "", 1.0)]), base)
    waiting = max(uses, key=lambda u: u.waiting_ns)
    compute = {u.rank: u.compute_ns for u in uses}
    slow = compute.get(rank, 0.0) / max(float(np.median(list(compute.values()))), 1.0) - 1
    compared = f"; its compute takes {slow:+.1%} against the median rank" if any(compute.values()) else ""
    kind = "straggler" if share > 0.6 else "imbalance"
    title = (
        f"The others wait for rank {rank}: up to {_ms(waiting.waiting_ns)} on rank {waiting.rank}"
        if kind == "straggler"
        else f"Ranks wait for each other in turn: up to {_ms(waiting.waiting_ns)} on rank {waiting.rank}"
    )
    worst = np.argsort(-wait)[:3]
    return [
        Finding(
            kind=kind,
            title=title,
            detail=(
                f"Rank {rank} comes last at {int((last == rank).sum())} of {len(gangs)} collectives and causes "
                f"{share:.0%} of the waiting{compared}. With "
                f"balanced ranks an iteration would take {_ms(base - cost)}."
            ),
            cost_ns=cost,
            evidence=_some(
                [_event(m, g, int(i), "waits in " + g.task_name(int(i))[:80]) for i in worst if wait[i] > 0]
            ),
        )
    ]


def _small_collectives(
    m: Measured, g: DataflowGraph, r: Replay, uses: list[RankUse], base: float
) -> list[Finding]:
    fixed = split_cost(g)
    comm = g.kind == COLLECTIVE
    small = comm & (fixed > 0.5 * g.duration_ns)
    per_rank = np.bincount(g.rank[small], minlength=max(g.ranks) + 1)
    n = int(per_rank.max(initial=0))
    if n < 8:
        return []
    # Fused ten to one: a tenth of the fixed parts is left, and of the launches.
    duration = g.duration_ns.copy()
    duration[small] -= 0.9 * fixed[small]
    launch = np.isin(np.arange(len(g)), g.src[(g.edge_kind == EDGES.index("launch")) & small[g.dst]])
    duration[launch] *= 0.1
    return [
        Finding(
            kind="small-collectives",
            title=f"{n} small collectives an iteration, most of whose time is latency",
            detail=(
                f"They take {_ms(float(g.duration_ns[small].sum()) / len(g.ranks))} a rank, "
                f"{_ms(float(fixed[small].sum()) / len(g.ranks))} of it fixed cost. Fused ten to one an iteration "
                "would be shorter by the cost given. Use larger buckets (bucket_cap_mb, combine thresholds)."
            ),
            cost_ns=_saved(replace(g, duration_ns=duration), base),
            evidence=_some([_event(m, g, int(i)) for i in np.flatnonzero(small)[:3]]),
        )
    ]


def _hot_ops(m: Measured, g: DataflowGraph, r: Replay, uses: list[RankUse], base: float) -> list[Finding]:
    """The device op whose halving would help most, of the three that weigh most on the critical path."""
    weight: defaultdict[int, float] = defaultdict(float)
    for s in path_steps(g, r):
        if int(g.kind[s.task]) in GPU_KINDS and g.kind[s.task] != COLLECTIVE:
            weight[int(g.name[s.task])] += s.added_ns - s.lag_ns
    out = []
    for name, on_path in sorted(weight.items(), key=lambda x: -x[1])[:3]:
        mine = (g.name == name) & np.isin(g.kind, GPU_KINDS)
        duration = np.where(mine, 0.5 * g.duration_ns, g.duration_ns)
        first = np.flatnonzero(mine)
        out.append(
            Finding(
                kind="hot-op",
                title=f"{_ms(on_path)} of the critical path is {g.names[name][:80]}",
                detail=(
                    f"It runs {int(mine.sum()) // len(g.ranks)} times an iteration on each rank. The cost given is "
                    "what twice its speed would save."
                ),
                cost_ns=_saved(replace(g, duration_ns=duration), base),
                evidence=_some([_event(m, g, int(i)) for i in first[np.argsort(-g.duration_ns[first])[:2]]]),
            )
        )
    return out


def _remarks(m: Measured, g: DataflowGraph) -> list[Finding]:
    out = []
    t = m.timeline
    memory = np.flatnonzero((t["kind"] == KINDS.index("memory")) & (t["nbytes"] >= 0))
    if len(memory):
        top = memory[int(t["nbytes"][memory].argmax())]
        peak = int(t["nbytes"][top])
        at = float(t.global_start_ns()[top])
        rank = int(t.rank_of[top])
        out.append(
            Finding(
                kind="memory",
                title=f"Peak memory allocated: {peak / 2**30:.2f} GiB on rank {rank}",
                detail="As the framework's allocator reports it; reserved memory and other processes come on top.",
                cost_ns=0.0,
                evidence=(Evidence(rank=rank, name="peak memory", start_ns=at, duration_ns=0.0),),
            )
        )
    allocations = np.flatnonzero(
        np.array([bool(_ALLOCATION.match(n)) for n in t.names], dtype=bool)[t["name"]] & (t["iteration"] >= 0)
    )
    if len(allocations):
        spent = float(t["duration_ns"][allocations].sum()) / max(1, len(m.programs))
        out.append(
            Finding(
                kind="allocation",
                title=f"{len(allocations) / max(1, len(m.programs)):.0f} driver allocations in a steady iteration",
                detail=f"They take {_ms(spent)} an iteration and synchronise the device; let the allocator cache.",
                cost_ns=0.0,
            )
        )
    every, steady = m.iterations(), m.steady()
    odd = [i for i in every if i not in steady]
    if odd:
        length = {i: max(v for (_, k), v in m.measured_ns.items() if k == i) for i in every}
        usual = float(np.median([length[i] for i in steady]))
        shown = ", ".join(f"{i} ({_ms(length[i])})" for i in odd[:5])
        out.append(
            Finding(
                kind="unsteady",
                title=f"{len(odd)} of {len(every)} iterations are far slower than the usual {_ms(usual)}",
                detail=f"Iterations {shown}: warm-up, garbage collection, data loading, checkpoints. Not used above.",
                cost_ns=0.0,
            )
        )
    return out
