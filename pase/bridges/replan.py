"""What if a traced run sent its gradients under another bucket plan: the measured graph with other collectives in it.

The collectives that `pase schedule TRACES` may move (see ``pase.bridges.trace_profile``) leave the graph; the plan's
messages come in. Compute, launching threads, waits and all other collectives stay as they were measured.

- A message waits for whatever the collectives that its pieces come from waited for, and for its launch: that of the
  piece that is ready last. The launches of the others cost nothing any more; each further part costs one more.
- What waited for a collective waits for every message that carries a piece of it: an optimizer still waits for all.
- A stream sends its messages in the plan's order, with the run's own gap between them; each takes as long as the
  curve fitted to the stream's collectives says, since its last rank was ready.
- Where a fused message would wait for an op that itself waits for a part of it, that op's work goes behind the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.errors import PaseError
from pase.files.json_values import JsonObject

if TYPE_CHECKING:
    from pase.replay.graph import DataflowGraph
    from pase.replay.reports.report import Rewrite
    from pase.replay.simulation.simulate import Replay
    from pase.replay.types import Timeline
    from pase.schedule.plan import BucketPlan
    from pase.schedule.types import Link, ScheduleProblem

__all__ = ["Replanned", "as_measured", "by_policy", "replan", "what_if_bucket_plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Replanned:
    """The graph under a plan, and what was done to reach it."""

    graph: DataflowGraph
    detail: JsonObject = field(default_factory=dict)


def what_if_bucket_plan(
    t: Timeline, g: DataflowGraph, policy: str = "ours", links: Sequence[Link] = ()
) -> Replanned:
    """The graph ``g`` estimated from ``t``, its collectives as the policy of `pase schedule` would send them.

    links: in place of those fitted to the run; they also give the sizes that a trace lacks, from durations.
    detail: policy, messages, tensors, and control: the same surgery with the plan that the run itself had, to tell
    what the plan gains from what the fitted curve is off by. PaseError where a size is unknown, the policy delays
    updates, or ranks disagree; Infeasible where no collective leaves a choice.
    """
    from pase.bridges.trace_profile import problem_from_timeline
    from pase.schedule.registry import Options, get_policy
    from pase.schedule.simulate import as_sequence, evaluate

    chosen = get_policy(policy)
    problem = problem_from_timeline(t, links=links)
    if chosen.delays:
        raise PaseError(
            f"what-if bucket-plan={policy}: this policy delays updates, which a trace cannot show"
        )
    if chosen.plain_only and not problem.is_plain:
        raise PaseError(
            f"what-if bucket-plan={policy}: this policy handles only gradients, and the run has other collectives"
        )
    own = as_measured(problem)
    made = chosen.make(problem, Options(warm_starts=(own,)))
    plan = as_sequence(problem, made)
    after = replan(g, problem, plan)
    control = replan(g, problem, own)
    detail = after.detail | {
        "policy": policy,
        "tensors": len(problem.tensors),
        "predicted_by_scheduler_s": evaluate(problem, made, timeline=False).iteration_s,
    }
    return Replanned(graph=after.graph, detail=detail | {"control": control.graph})


def by_policy(policy: str, links: Sequence[Link] = ()) -> Rewrite:
    """``what_if_bucket_plan`` as a change for ``pase.replay.reports.report.replay_report``. PaseError for an unknown
    policy."""
    from pase.schedule.registry import get_policy

    get_policy(policy)

    def change(t: Timeline, g: DataflowGraph) -> tuple[DataflowGraph, JsonObject]:
        made = what_if_bucket_plan(t, g, policy, links)
        return made.graph, dict(made.detail)

    return change


def as_measured(problem: ScheduleProblem) -> BucketPlan:
    """The plan that the run had: each collective on its own, in the order in which they started."""
    from pase.schedule.plan import BucketPlan, whole

    alone = tuple(whole(problem, [k]) for k in range(len(problem.tensors)))
    return BucketPlan(policy="as measured", messages=alone, barrier=True)


def replan(g: DataflowGraph, problem: ScheduleProblem, plan: BucketPlan) -> Replanned:
    """``g`` with the tensors of ``problem`` (made from the same timeline) sent as ``plan`` says."""
    from pase.replay import replay_graph
    from pase.replay.changes.coarse import coarsen

    if plan.staleness or plan.period != 1 or any(m.phase is not None for m in plan.messages):
        raise PaseError(f"bucket plan '{plan.policy}' delays updates, which a trace cannot show")
    tasks = _tasks(g, problem)  # [tensors, replicas of the plan], -1 where a rank lacks it
    moved = np.unique(tasks[tasks >= 0])
    _check_own_stream(g, moved)
    r = replay_graph(g)
    c = coarsen(g, r)
    is_moved = np.zeros(len(g), dtype=bool)
    is_moved[moved] = True
    launches = np.zeros(len(g))
    pieces = [[p.tensor for p in m.pieces] for m in plan.messages]
    new, owner = _messages(g, problem, plan, tasks)
    for m, column in zip(new["message"], new["column"], strict=True):
        mine = tasks[pieces[m], column]
        launches[mine[int(np.argmax(_ready(g, r, is_moved)[mine]))]] += 1
    edges = _edges(g, plan, tasks, is_moved, new, owner, pieces)
    duration = g.duration_ns.copy()
    for host in (c.launch, c.call):
        some = moved[host[moved] >= 0]
        duration[host[some]] *= launches[some]
    behind = edges.pop("behind")
    for task, target in behind:
        duration[target] += duration[task]
        duration[task] = 0.0
    duration[moved] = 0.0
    graph = _grown(g, duration, is_moved, new, edges)
    sent = [int(m.nbytes) for m in plan.messages]
    return Replanned(
        graph=graph, detail={"messages": len(sent), "message_bytes": sent, "moved_behind": len(behind)}
    )


def _check_own_stream(g: DataflowGraph, moved: np.ndarray) -> None:
    """PaseError where collectives share a stream with compute: moving them would move the compute between them."""
    from pase.replay.types import COLLECTIVE, on_stream

    for device in np.unique(g.device[moved]).tolist():
        here = (g.device == device) & on_stream(g.kind) & (g.kind != COLLECTIVE)
        if here.any():
            task = int(moved[g.device[moved] == device][0])
            raise PaseError(
                f"'{g.task_name(task)}' on rank {g.rank[task]} runs on the stream that computes, one op after the "
                f"other, as in XLA's programs for the CPU: a bucket plan changes nothing there. It needs a run whose "
                f"collectives have a stream of their own (NCCL, or PyTorch over gloo)"
            )


def _ready(g: DataflowGraph, r: Replay, is_moved: np.ndarray) -> np.ndarray:
    """When what a collective waits for has ended, the stream it is on left out; float64 [tasks]."""
    from pase.replay.graph import EDGES

    ready = np.zeros(len(g))
    into = is_moved[g.dst] & (g.edge_kind != EDGES.index("stream"))
    np.maximum.at(ready, g.dst[into], r.finish_ns[g.src[into]] + g.lag_ns[into])
    return ready


def _tasks(g: DataflowGraph, problem: ScheduleProblem) -> np.ndarray:
    """The task of each tensor on each rank, int64 [tensors, ranks].

    Tensors are named by their place among the first rank's collectives ("3 all_reduce"); other ranks have the members
    of the same collectives or, in another group, those of the same name: the third "all-gather.3" answers to the third.
    """
    from pase.replay import replay_graph
    from pase.replay.types import COLLECTIVE, OPERATIONS

    sends = g.kind == COLLECTIVE
    free = replay_graph(replace(g, duration_ns=np.where(sends, 0.0, g.duration_ns))).start_ns
    ranks = sorted(set(g.rank[sends].tolist()))
    by_rank = []
    for rank in ranks:
        mine = np.flatnonzero(sends & (g.rank == rank))
        by_rank.append(mine[np.argsort(free[mine], kind="stable")])
    place = [int(t.name.split()[0]) for t in problem.tensors]
    if place and place[-1] >= len(by_rank[0]):
        raise PaseError(
            f"profile '{problem.name}' belongs to another run: it has more collectives than this one"
        )
    first = by_rank[0][place]
    named = _occurrences(g, by_rank[0])
    out = np.full((len(place), len(ranks)), -1, dtype=np.int64)
    for j, (rank, mine) in enumerate(zip(ranks, by_rank, strict=True)):
        shared = {int(g.gang[i]): int(i) for i in mine if g.gang[i] >= 0}
        alike = {key: i for i, key in _occurrences(g, mine).items()}
        for k, i in enumerate(first.tolist()):
            other = shared.get(int(g.gang[i]), -1) if g.gang[i] >= 0 else -1
            if other < 0:
                other = alike.get(named[i], -1)
            out[k, j] = other
            tensor = problem.tensors[k]
            if other < 0 or OPERATIONS[int(g.operation[other])] != tensor.kind:
                raise PaseError(
                    f"rank {rank} has nothing that answers to collective {tensor.name} of rank {ranks[0]}: ranks that "
                    f"communicate differently (stages of a pipeline) cannot be given one bucket plan"
                )
    return out


def _occurrences(g: DataflowGraph, tasks: np.ndarray) -> dict[int, tuple[str, int]]:
    """Task -> (its name, how many of that name come before it)."""
    count: dict[str, int] = {}
    out = {}
    for i in tasks.tolist():
        name = g.task_name(i)
        out[i] = (name, count.get(name, 0))
        count[name] = out[i][1] + 1
    return out


def _messages(
    g: DataflowGraph, problem: ScheduleProblem, plan: BucketPlan, tasks: np.ndarray
) -> tuple[dict[str, list[Any]], dict[tuple[int, int], int]]:
    """The new tasks as columns, and their numbers by (message, column of ``tasks``)."""
    new: dict[str, list[Any]] = {
        k: []
        for k in (
            "message",
            "column",
            "device",
            "duration_ns",
            "gang",
            "priority",
            "nbytes",
            "operation",
            "ways",
        )
    }
    owner: dict[tuple[int, int], int] = {}
    lanes: dict[tuple[int, int], int] = {}
    for k in range(len(problem.tensors)):
        for link in problem.links_for(k)[:1]:
            for column, i in enumerate(tasks[k].tolist()):
                lanes.setdefault((link, column), int(g.device[i]))
    gangs: dict[tuple[int, int], int] = {}
    for m, message in enumerate(plan.messages):
        lead = message.pieces[0].tensor
        for column, i in enumerate(tasks[lead].tolist()):
            gang = int(g.gang[i])
            if gang >= 0:
                gang = gangs.setdefault((m, gang), g.gangs + len(gangs))
            owner[m, column] = len(g) + len(new["message"])
            row = {
                "message": m,
                "column": column,
                "device": lanes.get((message.link, column), int(g.device[i])),
                "duration_ns": problem.message_s(message.link, lead, message.nbytes) * 1e9,
                "gang": gang,
                "priority": int(g.priority[i]),
                "nbytes": message.nbytes,
                "operation": int(g.operation[i]),
                "ways": int(g.ways[i]),
            }
            for key, value in row.items():
                new[key].append(value)
    return new, owner


def _edges(
    g: DataflowGraph,
    plan: BucketPlan,
    tasks: np.ndarray,
    is_moved: np.ndarray,
    new: dict[str, list[Any]],
    owner: dict[tuple[int, int], int],
    pieces: Sequence[Sequence[int]],
) -> JsonObject:
    """All edges of the new graph, and which op's work goes behind which task."""
    from pase.replay.graph import EDGES

    stream, wait = EDGES.index("stream"), EDGES.index("wait")
    along = g.edge_kind == stream
    into, out = is_moved[g.dst], is_moved[g.src]
    keep = ~(along & (into | out)) & ~out
    rows: list[tuple[int, int, float, int]] = []
    # The stream closes over the collectives that have left it.
    after = {
        int(a): (int(b), float(x))
        for a, b, x in zip(g.src[along], g.dst[along], g.lag_ns[along], strict=True)
    }
    for e in np.flatnonzero(along & into & ~out).tolist():
        b: int | None = int(g.dst[e])
        lag = 0.0
        while b is not None and is_moved[b]:
            b, lag = after.get(b, (None, 0.0))
        if b is not None:
            rows.append((int(g.src[e]), b, lag, stream))
    own_gap = g.lag_ns[along & into & out]
    gap = float(np.median(own_gap)) if own_gap.size else 0.0
    last: dict[int, int] = {}
    for m, column, device in zip(new["message"], new["column"], new["device"], strict=True):
        here = owner[m, column]
        for i in tasks[pieces[m], column].tolist():
            rows.append((i, here, plan.messages[m].hold_s * 1e9, wait))
        if device in last:
            rows.append((last[device], here, gap, stream))
        last[device] = here
    behind = _readers(g, is_moved, tasks, new, owner, pieces, keep, rows)
    table = [np.array(x) for x in zip(*rows, strict=True)]
    return {
        "src": np.concatenate([g.src[keep], table[0]]).astype(np.int64),
        "dst": np.concatenate([g.dst[keep], table[1]]).astype(np.int64),
        "lag_ns": np.concatenate([g.lag_ns[keep], table[2]]),
        "edge_kind": np.concatenate([g.edge_kind[keep], table[3]]).astype(np.uint8),
        "behind": behind,
    }


def _readers(
    g: DataflowGraph,
    is_moved: np.ndarray,
    tasks: np.ndarray,
    new: dict[str, list[Any]],
    owner: dict[tuple[int, int], int],
    pieces: Sequence[Sequence[int]],
    keep: np.ndarray,
    rows: list[tuple[int, int, float, int]],
) -> list[tuple[int, int]]:
    """Adds edges from messages to what read their pieces; returns (op, where its work goes) where that is a circle."""
    from pase.replay.graph import EDGES

    before: dict[int, list[int]] = {}
    for a, b in zip(g.src[keep].tolist(), g.dst[keep].tolist(), strict=True):
        before.setdefault(b, []).append(a)
    for a, b, _, kind in rows:
        if kind == EDGES.index("stream") and b < len(g):
            before.setdefault(b, []).append(a)
    read: dict[int, list[tuple[int, float, int]]] = {}
    outward = is_moved[g.src] & (g.edge_kind != EDGES.index("stream"))
    for e in np.flatnonzero(outward).tolist():
        read.setdefault(int(g.src[e]), []).append((int(g.dst[e]), float(g.lag_ns[e]), int(g.edge_kind[e])))
    ahead: dict[int, set[int]] = {}  # per stream: what its messages so far cannot begin without
    behind: list[tuple[int, int]] = []
    done: set[tuple[int, int]] = set()
    for m, column, device in zip(new["message"], new["column"], new["device"], strict=True):
        seen = ahead.setdefault(device, set())
        todo = tasks[pieces[m], column].tolist()
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                todo.extend(before.get(i, ()))
        here = owner[m, column]
        for i in tasks[pieces[m], column].tolist():
            for b, lag, kind in read.get(i, ()):
                if (here, b) in done:
                    continue
                done.add((here, b))
                if b not in seen:
                    rows.append((here, b, lag, kind))
                elif not any(x == b for x, _ in behind):
                    behind.append((b, here))
    return _waiting_ops(g, behind, rows)


def _waiting_ops(
    g: DataflowGraph, behind: list[tuple[int, int]], rows: list[tuple[int, int, float, int]]
) -> list[tuple[int, int]]:
    """Where work that must wait for a message goes: into an op that waits for it; matrix products cannot go."""
    from pase.replay.changes.coarse import FUSIBLE
    from pase.replay.types import COLLECTIVE, GPU_KINDS

    out = []
    for task, message in behind:
        name = g.task_name(task)
        if g.kind[task] not in GPU_KINDS or g.kind[task] == COLLECTIVE:
            raise PaseError(f"under this bucket plan '{name}' would wait for a message that waits for it")
        if not FUSIBLE.search(name):
            raise PaseError(
                f"under this bucket plan '{name}' would have to wait for a message that is sent behind "
                "it, and it is not an elementwise op whose work could be moved"
            )
        target = next(
            (b for a, b, _, _ in rows if a == message and b < len(g) and g.kind[b] in GPU_KINDS), None
        )
        if target is None:
            raise PaseError(
                f"under this bucket plan nothing stands behind the message that '{name}' waits for"
            )
        out.append((task, target))
    return out


def _grown(
    g: DataflowGraph,
    duration: np.ndarray,
    is_moved: np.ndarray,
    new: dict[str, list[Any]],
    edges: dict[str, Any],
) -> DataflowGraph:
    """``g`` with the new tasks; what has left becomes a moment of its own, at which a piece is ready."""
    from pase.replay.graph import TaskQueue
    from pase.replay.types import COLLECTIVE, KINDS

    count = len(new["message"])
    ranks = sorted(set(g.rank[is_moved].tolist()))
    marker = {rank: len(g.devices) + k for k, rank in enumerate(ranks)}
    device = g.device.copy()
    device[is_moved] = [marker[k] for k in g.rank[is_moved].tolist()]
    labels = {m: f"bucket {m}" for m in new["message"]}
    numbers = {m: len(g.names) + k for k, m in enumerate(labels)}

    def column(name: str, fill: int) -> np.ndarray:
        old = np.where(is_moved, fill, getattr(g, name))
        return np.concatenate([old, new[name]]).astype(getattr(g, name).dtype)

    gang = column("gang", -1)
    return replace(
        g,
        devices=(*g.devices, *(TaskQueue(rank=k, name="ready", kind="stream") for k in ranks)),
        names=(*g.names, *labels.values()),
        name=np.concatenate([g.name, [numbers[m] for m in new["message"]]]).astype(g.name.dtype),
        kind=np.concatenate(
            [np.where(is_moved, KINDS.index("annotation"), g.kind), np.full(count, COLLECTIVE)]
        ).astype(g.kind.dtype),
        device=np.concatenate([device, new["device"]]).astype(g.device.dtype),
        duration_ns=np.concatenate([duration, new["duration_ns"]]),
        gang=gang,
        gangs=int(max(gang.max(initial=-1) + 1, g.gangs)),
        priority=np.concatenate([g.priority, new["priority"]]).astype(g.priority.dtype),
        release_ns=np.concatenate([g.release_ns, np.zeros(count)]),
        nbytes=column("nbytes", -1),
        operation=column("operation", 0),
        ways=column("ways", 0),
        event=np.concatenate([g.event, np.full(count, -1)]).astype(g.event.dtype),
        device_free_ns=np.concatenate([g.device_free_ns, np.zeros(len(ranks))]),
        key=(*g.key, *(("bucket", m, c) for m, c in zip(new["message"], new["column"], strict=True))),
        **edges,
    )
