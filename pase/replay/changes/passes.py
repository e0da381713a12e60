"""The graph passes of the optimizer, and the changes that they propose.

``GraphChanges`` describes changes, and ``apply_plan`` applies them to a graph. Passes propose changes. To add a pass,
register a function:

    @graph_pass("half-gemm")
    def half_gemm(view): yield "16-bit matmuls", replace(view.plan, op_scale=(("gemm", 0.5),))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pase.registry import Registry
from pase.replay.changes.coarse import Coarse
from pase.replay.graph import DataflowGraph
from pase.replay.simulation.fine import best_parts
from pase.replay.simulation.simulate import Replay
from pase.replay.types import COLLECTIVE

__all__ = ["PASSES", "CollectiveCosts", "GraphChanges", "View", "apply_plan", "bucket_ns", "graph_pass"]


@dataclass(frozen=True, kw_only=True)
class GraphChanges:
    """Changes to a graph.

    bucket: (tensor number, number of the last tensor of its bucket), for fused tensors.
    parts: (last tensor of a bucket, number of parts in which it is sent).
    runs: the tasks of each fused run of ops.
    op_scale: (regular expression, factor) for the durations of device ops.
    """

    bucket: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    runs: frozenset[tuple[int, ...]] = frozenset()
    op_scale: tuple[tuple[str, float], ...] = ()

    def buckets(self, n: int) -> dict[int, list[int]]:
        """Returns last tensor → members of its bucket, for all n tensors."""
        to = dict(self.bucket)
        out: dict[int, list[int]] = {}
        for k in range(n):
            out.setdefault(to.get(k, k), []).append(k)
        return out


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveCosts:
    """The fixed part (ns) of each family's collectives, from the trace, and how they are synchronized (``scheme``)."""

    fixed_ns: dict[tuple[int, int, int], float]
    scheme: str = "ring"


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The input of a pass: the graph as measured and under the plan so far, its replay, and the critical path."""

    measured: DataflowGraph
    graph: DataflowGraph
    coarse: Coarse
    plan: GraphChanges
    replay: Replay
    critical: tuple[int, ...]
    network: CollectiveCosts


Proposals = Iterator[tuple[str, GraphChanges]]
PASSES: Registry[Callable[[View], Proposals]] = Registry("pass")
graph_pass = PASSES.register
"""Registers a pass: a function that takes a View and yields (description, changed plan), most promising first."""


def bucket_ns(g: DataflowGraph, c: Coarse, members: list[int], column: int, parts: int = 1) -> float:
    """Returns the duration (ns) of the members' tensors as one message: one fixed part, and the time of all bytes.

    column: the index of the tensors' tasks, which determines the rank.
    parts: the number of parts in which it is sent; each has the fixed part.
    """
    tasks = [c.tensors[k].tasks[column] for k in members]
    moved = sum(float(g.duration_ns[i] - c.fixed_ns[i]) for i in tasks)
    return max(float(c.fixed_ns[i]) for i in tasks) * parts + moved


def apply_plan(g: DataflowGraph, c: Coarse, plan: GraphChanges) -> DataflowGraph:
    """Returns the graph under the plan.

    In a bucket, all members but the last take no time, and nothing waits for them. The work of their consumers moves
    behind the last member. A fused run has one launch, and tasks that waited for an op in it wait for its end.
    """
    duration, lag, gang = g.duration_ns.copy(), g.lag_ns.copy(), g.gang.copy()
    for pattern, factor in plan.op_scale:
        duration[g.named(re.compile(pattern).search) & (g.kind != COLLECTIVE)] *= factor
    # Append an unused entry, so that the index −1 (no task or edge) has no effect.
    duration, lag = np.append(duration, 0.0), np.append(lag, 0.0)
    parts = dict(plan.parts)
    gone: list[int] = []
    for last, members in plan.buckets(len(c.tensors)).items():
        if len(members) == 1 and last not in parts:
            continue
        final = c.tensors[last]
        for column, task in enumerate(final.tasks):
            duration[task] = bucket_ns(g, c, members, column, parts.get(last, 1))
            after = final.consumers[column]
            for k in members[:-1]:
                gone.append(c.tensors[k].tasks[column])
                # Move the work of its consumers behind the bucket.
                for b in c.tensors[k].consumers[column] if after else ():
                    if b not in after:
                        duration[after[0]] += duration[b]
                        duration[b] = 0.0
    waits = g.edges_of("wait", "data")
    src = g.src
    if plan.runs:
        tail = np.array([i for run in plan.runs for i in run[1:]], dtype=np.int64)
        duration[c.launch[tail]] = 0.0
        duration[c.call[tail]] = 0.0
        lag[c.stream_edge[tail]] = 0.0
        end = np.arange(len(g))
        for run in plan.runs:
            end[list(run)] = run[-1]
        src = np.where(waits, end[src], src)
    keep = np.ones(len(g.src), dtype=bool)
    if gone:
        dead = np.array(gone, dtype=np.int64)
        duration[dead] = 0.0
        duration[c.launch[dead]] = 0.0
        duration[c.call[dead]] = 0.0
        gang[dead] = -1
        is_gone = np.zeros(len(g), dtype=bool)
        is_gone[dead] = True
        lag[:-1][is_gone[g.dst]] = 0.0
        keep = ~(is_gone[g.src] & waits)
    return replace(
        g,
        duration_ns=duration[:-1],
        gang=gang,
        src=src[keep],
        dst=g.dst[keep],
        lag_ns=lag[:-1][keep],
        edge_kind=g.edge_kind[keep],
    )


@graph_pass("tensor-fusion")
def tensor_fusion(view: View) -> Proposals:
    """Proposes to merge adjacent buckets, or to cut a bucket in two. Theorem 2 ranks the merges.

    Theorem 2: fuse q_{n−1} and q_n if the time by which q_{n−1} ends after p_n is longer than the time by which the
    fused tensor takes longer than q_n alone. In that case, q_n would have to wait for q_{n−1} anyway.
    """
    c, r = view.coarse, view.replay
    n = len(c.tensors)
    buckets = view.plan.buckets(n)
    order = sorted(buckets)
    scored = []
    for a, b in itertools.pairwise(order):
        one, two = c.tensors[a], c.tensors[b]
        if not c.may_join(buckets[a] + buckets[b]):
            continue
        together = bucket_ns(view.measured, c, buckets[a] + buckets[b], 0)
        alone = bucket_ns(view.measured, c, buckets[b], 0)
        producer = two.producers[0]
        ready = float(r.finish_ns[producer]) if producer >= 0 else 0.0
        gain = float(r.finish_ns[one.tasks[0]]) - ready - (together - alone)
        scored.append((gain > 0, gain, a, b))
    for holds, _, a, b in sorted(scored, reverse=True):
        why = "theorem 2 holds" if holds else "against theorem 2"
        moved = {**dict(view.plan.bucket), **dict.fromkeys(buckets[a], b)}
        yield f"fuse tensors {buckets[a][0]}..{a} with {b} ({why})", _with_buckets(view.plan, moved)
    # A cut can undo a merge, and the boundary between two buckets may move.
    for last, members in buckets.items():
        for cut in _spots(len(members)):
            moved = {**dict(view.plan.bucket), **dict.fromkeys(members[:cut], members[cut - 1])}
            yield (
                f"cut tensors {members[0]}..{last} after {members[cut - 1]}",
                _with_buckets(view.plan, moved),
            )
    for a, b in itertools.pairwise(order):
        both = buckets[a] + buckets[b]
        if len(both) > 2 and c.may_join(both):
            for cut in _spots(len(both)):
                moved = {**dict(view.plan.bucket), **dict.fromkeys(both[:cut], both[cut - 1])}
                moved |= dict.fromkeys(both[cut:], b)
                yield f"move the cut after {a} to after {both[cut - 1]}", _with_buckets(view.plan, moved)


def _spots(n: int) -> list[int]:
    """Returns up to 15 positions at which to cut n items in two, from the middle outwards."""
    some = range(1, n) if n <= 16 else sorted({n * k // 16 for k in range(1, 16)})
    return sorted(some, key=lambda k: abs(k - n / 2))


def _with_buckets(plan: GraphChanges, to: dict[int, int]) -> GraphChanges:
    return replace(plan, bucket=tuple(sorted(to.items())))


@graph_pass("tensor-partition")
def tensor_partition(view: View) -> Proposals:
    """Proposes to send a bucket in parts if dPRO's OptPartNum, a replay of its sends and receives, finds it faster.

    On a ring, parts only repeat the latency. With parameter servers, push and pull of different parts overlap.
    """
    c = view.coarse
    for last, members in view.plan.buckets(len(c.tensors)).items():
        t = c.tensors[last]
        nbytes = sum(c.tensors[k].nbytes for k in members)
        if nbytes <= 0 or t.family[1] < 2:
            continue
        fixed = view.network.fixed_ns.get(t.family, 0.0)
        tasks = [i for k in members for i in c.tensors[k].tasks[:1]]
        moved = float((view.measured.duration_ns - c.fixed_ns)[tasks].sum())
        if moved <= 0:
            continue
        ranks = t.family[1]
        rate = 2 * (ranks - 1) / ranks * nbytes / moved
        step = fixed / (2 * (ranks - 1))
        k, _ = best_parts(
            float(nbytes), ranks=ranks, latency_ns=step, bytes_per_ns=rate, scheme=view.network.scheme
        )
        if k > 1 and dict(view.plan.parts).get(last) != k:
            parts = {**dict(view.plan.parts), last: k}
            yield f"send tensor {last} in {k} parts", replace(view.plan, parts=tuple(sorted(parts.items())))


@graph_pass("op-fusion")
def op_fusion(view: View) -> Proposals:
    """Proposes to fuse runs of fusible ops on a stream, which then have one launch and no gaps.

    Theorem 1: a run may extend beyond an op that a collective waits for only if the collective takes no longer than the
    fusion saves. By symmetry, a run is fused wherever the same sequence of ops occurs.
    """
    g, c = view.graph, view.coarse
    taken = {i for run in view.plan.runs for i in run}
    families: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for run in _runs(view):
        if not taken.intersection(run):
            families.setdefault(tuple(c.signature[list(run)].tolist()), []).append(run)
    critical = set(view.critical)

    def gain(runs: list[tuple[int, ...]]) -> float:
        total = 0.0
        for run in runs:
            hosts = [int(h) for i in run[1:] for h in (c.launch[i], c.call[i]) if h >= 0]
            on_path = sum(h in critical for h in hosts) + sum(i in critical for i in run)
            total += float(g.duration_ns[hosts].sum()) * (0.1 + on_path)
        return total

    for runs in sorted(families.values(), key=gain, reverse=True):
        size = sum(len(x) for x in runs)
        name = g.task_name(runs[0][0])[:40]
        yield (
            f"fuse {size} ops in {len(runs)} runs that begin with {name}",
            replace(view.plan, runs=view.plan.runs | frozenset(runs)),
        )


def _runs(view: View) -> list[tuple[int, ...]]:
    """Returns the longest runs of fusible ops, cut where theorem 1 does not allow a collective to be delayed."""
    g, c, r = view.graph, view.coarse, view.replay
    waits = g.edges_of("wait", "data")
    produces = {
        int(a): int(b) for a, b in zip(g.src[waits], g.dst[waits], strict=True) if g.kind[b] == COLLECTIVE
    }
    blocked = {int(b) for b in g.dst[waits]}
    inside = np.zeros(len(g), dtype=bool)
    inside[c.next_op[c.fusible & (c.next_op >= 0)]] = True
    out = []
    for head in np.flatnonzero(c.fusible & ~inside).tolist():
        run = [head]
        i = int(c.next_op[head])
        while i >= 0 and c.fusible[i]:
            tensor = produces.get(run[-1])
            # An op that waits for another stream cannot be launched with the run.
            stop = i in blocked
            if tensor is not None and not stop:
                saved = sum(float(g.duration_ns[h]) for h in (c.launch[i], c.call[i]) if h >= 0)
                stop = float(r.finish_ns[tensor] - r.start_ns[tensor]) > saved
            if stop:
                if len(run) > 1:
                    out.append(tuple(run))
                run = []
            run.append(i)
            i = int(c.next_op[i])
        if len(run) > 1:
            out.append(tuple(run))
    return out
