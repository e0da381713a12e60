"""The overall flow: a model is traced and searched, and the result becomes a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.baselines import Baseline, Skipped
from pase.compiler.batch import most_throughput
from pase.compiler.constraints import fixed_of, with_costs
from pase.compiler.idle import or_fewer
from pase.compiler.meshes.baselines import memory_of, never_worse, price_baselines
from pase.compiler.meshes.every_mesh import close_meshes
from pase.compiler.meshes.fit import cheapest_free, fit_more, fit_variants
from pase.compiler.meshes.plans import NO_LIMIT, Fit, plan_found, plan_of
from pase.compiler.meshes.search import Found, closed
from pase.compiler.meshes.ties import least_stored
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant, variants
from pase.compiler.resolve import traced_model
from pase.compiler.stages.pipelines import search_pipelines
from pase.compiler.stages.plans import plan_staged
from pase.compiler.targets import for_target
from pase.compiler.uneven import or_padded
from pase.errors import Infeasible, PaseError
from pase.frontends.registry import NotInParts
from pase.garbage import seldom_collected
from pase.ir.fixed import FREE_LAYOUTS
from pase.ir.precision import FP8
from pase.memory.live import is_trained
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.frontends.registry import Traced
    from pase.ir import FixedLayout
    from pase.plan.targets import TargetForm
    from pase.plan.types import PlanData

__all__ = ["Compiled", "compare_model", "compile_model"]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A plan and what it was made from. given: the baselines, priced on the same problem."""

    plan: PlanData
    problem: SplitProblem
    traced: Traced
    given: tuple[Baseline, ...]


@seldom_collected()
def compile_model(
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    progress: Progress | None = None,
) -> Compiled:
    """The implementation of ``pase.compile``."""
    if options.ranks is not None:
        return _compile_staged(model, params, batch, options, progress or (lambda _: None))
    say = progress or (lambda _: None)
    if options.objective == "throughput":
        return most_throughput(compile_model, model, params, batch, options, say)
    start = time.perf_counter()
    say("tracing the model")
    traced, name = traced_model(model, params, batch, options)

    def split(o: CompileOptions) -> Compiled:
        if o.target == "any":
            return _compiled(traced, name, o, say, start)
        return for_target(o, lambda limited, form: _compiled(traced, name, limited, say, start, form), say)

    def compiled(o: CompileOptions) -> Compiled:
        if o.uneven == "padded":
            return _padded(traced, name, o, say, start)
        made = split(o)
        return with_costs(made, o, split) if o.constraints and o.baselines else made

    return or_fewer(compiled(options), options, compiled, say)


def _padded(traced: Traced, name: str, options: CompileOptions, say: Progress, start: float) -> Compiled:
    """Return the plan of a traced model, as written or with padded dims."""
    written: Compiled | Infeasible
    try:
        written = _compiled(traced, name, options, say, start)
    except Infeasible as e:  # with padded dims, more of it can be split
        written = e
    return or_padded(
        _problem(traced, options),
        traced,
        written,
        lambda t: _compiled(t, name, options, say, time.perf_counter()),
        options.accumulate,
        say,
    )


def _compiled(
    traced: Traced,
    name: str,
    options: CompileOptions,
    say: Progress,
    start: float,
    form: TargetForm | None = None,
) -> Compiled:
    """Return a traced model's plan without stages.

    start: the time when the work on it began.
    form: the form that its strategy must have; None for any strategy.
    """
    problem = _problem(traced, options, form)
    written, limit = problem, options.limit_bytes(problem.machine)
    tries = list(variants(traced, problem.graph, options, limit is not None))
    if tries[0][0] != Variant():
        problem = problem.varied(traced, tries[0][0])
    traced_s = time.perf_counter() - start
    spent = Spent.within(options.work, options.time_limit)
    over, first, misfit = problem.meshes(options.mesh, options.max_axes), problem, None
    problem, found = cheapest_free(problem, tries[0], traced, over, say, limit)
    if limit is not None:
        try:
            problem, found = fit_variants(problem, found, tries, traced, over, limit, spent, say)
        except Infeasible as e:
            if options.memory_limit != "machine":  # a size that the user states must be met
                raise
            misfit, found = str(e), closed(problem, over, found)
    methods: dict[str, float] = {}
    given: list[Baseline] = []
    skipped: list[Skipped] = []
    if options.baselines:
        say("pricing baselines")
        began = time.perf_counter()
        given, skipped = price_baselines(problem)
        methods["baselines"] = time.perf_counter() - began
    needs = {} if limit is None else {b.name: memory_of(problem, b.strategy, b.mesh).total for b in given}
    within = limit if misfit is None else None
    allowed = [b for b in given if within is None or needs[b.name] <= within]
    known = {m.sizes for m in over}
    # A baseline may use a mesh that was not among ours. That mesh is searched too.
    more = [b.mesh for b in allowed if b.mesh.sizes not in known and b.cost < found.solution.cost]
    if more and options.mesh is None:
        found = fit_more(problem, found, more, within, spent, say)
    found = never_worse(problem, found, allowed)
    found = found if is_trained(problem.graph) else least_stored(problem, found)
    found, proven = _over_every_mesh(first, problem, found, known, within, options, say)
    total_s = time.perf_counter() - start
    seconds = {"trace": traced_s, **found.seconds, **methods, "total": total_s}
    fit = NO_LIMIT if limit is None else Fit(limit=int(limit), misfit=misfit, baselines=needs)
    if form is not None:
        proven = {**proven, "target": options.target, "form": form.name}
    plan = plan_found(problem, found, name, traced, seconds, given, skipped, fit, proven)
    if options.pipeline == "auto":
        plan = _or_staged(plan, written, traced, name, options, say)
    return Compiled(plan=plan, problem=problem, traced=traced, given=tuple(given))


def _problem(traced: Traced, o: CompileOptions, form: TargetForm | None = None) -> SplitProblem:
    """Return the problem of the model as written. Raises PaseError if the machine does not support the options."""
    fixed = fixed_of(traced, o)
    if fixed and o.uneven != "whole":
        raise PaseError(
            f"it pads arguments, but {_fixed_text(fixed)}",
            where=f"uneven='{o.uneven}'",
            fix=f"leave out uneven (--uneven), or {FREE_LAYOUTS}",
        )
    problem = SplitProblem.of(
        traced.graph, o.devices, o.machine, o.cost_model, o.optimizer, o.overlap, form, fixed
    )
    _check_machine(problem, o)
    return problem


def _over_every_mesh(
    first: SplitProblem,
    chosen: SplitProblem,
    found: Found,
    searched: Collection[tuple[int, ...]],
    limit: float | None,
    options: CompileOptions,
    say: Progress,
) -> tuple[Found, dict[str, str]]:
    """Return the answer over every mesh if that is requested, and the meshes over which it is proven.

    first: the step as written, of which ``chosen`` is a variant.
    searched: the sizes of the meshes that the answer's bound covers.
    """
    if options.meshes == "few":
        return found, {}

    def allowed(cheaper: Found) -> bool:
        fits = limit is None or memory_of(first, cheaper.configs, cheaper.mesh).total <= limit
        return fits and chosen.variant == first.variant

    found, every = close_meshes(first, found, searched, allowed, say)
    return found, {"meshes": str(every)}


def _compile_staged(
    model: Tree, params: Tree, batch: Sequence[Tree], options: CompileOptions, say: Progress
) -> Compiled:
    """Compile a pipeline with the requested number of ranks."""
    say("tracing the model")
    start = time.perf_counter()
    traced, name = traced_model(model, params, batch, options)
    if fixed := fixed_of(traced, options):
        raise PaseError(
            f"stages store arguments on groups of devices, but {_fixed_text(fixed)}",
            where="pipeline",
            fix=f"leave out pipeline (--pipeline), or {FREE_LAYOUTS}",
        )
    problem = SplitProblem.of(
        traced.graph,
        options.devices,
        options.machine,
        options.cost_model,
        options.optimizer,
        options.overlap,
    )
    _check_machine(problem, options)
    seconds = {"trace": time.perf_counter() - start}
    found = search_pipelines(problem, traced, options, say)
    seconds |= found.seconds | {"total": time.perf_counter() - start}
    plan = plan_staged(problem, traced, name, found, seconds)
    return Compiled(plan=plan, problem=problem, traced=traced, given=())


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


def _or_staged(
    plan: PlanData, problem: SplitProblem, traced: Traced, name: str, options: CompileOptions, say: Progress
) -> PlanData:
    """Return the plan, or a pipeline if that takes less time. The bound is then the lower of the two."""
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
        found = search_pipelines(problem, traced, options, say, below)
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
    staged = plan_staged(problem, traced, name, found, spent)
    bound = min(plan.bound, staged.bound)
    tried = (*plan.tried, *staged.tried)
    baselines = {**plan.baselines, "no stages": plan.cost, **found.others}
    optimal = staged.optimal and bound >= staged.cost * (1 - 1e-6)
    return replace(staged, bound=bound, optimal=optimal, tried=tried, baselines=baselines)


def compare_model(
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    progress: Progress | None = None,
) -> list[tuple[str, PlanData]]:
    """The implementation of ``pase.compare``."""
    c = compile_model(model, params, batch, options, progress)
    given = c.given or price_baselines(c.problem)[0]
    plans = [("pase", c.plan)]
    for b in given:
        plan = plan_of(c.problem, b.strategy, b.mesh, c.plan.model, c.traced)
        plans.append((b.name, replace(plan, memory_limit=c.plan.memory_limit, work=c.plan.work)))
    return sorted(plans, key=lambda pair: (pair[1].cost, pair[0] != "pase"))
