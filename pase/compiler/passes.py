"""The passes of a compilation. Each takes the answer so far and returns it with more: a problem, a strategy, a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pase.compiler.all_bits import noted_all_bits
from pase.compiler.constraints import fixed_of
from pase.compiler.meshes.baselines import NO_RIVALS, Rivals, memory_of, never_worse
from pase.compiler.meshes.every_mesh import close_meshes
from pase.compiler.meshes.fit import cheapest_free, fit_more, fit_variants
from pase.compiler.meshes.plans import NO_LIMIT, Fit, plan_found
from pase.compiler.meshes.search import Found, closed
from pase.compiler.meshes.ties import least_stored
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Candidate, Variant, untried, variants
from pase.compiler.stages.pipelines import search_pipelines
from pase.compiler.stages.plans import plan_staged
from pase.compiler.unfused import noted_unfused
from pase.compiler.widened import noted_widened
from pase.errors import Infeasible, PaseError
from pase.frontends.registry import NotInParts
from pase.ir import to_text
from pase.ir.fixed import to_free
from pase.ir.precision import FP8
from pase.machine import Mesh
from pase.memory.live import is_trained
from pase.registry import Registry

if TYPE_CHECKING:
    from pase.frontends.registry import Traced
    from pase.ir import FixedLayout
    from pase.plan.targets import TargetForm
    from pase.plan.types import PlanData

__all__ = [
    "PASSES",
    "Compilation",
    "Pass",
    "Question",
    "compilation_text",
    "passes_of",
    "problem_of",
    "run_passes",
]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is compiled.

    start: the time when the work on it began. tracing_s: the seconds that the model's trace took. form: the form that
    the strategy must have; None for any strategy.
    """

    traced: Traced
    name: str
    options: CompileOptions
    say: Progress
    start: float
    tracing_s: float = 0.0
    form: TargetForm | None = None


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What is known so far. A pass that adds to it returns another answer.

    written: the problem of the step as the model has it. first: that of its first variant, as the options have it.
        problem: that of the variant that was chosen.
    limit: bytes that a device may hold; None: any number.
    tries: the variants of the step with their graphs, in groups by number of micro-batches. over: the meshes to search.
    found: the cheapest strategy. misfit: why nothing fits in memory, if the plan may be larger than the limit.
    rivals: the baselines.
    proven: what the answer is proven over, for the plan.
    """

    question: Question
    written: SplitProblem
    first: SplitProblem
    problem: SplitProblem
    limit: float | None = None
    tries: Sequence[Sequence[Candidate]] = ()
    over: Sequence[Mesh] = ()
    spent: Spent = field(default_factory=Spent)
    found: Found | None = None
    misfit: str | None = None
    rivals: Rivals = NO_RIVALS
    proven: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    plan: PlanData | None = None

    @classmethod
    def to(cls, q: Question) -> Compilation:
        """The answer before the first pass: the problem of the model as written. Raises PaseError if the options do not
        go together with the machine or with the model's fixed layouts."""
        problem = problem_of(q.traced, q.options, q.form)
        return cls(question=q, written=problem, first=problem, problem=problem)

    @property
    def strategy(self) -> Found:
        """The cheapest strategy so far."""
        if self.found is None:
            raise ValueError("no pass has searched a strategy yet")
        return self.found

    @property
    def within(self) -> float | None:
        """The bytes that a device may hold, if anything fits."""
        return self.limit if self.misfit is None else None

    @property
    def whole(self) -> PlanData:
        """The plan."""
        if self.plan is None:
            raise ValueError("no pass has made a plan yet")
        return self.plan


PassRun = Callable[[Compilation], Compilation]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One step of a compilation.

    says: what it does, in a line. staged: whether it is a step of a compilation into a given number of stages, too.
    """

    name: str
    says: str
    run: PassRun
    staged: bool = False


PASSES: Registry[Pass] = Registry("pass of a compilation")


def _pass(name: str, says: str, staged: bool = False) -> Callable[[PassRun], PassRun]:
    def add(run: PassRun) -> PassRun:
        PASSES.add(name, Pass(name=name, says=says, run=run, staged=staged))
        return run

    return add


def passes_of(options: CompileOptions) -> list[Pass]:
    """The passes of a compilation with these options, in order."""
    return [p for p in PASSES.values() if options.ranks is None or p.staged]


def run_passes(
    question: Question, after: Callable[[Pass, Compilation], None] = lambda p, a: None
) -> Compilation:
    """Compile a traced model. after: called with each pass and the answer that it returned."""
    answer = Compilation.to(question)
    for p in passes_of(question.options):
        answer = p.run(answer)
        after(p, answer)
    return answer


@_pass("variants", "the graph of the step, the variants that need less memory, and the meshes of the devices")
def _variants(a: Compilation) -> Compilation:
    q = a.question
    limit = q.options.limit_bytes(a.problem.machine)
    groups = variants(q.traced, a.problem.graph, q.options, limit is not None)
    tries = [[Candidate(traced=q.traced, variant=v) for v in group] for group in groups]
    first = tries[0][0]
    problem = a.problem if first.variant == Variant() else a.problem.on(first)
    seconds = {"trace": q.tracing_s}
    spent = Spent.within(q.options.work, q.options.time_limit, q.start)
    over = problem.meshes(q.options.mesh, q.options.max_axes)
    return replace(
        a, first=problem, problem=problem, limit=limit, tries=tries, over=over, spent=spent, seconds=seconds
    )


@_pass("search", "the cheapest strategy over all meshes, without a memory limit")
def _search(a: Compilation) -> Compilation:
    problem, found = cheapest_free(a.problem, a.tries[0], a.over, a.question.say, a.limit)
    return replace(a, problem=problem, found=found)


@_pass("fit", "the cheapest variant and strategy that fit in memory")
def _fit(a: Compilation) -> Compilation:
    if a.limit is None:
        return a
    q = a.question
    try:
        problem, found = fit_variants(a.problem, a.strategy, a.tries, a.over, a.limit, a.spent, q.say)
    except Infeasible as e:
        if q.options.memory_limit != "machine":  # a size that the user states must be met
            raise Infeasible(_with_untried(a, e.what), where=e.where, fix=e.fix) from None
        return replace(a, misfit=_with_untried(a, str(e)), found=closed(a.problem, a.over, a.strategy))
    return replace(a, problem=problem, found=found)


def _with_untried(a: Compilation, why: str) -> str:
    """Return why nothing fits, with the ways to take less memory that were not tried."""
    q = a.question
    tried = [[c.variant for c in group] for group in a.tries]
    left = untried(q.traced, a.problem.graph, tried, q.options)
    return f"{why}. {left}" if left else why


@_pass(
    "baselines",
    "common strategies on the same graph, each on the meshes that it uses; priced only where asked for",
)
def _baselines(a: Compilation) -> Compilation:
    if not a.question.options.baselines:
        return a
    a.question.say("pricing baselines")
    began = time.perf_counter()
    rivals = Rivals(a.problem)
    return replace(a, rivals=rivals, seconds={**a.seconds, "baselines": time.perf_counter() - began})


@_pass(
    "never-worse",
    "the meshes of cheaper baselines are searched too, and a baseline that is still cheaper is taken",
)
def _never_worse(a: Compilation) -> Compilation:
    began = time.perf_counter()
    found, known = a.strategy, {m.sizes for m in a.over}
    proven = found.solution.bound >= found.solution.cost * (1 - 1e-9)
    fixed = a.question.options.mesh is not None

    def may_be_taken(mesh: Mesh) -> bool:
        """Whether a strategy on this mesh could be cheaper. If the user fixed the mesh, only that one may be used."""
        return not proven if mesh.sizes in known else not fixed

    given = [b for b in a.rivals.where(may_be_taken) if may_be_taken(b.mesh)]
    allowed = [b for b in given if a.within is None or a.rivals.bytes_of(b) <= a.within]
    # A baseline may use a mesh that was not among ours. That mesh is searched too.
    more = [b.mesh for b in allowed if b.mesh.sizes not in known and b.cost < found.solution.cost]
    spent = time.perf_counter() - began
    if more:
        found = fit_more(a.problem, found, more, a.within, a.spent, a.question.say)
    seconds = {k: s + spent if k == "baselines" else s for k, s in a.seconds.items()}
    return replace(a, found=never_worse(a.problem, found, allowed), seconds=seconds)


@_pass("least-stored", "of equally cheap strategies of an inference step, the one that stores least")
def _least_stored(a: Compilation) -> Compilation:
    return a if is_trained(a.problem.graph) else replace(a, found=least_stored(a.problem, a.strategy))


@_pass("every-mesh", "the proof over every mesh of the devices, if it is asked for")
def _every_mesh(a: Compilation) -> Compilation:
    if a.question.options.meshes == "few":
        return a
    first = a.first

    def allowed(cheaper: Found) -> bool:
        fits = a.within is None or memory_of(first, cheaper.configs, cheaper.mesh).total <= a.within
        return fits and a.problem.variant == first.variant

    searched = {m.sizes for m in a.over}
    found, every = close_meshes(first, a.strategy, searched, allowed, a.question.say)
    return replace(a, found=found, proven={"meshes": str(every)})


@_pass("plan", "the plan of the strategy: layouts, memory, costs and collectives item by item")
def _plan(a: Compilation) -> Compilation:
    q, found = a.question, a.strategy
    trace = {"trace": a.seconds["trace"]}
    seconds = {**trace, **found.seconds, **a.seconds, "total": time.perf_counter() - q.start}
    fit = NO_LIMIT if a.limit is None else Fit(limit=int(a.limit), misfit=a.misfit)
    proven = a.proven if q.form is None else {**a.proven, "target": q.options.target, "form": q.form.name}
    plan = plan_found(a.problem, found, q.name, q.traced, seconds, a.rivals, fit, proven)
    for noted in (noted_unfused, noted_widened, noted_all_bits):
        plan = noted(plan, a.problem)
    return replace(a, plan=plan)


@_pass("stages", "a pipeline, if it is asked for or is cheaper", staged=True)
def _stages(a: Compilation) -> Compilation:
    if a.question.options.ranks is not None:
        return replace(a, plan=_staged(a))
    return a if a.question.options.pipeline != "auto" else replace(a, plan=_or_staged(a))


def _staged(a: Compilation) -> PlanData:
    """The plan of a pipeline with the requested number of ranks."""
    q = a.question
    if fixed := a.problem.graph.fixed:
        raise PaseError(
            f"stages store arguments on groups of devices, but {_fixed_text(fixed)}",
            where="pipeline",
            fix=f"leave out pipeline (--pipeline), or {to_free(fixed.values())}",
        )
    seconds = {"trace": q.tracing_s}
    found = search_pipelines(a.problem, q.traced, q.options, q.say, q.start)
    seconds |= found.seconds | {"total": time.perf_counter() - q.start}
    return plan_staged(a.problem, q.traced, q.name, found, seconds)


def _or_staged(a: Compilation) -> PlanData:
    """Return the plan, or a pipeline if that takes less time. The bound is then the lower of the two."""
    q, plan, problem = a.question, a.whole, a.written
    # Anything that fits is better than a plan that does not.
    below = plan.cost if plan.misfit is None else math.inf
    if problem.graph.fixed:
        return replace(
            plan,
            skipped={
                **plan.skipped,
                "stages": f"{_fixed_text(problem.graph.fixed)}, and stages would change it",
            },
        )
    try:
        found = search_pipelines(problem, q.traced, q.options, q.say, q.start, below)
    except (
        Infeasible,
        NotInParts,
    ) as e:  # the model cannot be cut or run in micro-batches, or no pipeline fits either
        return replace(plan, skipped={**plan.skipped, "stages": str(e)})
    if found.best is None:
        bound = min(plan.bound, found.bound)
        optimal = plan.optimal and not found.unseen and bound >= plan.cost * (1 - 1e-9)
        return replace(plan, bound=bound, optimal=optimal, baselines={**plan.baselines, **found.others})
    spent = {**plan.seconds, **{f"stages' {k}": v for k, v in found.seconds.items()}}
    staged = plan_staged(problem, q.traced, q.name, found, spent)
    bound = min(plan.bound, staged.bound)
    tried = (*plan.tried, *staged.tried)
    baselines = {**plan.baselines, "no stages": plan.cost, **found.others}
    optimal = staged.optimal and bound >= staged.cost * (1 - 1e-6)
    return replace(staged, bound=bound, optimal=optimal, tried=tried, baselines=baselines)


def problem_of(traced: Traced, o: CompileOptions, form: TargetForm | None = None) -> SplitProblem:
    """Return the problem of the model as written. Raises PaseError if the machine does not support the options."""
    fixed = fixed_of(traced, o)
    if fixed and o.uneven != "whole":
        raise PaseError(
            f"it pads arguments, but {_fixed_text(fixed)}",
            where=f"uneven='{o.uneven}'",
            fix=f"leave out uneven (--uneven), or {to_free(fixed.values())}",
        )
    problem = SplitProblem.of(
        traced.graph, o.devices, o.machine, o.cost_model, o.optimizer, o.overlap, form, fixed
    )
    _check_machine(problem, o)
    return problem


def _fixed_text(fixed: Mapping[str, FixedLayout]) -> str:
    first = next(iter(fixed.values()))
    return f"the layout of '{first.path}' is fixed, {first}"


def _check_machine(problem: SplitProblem, options: CompileOptions) -> None:
    if options.precision == "fp8" and FP8 not in problem.machine.device.peak_flops:
        raise PaseError(
            f"it has no rate for fp8 products ({FP8} in [device.peak_flops])",
            where=f"machine '{problem.machine.name}'",
            fix="leave out precision='fp8', or name another machine",
        )
    if options.decompose != "none" and not (problem.machine.overlaps and problem.model.unit == "s"):
        raise PaseError(
            f"collectives would overlap with compute, but machine '{problem.machine.name}' under cost model "
            f"'{problem.model.name}' does not support that",
            where=f"decompose='{options.decompose}'",
            fix="leave it out, or name a machine whose file sets overlaps",
        )


def compilation_text(a: Compilation) -> str:
    """What is known so far, as text: the graph with its variants and meshes, the strategy, or the plan."""
    if a.plan is not None:
        from pase.plan.table import as_text

        return as_text(replace(a.plan, seconds={}), every_layer=True)  # no times, so that two runs are equal
    if a.found is None:
        tries = [f"variant {c.variant}" for group in a.tries for c in group]
        meshes = [f"mesh {'×'.join(map(str, m.sizes))}" for m in a.over]
        return "\n".join([to_text(a.problem.graph, sources=False).rstrip(), *tries, *meshes])
    s, m = a.found.solution, a.found.mesh
    lines = [
        f"variant {a.problem.variant}",
        f"mesh {'×'.join(map(str, m.sizes))}",
        f"cost {s.cost:.6g} {a.problem.model.unit}, at least {s.bound:.6g}",
        *(f"baseline {b.name} {b.cost:.6g}" for b in a.rivals.all[0]),
    ]
    for n in a.problem.graph.nodes:
        dims = [*(d.name for d in n.space)]
        split = [
            f"{dims[d]}:{size}" for d, size in zip(a.found.configs[n.name], m.sizes, strict=True) if d >= 0
        ]
        lines.append(f"node {n.name} {' '.join(split) or 'not split'}")
    return "\n".join(lines)
