"""Explains a plan: the cause of every second and byte, and the cost of the alternatives."""

from __future__ import annotations

import difflib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.errors import Infeasible, PaseError
from pase.files.progress import PieceOfWork
from pase.ir.precision import rate_words
from pase.plan.table import layer_rows
from pase.plan.types import NodePlan, PlanData
from pase.tables.itemize import Collective, LocalWork

if TYPE_CHECKING:
    from pase.compiler.problem.problem import SplitProblem
    from pase.compiler.unfused import Unfused
    from pase.frontends.registry import Traced
    from pase.machine import Machine
    from pase.machine.types import Device
    from pase.questions.unaligned import Unaligned

__all__ = [
    "Alternative",
    "Cause",
    "Explanation",
    "LayerReport",
    "WorkItem",
    "causes",
    "explain",
    "roles",
    "whole_time",
    "why",
]

Split = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause of time, summed over all layers of a step. Costs are in the plan's unit.

    group: "compute", "communication", "update" or "stages". nbytes: bytes of one device's larger buffer, summed over
    all runs. count: the number of items that were summed.
    """

    group: str
    what: str
    cost: float
    nbytes: int
    count: int


@dataclass(frozen=True, kw_only=True)
class WorkItem(LocalWork):
    """Local work of a layer, and how fast it is.

    achieved_flops, achieved_bytes: the fractions of the device's peak FLOP/s and of its memory bandwidth that this
        prediction reaches. None if the cost model is not in seconds or the machine is not known.
    """

    achieved_flops: float | None
    achieved_bytes: float | None

    @property
    def rate(self) -> str:
        """The name of the rate of the work, as it is shown to people."""
        return rate_words(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to split one layer. cost: the proven optimum over all strategies that split the layer this way."""

    split: Split
    ways: Mapping[str, int]
    cost: float
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One layer: its work, its collectives with their reasons, the memory it keeps, and other ways to split it.

    local: the sizes of the layer's dims on one device.
    work, holds: empty if the layout was written before these were stored.
    alternatives: empty if the plan's model is not available.
    """

    node: NodePlan
    local: Mapping[str, int]
    work: tuple[WorkItem, ...]
    collectives: tuple[tuple[Collective, str], ...]
    holds: Mapping[str, int]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The costs of a plan by cause.

    layer: the report on one layer, if one was asked for.
    next_best: layer -> cost of the best strategy that splits this layer in other numbers of ways, in the order of the
        plan. Of equal layers, one is tried. Only layers that were tried within the time limit are in it.
    unfused: attention that the model writes out as products and that a fused kernel would run faster.
    unaligned: products that would be faster with a dim that is a little larger.
    machine, problem: those of the plan, if they are available. Otherwise remark says why not.
    """

    plan: PlanData
    causes: tuple[Cause, ...]
    next_best: Mapping[str, float]
    layer: LayerReport | None = None
    unfused: tuple[Unfused, ...] = ()
    unaligned: tuple[Unaligned, ...] = ()
    remark: str = ""
    machine: Machine | None = None
    problem: SplitProblem | None = None


_WORDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "permute": "permute",
    "broadcast": "broadcast",
}


_NOTHING = 1e-6  # relative differences of costs below this are rounding


def roles(plan: PlanData) -> Mapping[str, str]:
    """Node name -> its op; "parameter" also for a copy of a parameter."""
    found: dict[str, str] = {}
    for n in plan.nodes:
        copied = n.op == "copy" and bool(n.reads) and all(found.get(r) == "parameter" for r in n.reads)
        found[n.name] = "parameter" if copied else n.op
    return found


def why(c: Collective, op_of: Mapping[str, str], whole_step: bool) -> str:
    """The reason for a collective in words. Similar collectives have the same reason.

    op_of: from ``roles``. whole_step: ``PlanData.whole_step``, whose gradients are the program's own tensors.
    """
    backward = c.phase == "backward"
    kind = _WORDS.get(c.kind, c.kind)
    if op_of.get(c.source) == "parameter":
        if c.phase == "update":
            return f"updated shards of parameters are gathered ({kind})"
        if not backward:
            stored = "gathered before use" if c.kind == "all_gather" else "resharded before use"
            return f"sharded parameters are {stored} ({kind})"
        kept = (
            "each device keeps the shard that it stores"
            if c.kind == "reduce_scatter"
            else "every device has the sum"
        )
        return f"gradients of parameters are summed, {kept} ({kind})"
    gradients = "gradients" if whole_step else "gradients of activations"
    what = gradients if backward else "activations"
    if c.source == c.node:
        if c.kind == "permute" and op_of.get(c.node) == "attention":
            return (
                f"ring attention: {what} circulate and overlap compute; this is the time not hidden ({kind})"
            )
        if c.kind == "permute":
            return f"windows reach beyond the shard: halos of {what} ({kind})"
        return f"the layer needs a sum over a split dim: {what} ({kind})"
    reason = {
        "all_reduce": "are partial sums and are read replicated",
        "reduce_scatter": "are partial sums and are read sharded",
        "all_gather": "are written sharded and read replicated",
        "all_to_all": "are written sharded along one dim and read sharded along another",
        "permute": "are on other devices than those that read them",
    }.get(c.kind, "are resharded")
    return f"{what} {reason} ({kind})"


def causes(plan: PlanData) -> tuple[Cause, ...]:
    """The plan's total cost by cause, largest first. Time hidden by overlap comes last, as a negative cost."""
    op_of = roles(plan)
    found: dict[tuple[str, str], list[float]] = {}

    def add(group: str, what: str, cost: float, nbytes: int, count: int = 1) -> None:
        entry = found.setdefault((group, what), [0.0, 0, 0])
        entry[0] += cost
        entry[1] += nbytes
        entry[2] += count

    kinds = {
        "matmul": "matrix products",
        "conv": "convolutions",
        "attention": "fused attention",
        "gather": "lookups",
        "parameter": "casts of parameters",
    }
    for n in plan.nodes:
        if n.cost.compute:
            add(
                "compute", kinds.get(n.op, "elementwise work, norms, softmax and the like"), n.cost.compute, 0
            )
        if n.cost.update:
            add("update", "the optimizer's update", n.cost.update, 0)
    for c in plan.collectives:
        add("communication", why(c, op_of, plan.whole_step), c.cost, c.nbytes * c.times)
    if plan.hidden:
        add("communication", "minus communication that overlaps compute", -plan.hidden, 0, count=0)
    if plan.pipeline is not None:
        waits = plan.cost - sum(cost for cost, _, _ in found.values())
        add("stages", "ranks wait for other ranks and for transfers between them", waits, 0, count=0)
    return tuple(
        Cause(group=group, what=what, cost=cost, nbytes=round(nbytes), count=round(count))
        for (group, what), (cost, nbytes, count) in sorted(found.items(), key=lambda kv: -kv[1][0])
    )


def whole_time(found: Sequence[Cause]) -> float:
    """Return the time of all causes, including what overlaps, so that their shares of it add up to 1.

    It is never zero, so that one may divide by it.
    """
    return sum(max(c.cost, 0.0) for c in found) or 1.0


def explain(
    plan: PlanData,
    layer: str | None = None,
    *,
    model: str | None = None,
    machine: str | None = None,
    time_limit: float = 20.0,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain where a plan's predicted time and memory come from, and how close the alternatives are.

    layer: the name of a node, or the path of a parameter, to report on in full.
    model: the name of the plan's model, which is traced again. It is not needed for zoo models, or if the plan still
        has its model. Without the model, the result has the collectives and their reasons, but no alternatives.
    machine: the machine file that the plan was made for, if it is not one of pase's own.
    time_limit: seconds to spend on the next-best choices of all layers.
    progress: a function that is called with a line of text at each step.

    Raises PaseError if the layer is unknown, or if the model or machine is not the plan's.
    """
    say = progress or (lambda _: None)
    node = None if layer is None else _find(plan, layer)
    there, remark = _machine_of(plan, machine)
    from pase.compiler.meshes.retarget import problem_of

    problem = None
    if plan.pipeline is not None:
        remark = (
            "the layers' costs are averages over the ranks; alternatives are not priced for a pipelined plan"
        )
    elif there is not None:
        traced, remark = _model_of(plan, model, say)
        problem = None if traced is None else problem_of(plan, traced, there)
    next_best: dict[str, float] = {}
    report = None
    written_out: tuple[Unfused, ...] = ()
    uneven_rows: tuple[Unaligned, ...] = ()
    if problem is not None and node is None:
        from pase.compiler.unfused import unfused
        from pase.questions.unaligned import unaligned

        written_out, uneven_rows = unfused(plan, problem), unaligned(plan, problem)
        next_best, skipped = _next_best(plan, problem, time_limit, say)
        remark = (
            f"the time limit was reached, and {skipped} layers were not tried (--time-limit)"
            if skipped
            else remark
        )
    if node is not None:
        report = _layer(plan, node, there, problem, say)
    return Explanation(
        plan=plan,
        causes=causes(plan),
        next_best=next_best,
        layer=report,
        unfused=written_out,
        unaligned=uneven_rows,
        remark=_remarks(plan, next_best, report, remark),
        machine=there,
        problem=problem,
    )


def _remarks(plan: PlanData, next_best: Mapping[str, float], report: LayerReport | None, remark: str) -> str:
    """The remark, after a warning if an alternative is cheaper because it ignores the memory limit."""
    said = [remark] if remark else []
    others = [*next_best.values(), *(a.cost for a in (report.alternatives if report is not None else ()))]
    if plan.memory_limit is not None and min(others, default=plan.cost) < plan.cost * (1 - _NOTHING):
        said.insert(0, "alternatives are priced without the memory limit: those that are cheaper do not fit.")
    return " ".join(said)


def _find(plan: PlanData, layer: str) -> NodePlan:
    by_name = {n.name: n for n in plan.nodes}
    if layer in by_name:
        return by_name[layer]
    close = difflib.get_close_matches(layer, by_name, n=4, cutoff=0.3)
    holding = [n for n in by_name if layer in n][:4]
    hint = ", ".join(dict.fromkeys([*holding, *close])) or ", ".join(list(by_name)[:4])
    raise PaseError(f"the plan for '{plan.model}' has no layer '{layer}'", where="--layer", fix=f"try {hint}")


def _model_of(plan: PlanData, model: str | None, say: Callable[[str], None]) -> tuple[Traced | None, str]:
    """The trace of the plan's model, or the reason why it is not available.

    A layout may be untrusted, so only a model that the user names is imported.
    """
    if plan.traced is not None:
        return plan.traced, ""
    name = model if model is not None else plan.model if plan.model.startswith("zoo:") else None
    if name is None:
        return None, (
            f"name the model to see alternatives: --model {plan.model} (a layout may come from anyone, so pase does "
            f"not import by itself what it names)"
        )
    if model is None and importlib.util.find_spec("jax") is None:
        return (
            None,
            "models of the zoo are traced by JAX, which is not installed; install it to see alternatives",
        )
    from pase.compiler.resolve import attached, resolve

    say("tracing the model")
    return attached(plan, resolve(name)).traced, ""


def _machine_of(plan: PlanData, machine: str | None) -> tuple[Machine | None, str]:
    """The machine that the plan was made for, or the reason why it is not available.

    Raises PaseError if the user named another machine.
    """
    from pase.machine import load

    try:
        there = load(machine if machine is not None else plan.machine)
    except PaseError as e:
        if machine is not None:
            raise
        return None, f"{e}; name its file with --machine to see alternatives"
    if there.digest == plan.machine_digest:
        return there, ""
    if machine is not None:
        raise PaseError(
            f"machine '{machine}' has other figures than the machine that the plan was made for",
            where="--machine",
            fix="give that machine, or compile again",
        )
    return (
        None,
        f"the figures of machine '{plan.machine}' have changed since the plan was made; compile it again",
    )


def _groups(plan: PlanData, problem: SplitProblem, v: int) -> dict[tuple[int, ...], list[int]]:
    """Config indices of node v, grouped by the number of ways that each dim is split, whichever axes split it."""
    space = problem.pricing.space(plan.mesh)
    out: dict[tuple[int, ...], list[int]] = {}
    for i, cfg in enumerate(space.configs[v]):
        ways = [1] * len(problem.graph.nodes[v].space.dims)
        for d, size in zip(cfg, plan.mesh.sizes, strict=True):
            if d >= 0:
                ways[d] *= size
        out.setdefault(tuple(ways), []).append(i)
    return out


def _solved(plan: PlanData, problem: SplitProblem, v: int, allowed: Sequence[int]) -> tuple[float, int]:
    """The cheapest strategy in which node v has one of these configs, as (cost, config); the cost is inf if there is
    none."""
    import numpy as np

    from pase.search import Known, Solution, solve
    from pase.tables import CostTables

    keep = np.asarray(allowed)

    def among(tables: CostTables, known: Known, part: float) -> Solution:
        found = solve(tables.restricted({v: keep}))
        choice = found.choice.copy()
        choice[v] = keep[choice[v]]
        return replace(found, choice=choice)

    try:
        found = problem.pricing.solve(plan.mesh, among, close=False)
    except Infeasible:
        return float("inf"), int(keep[0])
    return found.cost, int(found.choice[v])


def _chosen_index(plan: PlanData, problem: SplitProblem, v: int) -> int:
    from pase.tables.itemize import config_of

    space = problem.pricing.space(plan.mesh)
    node = problem.graph.nodes[v]
    split = next(n.split for n in plan.nodes if n.name == node.name)
    hit = (space.configs[v] == config_of(node, split, plan.mesh)).all(axis=1).nonzero()[0]
    if not len(hit):
        raise PaseError(
            "this version of pase does not split the layer in this way",
            where=f"layer '{node.name}'",
            fix="compile the plan again",
        )
    return int(hit[0])


def _next_best(
    plan: PlanData, problem: SplitProblem, time_limit: float, say: Callable[[str], None]
) -> tuple[dict[str, float], int]:
    """Returns (layer -> cost of the best strategy that splits it in other numbers of ways, number of layers left).

    The costliest layers come first. Of equal layers, the first one is tried, and the others get its cost.
    """
    start = time.perf_counter()
    found: dict[str, float] = {}
    at = {n.name: v for v, n in enumerate(problem.graph.nodes) if n.kind not in ("output", "constant")}
    rows = sorted(layer_rows((n for n in plan.nodes if n.name in at), plan.mesh), key=lambda row: -row.total)
    left = 0
    for done, row in enumerate(rows):
        if time.perf_counter() - start > time_limit:
            left = sum(len(r.nodes) for r in rows[done:])
            break
        say(PieceOfWork(f"next-best choices: {row.name}", done, len(rows)))
        v = at[row.nodes[0].name]
        chosen = _chosen_index(plan, problem, v)
        others = [i for g in _groups(plan, problem, v).values() if chosen not in g for i in g]
        if others:
            found |= dict.fromkeys([n.name for n in row.nodes], _solved(plan, problem, v, others)[0])
    return {n.name: found[n.name] for n in plan.nodes if n.name in found}, left


def _layer(
    plan: PlanData,
    node: NodePlan,
    machine: Machine | None,
    problem: SplitProblem | None,
    say: Callable[[str], None],
) -> LayerReport:
    op_of = roles(plan)
    sizes = plan.mesh.by_name
    local = dict(node.sizes)
    for d, axes in node.split.items():
        for a in axes:
            if d in local:
                local[d] //= sizes[a]
    collectives = tuple((c, why(c, op_of, plan.whole_step)) for c in plan.collectives if c.node == node.name)
    work, holds = _work(plan, node, machine), _holds(node)
    if problem is None:
        return LayerReport(
            node=node, local=local, work=work, collectives=collectives, holds=holds, alternatives=()
        )
    from pase.tables.itemize import split_of

    v = next(i for i, n in enumerate(problem.graph.nodes) if n.name == node.name)
    chosen = _chosen_index(plan, problem, v)
    space = problem.pricing.space(plan.mesh)
    graph_node = problem.graph.nodes[v]
    alternatives = []
    groups = _groups(plan, problem, v)
    for done, (ways, members) in enumerate(groups.items()):
        say(PieceOfWork(f"alternatives of {node.name}", done, len(groups)))
        cost, at = _solved(plan, problem, v, members)
        is_chosen = chosen in members
        cfg = space.configs[v][chosen if is_chosen else at]
        named = {d.name: w for d, w in zip(graph_node.space.dims, ways, strict=True) if w > 1}
        alternatives.append(
            Alternative(split=split_of(graph_node, cfg, plan.mesh), ways=named, cost=cost, chosen=is_chosen)
        )
    alternatives.sort(key=lambda a: (a.cost, not a.chosen))
    return LayerReport(
        node=node,
        local=local,
        work=work,
        collectives=collectives,
        holds=holds,
        alternatives=tuple(alternatives),
    )


def _work(plan: PlanData, node: NodePlan, machine: Machine | None) -> tuple[WorkItem, ...]:
    device = None if machine is None or plan.unit != "s" else machine.device
    return tuple(_reached(w, device) for w in node.work)


def _reached(w: LocalWork, device: Device | None) -> WorkItem:
    once = w.cost / w.times if w.times else 0.0
    flops = nbytes = None
    if device is not None and once > 0:
        flops = w.flops / once / device.peak_of(w.kind, w.dtype)
        nbytes = w.nbytes / once / device.memory_bandwidth_bytes_per_s
    return WorkItem(**vars(w), achieved_flops=flops, achieved_bytes=nbytes)


def _holds(node: NodePlan) -> dict[str, int]:
    recompute = {"activations while recomputed": node.kept_for_recompute} if node.kept_for_recompute else {}
    return {kind: nbytes for kind, nbytes in node.keeps.items()} | recompute
