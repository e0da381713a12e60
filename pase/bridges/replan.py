"""Replays a traced run under another bucket plan: replaces collectives of the measured graph by the plan's messages.

The collectives that `pase schedule TRACES` may move (see ``pase.bridges.trace_profile``) are removed from the graph,
and the plan's messages are inserted. Compute, host launches, waits and all other collectives stay as measured.

- A message waits for everything that the collectives of its pieces waited for, and for one launch: the launch of the
  piece that is ready last. The launches of its other pieces cost nothing. If a collective is divided into several
  messages, each further message costs one more launch.
- A task that waited for a collective waits for every message that carries a piece of it. So the optimizer still waits
  for all of them.
- A stream sends its messages in the plan's order, with the gap between collectives that the run had. From the time at
  which its last rank is ready, a message takes the time given by the curve fitted to the stream's collectives.
- A fused message may have to wait for an op that itself waits for a piece of that message. The op's work is then moved
  behind the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.replay.changes.rewrite import Rewrite, Rewritten

if TYPE_CHECKING:
    from pase.replay.graph import DataflowGraph
    from pase.replay.simulation.simulate import Replay
    from pase.replay.types import Timeline
    from pase.schedule.plan import BucketPlan
    from pase.schedule.types import Link, ScheduleProblem

__all__ = ["as_measured", "by_policy", "replan", "what_if_bucket_plan"]


def what_if_bucket_plan(
    t: Timeline, g: DataflowGraph, policy: str = "ours", links: Sequence[Link] = ()
) -> Rewritten:
    """Returns the graph ``g``, estimated from ``t``, with its collectives as a policy of `pase schedule` sends them.

    policy: the name of the scheduling policy.
    links: replace the links fitted to the run. They also give sizes that the trace lacks, from durations.

    Its detail has the policy, the messages and the tensors; its control is the graph rewritten in the same way with the
    run's own plan, which separates the plan's gain from the error of the fitted curve. Raises PaseError if a size
    is unknown, the policy delays updates, or the ranks disagree; raises Infeasible if no collective can be moved.
    """
    from pase.bridges.trace_profile import problem_from_timeline
    from pase.schedule.registry import Options, get_policy
    from pase.schedule.simulate import as_sequence, evaluate

    chosen = get_policy(policy)
    problem = problem_from_timeline(t, links=links)
    if chosen.delays:
        raise PaseError(
            "this policy delays updates, which cannot be replayed from a trace",
            where=f"what-if bucket-plan={policy}",
            fix="choose a policy that does not delay updates",
        )
    if chosen.plain_only and not problem.is_plain:
        raise PaseError(
            "this policy handles only gradients, but the run has other collectives",
            where=f"what-if bucket-plan={policy}",
            fix="choose another policy",
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
    return Rewritten(graph=after.graph, control=control.graph, detail=detail)


def by_policy(policy: str, links: Sequence[Link] = ()) -> Rewrite:
    """Returns ``what_if_bucket_plan`` as a rewrite for ``pase.replay.reports.report.replay_report``.

    Raises PaseError if the policy is unknown.
    """
    from pase.schedule.registry import get_policy

    get_policy(policy)

    return partial(what_if_bucket_plan, policy=policy, links=links)


def as_measured(problem: ScheduleProblem) -> BucketPlan:
    """Returns the plan that the run used: each collective is its own message, in the order in which they started."""
    from pase.schedule.plan import BucketPlan, whole

    alone = tuple(whole(problem, [k]) for k in range(len(problem.tensors)))
    return BucketPlan(policy="as measured", messages=alone, barrier=True)


def replan(g: DataflowGraph, problem: ScheduleProblem, plan: BucketPlan) -> Rewritten:
    """Returns ``g`` with the tensors of ``problem`` (made from the same timeline) sent according to ``plan``."""
    from pase.replay import replay_graph
    from pase.replay.changes.coarse import coarsen

    if plan.staleness or plan.period != 1 or any(m.phase is not None for m in plan.messages):
        raise PaseError(
            "it delays updates, which cannot be replayed from a trace", where=f"bucket plan '{plan.policy}'"
        )
    tasks = _tasks(g, problem)  # [tensors, ranks]
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
    detail = {"messages": len(sent), "message_bytes": sent, "moved_behind": len(behind)}
    return Rewritten(graph=graph, detail=detail)


def _check_own_stream(g: DataflowGraph, moved: np.ndarray) -> None:
    """Raises PaseError if collectives share a stream with compute: moving them would reorder the compute, too."""
    from pase.replay.types import COLLECTIVE, on_stream

    for device in np.unique(g.device[moved]).tolist():
        here = (g.device == device) & on_stream(g.kind) & (g.kind != COLLECTIVE)
        if here.any():
            task = int(moved[g.device[moved] == device][0])
            raise PaseError(
                "this collective shares a stream with compute, as in XLA's programs for the CPU, so a bucket plan "
                "changes nothing",
                where=f"'{g.task_name(task)}' on rank {g.rank[task]}",
                fix="trace a run whose collectives have their own stream (NCCL, or PyTorch over gloo)",
            )


def _ready(g: DataflowGraph, r: Replay, is_moved: np.ndarray) -> np.ndarray:
    """Returns when the inputs of each moved collective are ready, ignoring its own stream; float64 [tasks], in ns."""
    from pase.replay.graph import EDGE

    ready = np.zeros(len(g))
    into = is_moved[g.dst] & (g.edge_kind != EDGE["stream"])
    np.maximum.at(ready, g.dst[into], r.finish_ns[g.src[into]] + g.lag_ns[into])
    return ready


def _tasks(g: DataflowGraph, problem: ScheduleProblem) -> np.ndarray:
    """Returns the task of each tensor on each rank, int64 [tensors, ranks].

    Tensors are named by their position among the first rank's collectives ("3 all_reduce"). The counterpart on another
    rank is the member of the same collective. If the rank is in another group, it is the collective of the same name
    and occurrence: the third "all-gather.3" corresponds to the third.
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
            "it belongs to another run, because it has more collectives than this one",
            where=f"profile '{problem.name}'",
            fix="make the profile from this run's traces",
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
                    f"it has no counterpart to collective {tensor.name} of rank {ranks[0]}; ranks that communicate "
                    f"differently (such as pipeline stages) cannot share a bucket plan",
                    where=f"rank {rank}",
                )
    return out


def _occurrences(g: DataflowGraph, tasks: np.ndarray) -> dict[int, tuple[str, int]]:
    """Returns task -> (its name, how many tasks of that name come before it)."""
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
    """Returns the new tasks as columns, and their task numbers by (message, column of ``tasks``)."""
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
    """Returns all edges of the new graph, and "behind": (op, task) pairs where the op's work moves into the task."""
    from pase.replay.graph import EDGE

    stream, wait = EDGE["stream"], EDGE["wait"]
    along = g.edge_kind == stream
    into, out = is_moved[g.dst], is_moved[g.src]
    keep = ~(along & (into | out)) & ~out
    rows: list[tuple[int, int, float, int]] = []
    # Connect the tasks before and after the collectives that were removed from a stream.
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
    """Adds edges from messages to the readers of their pieces to ``rows``.

    A reader that such an edge would put on a cycle gets none. Returns these readers as (op, task that does its work).
    """
    from pase.replay.graph import EDGE

    before: dict[int, list[int]] = {}
    for a, b in zip(g.src[keep].tolist(), g.dst[keep].tolist(), strict=True):
        before.setdefault(b, []).append(a)
    for a, b, _, kind in rows:
        if kind == EDGE["stream"] and b < len(g):
            before.setdefault(b, []).append(a)
    read: dict[int, list[tuple[int, float, int]]] = {}
    outward = is_moved[g.src] & (g.edge_kind != EDGE["stream"])
    for e in np.flatnonzero(outward).tolist():
        read.setdefault(int(g.src[e]), []).append((int(g.dst[e]), float(g.lag_ns[e]), int(g.edge_kind[e])))
    ahead: dict[int, set[int]] = {}  # per stream: all tasks that its messages so far depend on
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
    """Returns (op, target) for each op that must wait for a message: the target waits for that message.

    Raises PaseError if an op is not elementwise, because only elementwise work can be moved.
    """
    from pase.replay.changes.coarse import FUSIBLE
    from pase.replay.types import COLLECTIVE, GPU_KINDS

    out = []
    for task, message in behind:
        name = g.task_name(task)
        if g.kind[task] not in GPU_KINDS or g.kind[task] == COLLECTIVE:
            raise PaseError(
                "under this bucket plan it would wait for a message that waits for it",
                where=f"'{name}'",
                fix="choose another bucket plan",
            )
        if not FUSIBLE.search(name):
            raise PaseError(
                "under this bucket plan it would have to wait for a message that is sent after it, and it is not an "
                "elementwise op whose work could be moved",
                where=f"'{name}'",
                fix="choose another bucket plan",
            )
        target = next(
            (b for a, b, _, _ in rows if a == message and b < len(g) and g.kind[b] in GPU_KINDS), None
        )
        if target is None:
            raise PaseError(
                "under this bucket plan it waits for a message that no other op waits for, so its work cannot be moved",
                where=f"'{name}'",
                fix="choose another bucket plan",
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
    """Returns ``g`` with the new tasks. A removed collective becomes a task without duration that marks when it is
    ready, on a queue of its own."""
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
