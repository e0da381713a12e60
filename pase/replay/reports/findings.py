"""Finds reasons for lost time, from the measured parts and the replay. There is one function per kind of finding."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.files.quantities import bytes_text
from pase.replay.changes.balance import balanced
from pase.replay.changes.whatif import apply
from pase.replay.graph import EDGE, DataflowGraph
from pase.replay.kernels import plain_name
from pase.replay.measurement.breakdown import Breakdown
from pase.replay.measurement.origins import user_name
from pase.replay.measurement.stragglers import Straggler
from pase.replay.reports.trust import Run, busiest_ns
from pase.replay.simulation.analyse import merged, overlap_ns, waits_ns
from pase.replay.simulation.collective_cost import split_cost
from pase.replay.simulation.simulate import replay_graph
from pase.replay.traces.gloo import WAIT as GLOO_WAIT
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, OPERATIONS, on_stream

__all__ = ["LOOKS", "Evidence", "Finding", "Scene", "exposed_tasks", "remarks"]

_ALLOCATION = re.compile(r"^(cuda|hip)(Malloc|Free)(Async|Host)?$")
_HALF = 0.45
"""An op that is twice as fast saves half of its time, unless something else then determines the iteration."""
_COUNTED = 0.01
"""A predicted gain that is larger than a finding's cost by more than this fraction of it is explained."""
_SHARE = 0.01
"""Measured parts below this fraction of the iteration do not become findings."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """An interval of the timeline that shows a finding. Times are in ns on the common clock."""

    rank: int
    name: str
    start_ns: float
    duration_ns: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One reason for lost time.

    cost_ns: how much shorter the replayed iteration would be without it; 0 if the replay shows no gain or is not
    trusted.
    measured_ns: the mean part of the measured iteration that it concerns; 0 for a remark.
    """

    kind: str
    title: str
    detail: str
    cost_ns: float = 0.0
    measured_ns: float = 0.0
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """The inputs of the findings."""

    run: Run
    parts: Sequence[Breakdown]
    late: Sequence[Straggler]

    @property
    def graph(self) -> DataflowGraph:
        return self.run.graph

    def saved(self, without: DataflowGraph, cause_ns: float) -> float:
        """Returns the time that the graph without a cause saves, at most the time of the cause.

        No change is faster than the work that it leaves to the busiest stream. 0 if the replay is not trusted.
        """
        if self.run.doubts:
            return 0.0
        then = max(self.run.changed_ns(without), busiest_ns(without))
        return min(max(0.0, self.run.replayed_ns - then), cause_ns)

    def would_take(self, when: str, without: DataflowGraph, cost_ns: float) -> str:
        """Returns a sentence: how long an iteration would take by the replay, which ``pase replay`` predicts, too.

        when: the condition. cost_ns: what the finding counts of the difference, which is at most the cause's own time.
        Empty if that is nothing.
        """
        if not cost_ns:
            return ""
        then = self.run.changed_ns(without)
        text = f" {when}, an iteration would take {_ms(then)}."
        if self.run.replayed_ns - then > (1 + _COUNTED) * cost_ns:
            text += f" Of this gain, {_ms(cost_ns)} are counted here: no more than the cause itself takes."
        return text

    def most(self, cause: str) -> Breakdown:
        """Returns the breakdown of the rank on which a cause takes the most time."""
        return max(self.parts, key=lambda b: b.mean_ns(cause))

    def event(self, e: int, name: str = "") -> Evidence:
        """Returns the location of an event in the trace."""
        t = self.run.measured.timeline
        rank = int(t.rank_of[e])
        a, b = t.clock(rank).to_global(np.array([t["start_ns"][e], t.end_ns[e]], dtype=np.int64)).tolist()
        return Evidence(
            rank=rank,
            name=name or plain_name(t.names[int(t["name"][e])])[:120],
            start_ns=a,
            duration_ns=b - a,
        )

    def tasks(self, tasks: Sequence[int], before: str = "") -> tuple[Evidence, ...]:
        """Returns the events of the tasks that have one."""
        g = self.graph
        return tuple(
            self.event(int(g.event[i]), before + plain_name(g.task_name(i))[:100] if before else "")
            for i in tasks
            if g.event[i] >= 0
        )


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f} ms"


def _times(n: float) -> str:
    return "Once" if n == 1 else f"{n:.3g} times"


def _launch_bound(s: Scene) -> list[Finding]:
    """Finds ops that the CPU launches too late."""
    g, b = s.graph, s.most("launch")
    idle = b.mean_ns("launch")
    into = g.edges_of("launch")
    n = int(((g.rank[g.dst] == b.rank) & into).sum())
    on_device = on_stream(g.kind) & (g.kind != COLLECTIVE)
    if not n or not on_device.any() or idle < _SHARE * b.iteration_ns:
        return []
    free = apply(g, "host=1e-6")
    free = replace(free, lag_ns=np.where(into, 0.0, free.lag_ns))
    cost = s.saved(free, idle)
    r = replay_graph(g)
    ops = np.flatnonzero(on_stream(g.kind) & (g.rank == b.rank))
    order = ops[np.argsort(r.start_ns[ops], kind="stable")]
    gaps = r.start_ns[order[1:]] - np.maximum.accumulate(r.finish_ns[order])[:-1]
    top = order[1:][np.argsort(-gaps)[:3]]
    return [
        Finding(
            kind="launch-bound",
            title=f"The CPU launches too slowly: the device of rank {b.rank} idles {_ms(idle)}",
            detail=(
                f"{n} launches per iteration, one every {b.iteration_ns / n / 1e3:.0f} µs; the device computes for "
                f"{_ms(b.mean_ns('compute'))} of {_ms(b.iteration_ns)}."
                f"{s.would_take('If the CPU launched in time', free, cost)} Fuse small ops (torch.compile, "
                "fused optimizers), or capture a CUDA graph."
            ),
            cost_ns=cost,
            measured_ns=idle,
            evidence=s.tasks(top.tolist(), "idle before: "),
        )
    ]


_UNBLOCK = (
    "Keep losses, metrics and sizes on the device (no .item(), no print), copy with non_blocking=True from and to "
    "pinned memory, and read results some steps later."
)
_WAITED = (
    "The thread waits for its collectives: start them earlier (smaller first buckets), or send fewer bytes."
)


def _blocking(s: Scene) -> list[Finding]:
    """Finds calls that block the CPU, by name and place. The cost is for all of them together."""
    g = s.graph
    sync = g.edges_of("sync")
    keep, carried = ~sync, g.carried.kind != EDGE["sync"]
    c = g.carried
    without = replace(
        g,
        src=g.src[keep],
        dst=g.dst[keep],
        lag_ns=g.lag_ns[keep],
        edge_kind=g.edge_kind[keep],
        carried=replace(
            c, src=c.src[carried], dst=c.dst[carried], lag_ns=c.lag_ns[carried], kind=c.kind[carried]
        ),
    )
    held = max((sum(x.total_ns for x in b.blocked) / len(b.iterations) for b in s.parts), default=0.0)
    cost = s.saved(without, held) if sync.any() or not carried.all() else 0.0
    out = []
    for b in s.parts:
        n = len(b.iterations)
        for x in [x for x in b.blocked if x.total_ns / n >= _SHARE * b.iteration_ns][:3]:
            where = f" in {x.where}" if x.where else ""
            out.append(
                Finding(
                    kind="blocking-calls",
                    title=(
                        f"{x.name[:90]} holds the CPU of rank {b.rank} for {_ms(x.total_ns / n)} of "
                        f"{_ms(b.iteration_ns)}"
                    ),
                    detail=(
                        f"{_times(x.count / n)} per iteration{where}, at most {_ms(x.longest_ns)} at a time; nothing "
                        f"is launched meanwhile. {_meanwhile(x.name, b, cost)}"
                    ),
                    cost_ns=cost,
                    measured_ns=x.total_ns / n,
                    evidence=(s.event(x.event),),
                )
            )
    out.sort(key=lambda f: -f.measured_ns)
    # All ranks run the same program, so report only the worst rank of each call.
    first = {f.title.split(" holds ")[0]: f for f in reversed(out)}
    return sorted(first.values(), key=lambda f: -f.measured_ns)[:3]


def _meanwhile(call: str, b: Breakdown, cost_ns: float) -> str:
    """Returns a text on what runs while a call blocks, and what to change. cost_ns: what blocking calls cost."""
    idle = b.mean_ns("blocking")
    much = idle >= _SHARE / 2 * b.iteration_ns
    if call == GLOO_WAIT:
        short = f"For {_ms(idle)} per iteration gloo is idle, too, as happens if threads outnumber cores."
        return f"{short if much else 'Gloo works meanwhile.'} {_WAITED}"
    if much:
        later = " Later ops are launched late, too, so the calls cost more." if cost_ns > idle else ""
        return f"The device idles {_ms(idle)} per iteration because blocking calls left it no work.{later} {_UNBLOCK}"
    return f"The device has enough queued work and does not idle: the CPU waits for the device. {_UNBLOCK}"


_ADVICE = {
    "allocator": (
        "The CPU sits in the driver's memory allocator",
        "cudaMalloc and cudaFree synchronise. Let the caching allocator grow before the loop, avoid empty_cache(), or "
        "set expandable segments.",
    ),
    "data": (
        "The device waits for data",
        "Use more loader workers, prefetch, and copy from pinned memory with non_blocking=True.",
    ),
    "unexplained": (
        "The device idles, and nothing in the trace shows why",
        "Do not trust what-ifs if this is large.",
    ),
}


def _other_idle(s: Scene) -> list[Finding]:
    """Finds idle time whose causes need no counterfactual replay."""
    out = []
    for cause, (title, advice) in _ADVICE.items():
        b = s.most(cause)
        idle = b.mean_ns(cause)
        if idle < _SHARE * b.iteration_ns:
            continue
        seen = Counter({w: v for (k, w), v in b.parts.items() if k == cause and w})
        why = "".join(f" {_ms(v / len(b.iterations))} of it {w}." for w, v in seen.most_common(2))
        out.append(
            Finding(
                kind=f"idle-{cause}",
                title=f"{title}: {_ms(idle)} of {_ms(b.iteration_ns)} on rank {b.rank}",
                detail=f"{why.strip()} {advice}".strip(),
                measured_ns=idle,
            )
        )
    return out


def _exposed(s: Scene) -> list[Finding]:
    """Finds exposed communication."""
    g = s.graph
    comm = np.flatnonzero(g.kind == COLLECTIVE)
    b = max(s.parts, key=lambda b: b.exposed_ns)
    if not len(comm) or b.exposed_ns < _SHARE / 2 * b.iteration_ns:
        return []
    none = g.duration_ns.copy()
    none[comm] = 0.0
    without = replace(g, duration_ns=none)
    cost = s.saved(without, b.exposed_ns)
    order, exposed = exposed_tasks(g, comm)
    labels = dict.fromkeys(_label(g, i) for i in order)
    first = [next(i for i in order if _label(g, i) == name) for name in list(labels)[:3]]
    which = "; ".join(f"{_label(g, i)} {_ms(exposed[i])}" for i in first)
    whole = b.communication_ns / len(b.iterations)
    free = s.would_take("If all collectives were free", without, cost)
    t = s.run.measured.timeline
    all_traced = {r for group in t.groups for r in group.ranks} <= {*t.ranks} and len(t.ranks) > 1
    waiting = (
        f"{_ms(b.mean_ns('rank'))} of it is waiting for other ranks."
        if all_traced
        else "How much of it is waiting for other ranks is unknown, because they are not all traced."
    )
    return [
        Finding(
            kind="exposed-communication",
            title=(
                f"{_ms(b.exposed_ns)} of {_ms(whole)} communication on rank {b.rank} is not overlapped with compute, "
                "on average of the iterations"
            ),
            detail=(
                f"Most exposed in the replay of a typical iteration: {which}. {waiting}{free} Start "
                "collectives earlier (smaller first buckets, prefetch), or send fewer bytes."
            ),
            cost_ns=cost,
            measured_ns=b.exposed_ns,
            evidence=s.tasks(first),
        )
    ]


def exposed_tasks(g: DataflowGraph, comm: np.ndarray) -> tuple[list[int], dict[int, float]]:
    """Returns the collectives by exposed time in the replay, most first, and those times without waiting."""
    r = replay_graph(g)
    waits = waits_ns(g, r)
    work = {
        k: merged(r.start_ns[w], r.finish_ns[w])
        for k in g.ranks
        for w in [on_stream(g.kind) & (g.kind != COLLECTIVE) & (g.rank == k)]
    }
    exposed: dict[int, float] = {}
    for i in comm.tolist():
        own = np.array([[r.start_ns[i], r.finish_ns[i]]])
        bare = r.finish_ns[i] - r.start_ns[i] - overlap_ns(own, work[int(g.rank[i])])
        exposed[i] = float(bare - min(bare, waits[i]))
    return [i for i in sorted(exposed, key=lambda i: -exposed[i]) if exposed[i] > 0] or comm[
        :1
    ].tolist(), exposed


def _label(g: DataflowGraph, i: int) -> str:
    name = g.task_name(i)
    short = OPERATIONS[int(g.operation[i])] if "ccl" in name else name
    size = f", {bytes_text(int(g.nbytes[i]))}" if g.nbytes[i] >= 0 else ""
    mine = np.flatnonzero((g.kind == COLLECTIVE) & (g.rank == g.rank[i]))
    return f"{short} ({int(np.searchsorted(mine, i)) + 1} of {len(mine)}{size})"


def _stragglers(s: Scene) -> list[Finding]:
    """Finds ranks that others wait for, from measured waits."""
    if len({b.rank for b in s.parts}) < 2 or not s.late:
        return []
    n = len(s.run.iterations)
    caused: defaultdict[int, float] = defaultdict(float)
    for x in s.late:
        caused[x.rank] += x.caused_ns / n
    rank, most = max(caused.items(), key=lambda x: x[1])
    # Waiting that overlaps with the rank's own compute costs nothing.
    worst = min(most, max(b.exposed_ns for b in s.parts if b.rank != rank))
    if worst < _SHARE / 2 * s.run.measured_ns:
        return []
    share = most / sum(caused.values())
    mine = [x for x in s.late if x.rank == rank]
    where = Counter(x.where for x in mine).most_common(1)[0][0]
    device, host = (float(np.mean([getattr(x, k) for x in mine])) for k in ("device_ns", "host_ns"))
    reason = {
        "device": f"its device computes {_ms(device)} longer than the median rank",
        "host": f"its host works {_ms(host)} longer than the median rank",
        "start": "neither its device nor its host works longer: it begins later",
    }[where]
    even = balanced(s.graph)
    cost = s.saved(even, worst)
    evened = s.would_take("With balanced ranks (--what-if balance=1)", even, cost)
    change = {
        "device": "Even out the work of the ranks (batch, sequence lengths), and check that device's clock and heat.",
        "host": "Check that host: data loading, logging, other programs, a slower CPU.",
        "start": "Nothing in the trace takes that time: check what that rank does between steps (a sleep, data that it "
        "waits for, checkpoints, other programs on its host).",
    }[where]
    if share <= 0.6:
        change = (
            "No rank is much later than the others: look for what varies from step to step on all of them (batches, "
            "other programs, clocks), and let them wait for each other less often."
        )
    last = sum(x.last for x in mine) / max(1, sum(x.of for x in mine))
    title = (
        f"The others wait for rank {rank}: up to {_ms(worst)} per iteration"
        if share > 0.6
        else f"Ranks wait for each other in turn, longest for rank {rank}: up to {_ms(worst)} per iteration"
    )
    return [
        Finding(
            kind="straggler" if share > 0.6 else "imbalance",
            title=title,
            detail=(
                f"Rank {rank} is late in {len(mine)} of {n} iterations and last at {last:.0%} of their collectives; "
                f"{reason}.{evened} {change}"
            ),
            cost_ns=cost,
            measured_ns=worst,
            evidence=_late_evidence(s, rank),
        )
    ]


def _late_evidence(s: Scene, rank: int) -> tuple[Evidence, ...]:
    """Returns the longest waits in collectives at which ``rank`` arrived last."""
    m = s.run.measured
    start = m.timeline.global_start_ns()
    waits: list[tuple[float, int]] = []
    for match in m.matches:
        if match.iteration in s.run.iterations:
            latest = max(match.members, key=lambda r: float(start[match.members[r]]))
            if latest == rank:
                waits.extend((m.wait_ns[e], e) for r, e in match.members.items() if r != rank)
    names = m.timeline.names
    top = sorted(waits, reverse=True)[:3]
    return tuple(s.event(e, "waits in " + plain_name(names[int(m.timeline["name"][e])])[:80]) for _, e in top)


def _small_collectives(s: Scene) -> list[Finding]:
    """Finds collectives whose time is mostly latency."""
    g = s.graph
    fixed = split_cost(g).fixed_ns
    comm = g.kind == COLLECTIVE
    small = comm & (fixed > 0.5 * g.duration_ns)
    per_rank = np.bincount(g.rank[small], minlength=max(g.ranks) + 1)
    n = int(per_rank.max(initial=0))
    if n < 8:
        return []
    # If ten are fused into one, a tenth of the fixed costs and of the launches is left.
    duration = g.duration_ns.copy()
    duration[small] -= 0.9 * fixed[small]
    launch = np.isin(np.arange(len(g)), g.src[g.edges_of("launch") & small[g.dst]])
    duration[launch] *= 0.1
    return [
        Finding(
            kind="small-collectives",
            title=f"{n} small collectives per iteration, whose time is mostly latency",
            detail=(
                f"They take {_ms(float(g.duration_ns[small].sum()) / len(g.ranks))} per rank, "
                f"{_ms(float(fixed[small].sum()) / len(g.ranks))} of it fixed cost. The cost of this finding is what "
                "fusing ten into one would save. Use larger buckets (bucket_cap_mb, combine thresholds)."
            ),
            cost_ns=s.saved(
                replace(g, duration_ns=duration), float((g.duration_ns - duration).sum()) / len(g.ranks)
            ),
            evidence=s.tasks(np.flatnonzero(small)[:3].tolist()),
        )
    ]


def _hot_ops(s: Scene) -> list[Finding]:
    """Finds the three device ops with the most time on the critical path, and what halving each would save."""
    g, t = s.graph, s.run.measured.timeline
    weight: defaultdict[int, float] = defaultdict(float)
    for step in s.run.replay.path():
        task = step.task % len(g)
        if int(g.kind[task]) in GPU_KINDS and g.kind[task] != COLLECTIVE:
            weight[int(g.name[task])] += step.added_ns - step.lag_ns
    out = []
    for name, on_path in sorted(weight.items(), key=lambda x: -x[1])[:3]:
        mine = (g.name == name) & on_stream(g.kind)
        cost = s.saved(
            replace(g, duration_ns=np.where(mine, 0.5 * g.duration_ns, g.duration_ns)), 0.5 * on_path
        )
        less = " That is less than half of its time: other ops, or the CPU, then take as long."
        first = np.flatnonzero(mine)
        out.append(
            Finding(
                kind="hot-op",
                title=f"{_ms(on_path)} of the critical path is {user_name(t, g.names[name])}",
                detail=(
                    # an op may be several: XLA clears a workspace before a product
                    "Running it twice as fast would save this. Device ops of this name per iteration and rank: "
                    f"{int(mine.sum()) // len(g.ranks)}." + (less if 0 < cost < _HALF * on_path else "")
                ),
                cost_ns=cost,
                evidence=s.tasks(first[np.argsort(-g.duration_ns[first])[:2]].tolist()),
            )
        )
    return out


def remarks(run: Run) -> list[Finding]:
    """Returns remarks that are worth knowing but have no cost."""
    out = []
    m = run.measured
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
                detail="As reported by the framework's allocator; reserved memory and other processes add to it.",
                evidence=(Evidence(rank=rank, name="peak memory", start_ns=at, duration_ns=0.0),),
            )
        )
    allocations = np.flatnonzero(t.named(_ALLOCATION.match) & (t["iteration"] >= 0))
    if len(allocations):
        spent = float(t["duration_ns"][allocations].sum()) / max(1, len(m.programs))
        out.append(
            Finding(
                kind="allocation",
                title=f"{len(allocations) / max(1, len(m.programs)):.0f} driver allocations in a steady iteration",
                detail=f"They take {_ms(spent)} per iteration and synchronise the device; let the allocator cache.",
            )
        )
    if m.left_out:
        shown = "; ".join(f"{i} ({_ms(run.length_ns(i))}): {why}" for i, why in list(m.left_out.items())[:5])
        out.append(
            Finding(
                kind="unsteady",
                title=f"{len(m.left_out)} of {len(m.iterations())} iterations are left out",
                detail=f"{shown}. The others: {_ms(run.measured_ns)} on average.",
            )
        )
    return out


LOOKS: tuple[Callable[[Scene], list[Finding]], ...] = (
    _launch_bound,
    _blocking,
    _other_idle,
    _exposed,
    _stragglers,
    _small_collectives,
    _hot_ops,
)
"""The functions that find reasons for lost time, each of one kind."""
