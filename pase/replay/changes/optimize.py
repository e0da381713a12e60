"""dPRO's Algorithm 1: improves the critical path step by step with graph passes, and undoes steps that do not help."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.replay.changes.coarse import Coarse, coarsen
from pase.replay.changes.memory import MemoryOption, MemoryUse, memory_options
from pase.replay.changes.passes import PASSES, CollectiveCosts, GraphChanges, View, apply_plan
from pase.replay.graph import DataflowGraph
from pase.replay.simulation.simulate import critical_path, replay_graph, subgraph
from pase.replay.simulation.steady import evaluate

__all__ = ["OptimizeResult", "Trial", "optimize_graph", "representative"]

_ALL = 1 << 20
_BETTER = 1e-4
"""The smallest relative gain for which a step is kept."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One change that was tried.

    Times are replayed steady iterations in ns, of the representative rank during the search and of all ranks in an
    ``OptimizeResult``.
    """

    name: str
    what: str
    before_ns: float
    after_ns: float
    kept: bool
    plan: GraphChanges


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizeResult:
    """The result of the search. Times are replays of the whole graph with all ranks.

    The first step starts at before_ns, each later step starts where the previous one ended, and the last one ends at
    after_ns. ``graph`` has all steps applied.
    """

    before_ns: float
    after_ns: float
    plan: GraphChanges
    coarse: Coarse
    graph: DataflowGraph
    steps: tuple[Trial, ...]
    undone: int
    """The number of steps that were tried and undone."""
    evaluations: int
    seconds: float
    ended: str
    """"converged" or "time budget"."""
    memory: MemoryOption | None = None
    memory_options: tuple[MemoryOption, ...] = field(default=())


def representative(g: DataflowGraph) -> DataflowGraph:
    """Returns the graph of the slowest rank, which represents all. Its collectives do not wait for other ranks."""
    if len(g.ranks) < 2:
        return g
    r = replay_graph(g)
    finish = {k: float(r.finish_ns[g.rank == k].max()) for k in g.ranks}
    slowest = max(finish, key=lambda k: finish[k])
    part = subgraph(g, g.rank == slowest)
    return replace(part, gang=np.full(len(part), -1, dtype=np.int64))


def optimize_graph(
    g: DataflowGraph,
    *,
    budget_s: float = 10.0,
    passes: Sequence[str] = (),
    scheme: str = "ring",
    memory: MemoryUse | None = None,
    memory_limit_bytes: int | None = None,
) -> OptimizeResult:
    """Searches for a plan that shortens the iteration, within a time budget.

    budget_s: the time budget.
    passes: names from PASSES; empty means all.
    scheme: how collectives are synchronized, "ring" or "ps" (parameter servers).
    memory: the measured memory use.
    memory_limit_bytes: the limit on a rank's memory.

    Raises PaseError for an unknown pass, or for a limit without measured memory use. Raises Infeasible if no memory
    pass meets the limit.
    """
    begun = time.perf_counter()
    for name in passes:
        _ = PASSES[name]  # raises PaseError if the pass is unknown
    chosen = list(passes) or list(PASSES)
    option, options = _fit_memory(g, memory, memory_limit_bytes)
    before = max(evaluate(g).values())
    small = representative(g)
    search = _PassSearch(small, scheme, begun + budget_s)
    search.start(chosen)
    ended = search.climb(chosen)
    coarse = coarsen(g, replay_graph(g))
    steps = _on_all_ranks(search, g, coarse, before)
    plan = steps[-1].plan if steps else GraphChanges()
    return OptimizeResult(
        before_ns=before,
        after_ns=steps[-1].after_ns if steps else before,
        plan=plan,
        coarse=coarse,
        graph=apply_plan(g, coarse, plan),
        steps=tuple(steps),
        undone=sum(not s.kept for s in search.steps),
        evaluations=search.evaluations,
        seconds=time.perf_counter() - begun,
        ended=ended,
        memory=option,
        memory_options=tuple(options),
    )


def _on_all_ranks(search: _PassSearch, g: DataflowGraph, coarse: Coarse, before: float) -> list[Trial]:
    """Returns the search's steps, replayed on the whole graph. Consecutive steps of one pass are merged.

    A step that helps the representative rank may not help the whole run. It is then kept only together with later steps
    if all of them together help.
    """
    out: list[Trial] = []
    pending: list[str] = []
    best = before
    kept = [s for s in search.steps if s.kept]
    for k, s in enumerate(kept):
        pending.append(s.what)
        if k + 1 < len(kept) and kept[k + 1].name == s.name:
            continue
        plan = _for_all_ranks(search, s.plan, g, coarse)
        try:
            ns = max(evaluate(apply_plan(g, coarse, plan)).values())
        except PaseError:  # on another rank the change creates a cycle
            continue
        if ns < best * (1 - _BETTER):
            what = pending[0] if len(pending) == 1 else f"{len(pending)} changes, the last: {pending[-1]}"
            out.append(Trial(name=s.name, what=what, before_ns=best, after_ns=ns, kept=True, plan=plan))
            best, pending = ns, []
    return out


def _fit_memory(
    g: DataflowGraph, use: MemoryUse | None, limit: int | None
) -> tuple[MemoryOption | None, list[MemoryOption]]:
    """Line 1 of the algorithm: returns the fastest option that meets the memory limit, and all options."""
    options = memory_options(g, use) if use is not None else []
    if limit is None:
        return (options[0] if options else None), options
    if use is None:
        raise PaseError(
            "the traces have no memory events, which a memory limit needs",
            where="--memory-limit",
            fix="record them with torch.profiler.profile(profile_memory=True)",
        )
    fitting = [o for o in options if o.peak_bytes <= limit]
    if not fitting:
        least = min(options, key=lambda o: o.peak_bytes)
        raise Infeasible(
            f"no memory pass fits {limit / 2**30:.2f} GiB: {least.name} still needs "
            f"{least.peak_bytes / 2**30:.2f} GiB",
            where="--memory-limit",
            fix="raise the limit",
        )
    return min(fitting, key=lambda o: o.iteration_ns), options


class _PassSearch:
    """Searches on the representative rank. It has the plan so far, and the steps that led to it."""

    def __init__(self, g: DataflowGraph, scheme: str, deadline: float) -> None:
        self.graph, self.deadline = g, deadline
        self.coarse = coarsen(g, replay_graph(g))
        fixed = self.coarse.fixed_ns
        self.network = CollectiveCosts(
            fixed_ns={t.family: float(fixed[t.tasks[0]]) for t in self.coarse.tensors}, scheme=scheme
        )
        self.plan = GraphChanges()
        self.steps: list[Trial] = []
        self.evaluations = 0
        self.best = self.cost(self.plan)

    def cost(self, plan: GraphChanges) -> float:
        self.evaluations += 1
        return max(evaluate(apply_plan(self.graph, self.coarse, plan)).values())

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def attempt(self, name: str, what: str, plan: GraphChanges) -> bool:
        """Tries a plan, and keeps it if it is better. Returns whether it was kept."""
        if plan == self.plan:
            return False
        try:
            ns = self.cost(plan)
        except PaseError:
            # The change creates a cycle: a fused run would wait for a tensor that waits for that run.
            ns = math.inf
        kept = ns < self.best * (1 - _BETTER)
        self.steps.append(Trial(name=name, what=what, before_ns=self.best, after_ns=ns, kept=kept, plan=plan))
        if kept:
            self.plan, self.best = plan, ns
        return kept

    def view(self) -> View:
        g = apply_plan(self.graph, self.coarse, self.plan)
        r = replay_graph(g)
        return View(
            measured=self.graph,
            graph=g,
            coarse=self.coarse,
            plan=self.plan,
            replay=r,
            critical=tuple(critical_path(g, r)),
            network=self.network,
        )

    def start(self, chosen: Sequence[str]) -> None:
        """Tries well-known plans as starting points, and all proposals of each pass together."""
        if "tensor-fusion" in chosen:
            known = any(t.nbytes > 0 for t in self.coarse.tensors)
            for mib in (1, 5, 25, 64, _ALL) if known else (_ALL,):
                what = "all tensors in one bucket" if mib == _ALL else f"buckets of {mib} MiB"
                if not self.late():
                    self.attempt("tensor-fusion", what, self._bucketed(mib << 20))
        for name in chosen:
            if name != "tensor-fusion" and not self.late():
                plan = self.plan
                for _, proposed in PASSES[name](self.view()):
                    plan = _union(plan, proposed)
                self.attempt(name, "everything that it proposes", plan)

    def _bucketed(self, limit: int) -> GraphChanges:
        """Returns DDP's buckets: tensors in order of readiness, with a new bucket whenever one has reached the limit.

        Unknown sizes count as zero.
        """
        bucket: dict[int, int] = {}
        open_: list[int] = []
        size = 0
        tensors = self.coarse.tensors
        for k, t in enumerate(tensors):
            if not self.coarse.may_join([*open_, k]):
                open_, size = [], 0
            open_.append(k)
            size += max(t.nbytes, 0)
            for j in open_:
                bucket[j] = k
            if size >= limit:
                open_, size = [], 0
        fused = tuple(sorted((a, b) for a, b in bucket.items() if _shared(bucket, a)))
        return replace(self.plan, bucket=fused)

    def climb(self, chosen: Sequence[str]) -> str:
        """Repeats all passes until none of them finds an improvement or the time is up. Returns why it ended."""
        while True:
            kept = False
            for name in chosen:
                tried = 0
                improving = True
                while improving and not self.late():
                    improving = False
                    for what, plan in PASSES[name](self.view()):
                        tried += 1
                        if self.late():
                            return "time budget"
                        if self.attempt(name, what, plan):
                            improving = kept = True
                            break
            if self.late():
                return "time budget"
            if not kept:
                return "converged"


def _shared(bucket: dict[int, int], k: int) -> bool:
    return sum(1 for v in bucket.values() if v == bucket[k]) > 1


def _union(a: GraphChanges, b: GraphChanges) -> GraphChanges:
    return replace(
        a,
        parts=tuple(sorted({**dict(a.parts), **dict(b.parts)}.items())),
        runs=a.runs | b.runs,
        op_scale=tuple(dict.fromkeys((*a.op_scale, *b.op_scale))),
    )


def _for_all_ranks(search: _PassSearch, plan: GraphChanges, g: DataflowGraph, coarse: Coarse) -> GraphChanges:
    """Converts the representative's plan to a plan for all ranks: tensors have equal numbers, and runs equal keys."""
    if len(g.ranks) < 2:
        return plan
    base = plan
    if len(coarse.tensors) != len(search.coarse.tensors):
        # Ranks have different collectives, so only op fusion can be applied to all.
        base = replace(plan, bucket=(), parts=())
    wanted = {tuple(search.graph.key[i] for i in run) for run in plan.runs}
    place: dict[object, dict[int, int]] = {}
    for i, key in enumerate(g.key):
        place.setdefault(_strip(key), {})[int(g.rank[i])] = i
    runs = set()
    for keys in wanted:
        spots = [place.get(_strip(k), {}) for k in keys]
        for rank in g.ranks:
            if all(rank in s for s in spots):
                runs.add(tuple(s[rank] for s in spots))
    return replace(base, runs=frozenset(runs))


def _strip(key: object) -> object:
    """Returns a task's key without its rank: the second part for ops, or the third or fourth for host tasks."""
    if not isinstance(key, tuple):
        return key
    return tuple(x for i, x in enumerate(key) if not (isinstance(x, int) and i < len(key) - 1))
