"""The way through: a model, traced and searched, becomes a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pase.baselines import Baseline, Skipped
from pase.compiler.fit import fit_variants
from pase.compiler.mesh_search import search_meshes
from pase.compiler.methods import never_worse, price_methods
from pase.compiler.options import CompileOptions
from pase.compiler.plans import plan_found, plan_of
from pase.compiler.problem import Progress, SplitProblem
from pase.compiler.resolve import traced_model
from pase.compiler.variants import Variant, variants

if TYPE_CHECKING:
    from pase.frontends.registry import Traced
    from pase.plan.types import PlanData

__all__ = ["Compiled", "compare_model", "compile_model"]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A plan, and what it was made of. given: the strategies people write by hand, on the same problem."""

    plan: PlanData
    problem: SplitProblem
    traced: Traced
    given: tuple[Baseline, ...]


def compile_model(
    model: Any, params: Any, batch: Sequence[Any], options: CompileOptions, progress: Progress | None = None
) -> Compiled:
    """What ``pase.compile`` does."""
    say = progress or (lambda _: None)
    start = time.perf_counter()
    say("tracing the model")
    traced, name = traced_model(
        model,
        params,
        batch,
        options.unknown,
        options.dims,
        mode=options.mode,
        carry=options.carry,
        chances=options.chances,
        loss=options.loss,
    )
    problem = SplitProblem.of(
        traced.graph, options.devices, options.machine, options.cost_model, options.optimizer, options.overlap
    )
    limit = options.limit_bytes(problem.machine)
    tries = list(variants(traced, problem.graph, options.accumulate, options.remat, limit is not None))
    if tries[0][0] != Variant():
        problem = problem.varied(traced, tries[0][0])
    traced_s = time.perf_counter() - start
    over = problem.meshes(options.mesh, options.max_axes)
    found = search_meshes(problem, over, say)
    if limit is not None:
        problem, found = fit_variants(problem, found, tries, traced, over, limit, options.time_limit, say)
    methods: dict[str, float] = {}
    given: list[Baseline] = []
    skipped: list[Skipped] = []
    if options.baselines:
        say("pricing what people do by hand")
        began = time.perf_counter()
        given, skipped = price_methods(problem)
        found = never_worse(problem, found, given, limit)
        methods["baselines"] = time.perf_counter() - began
        # A method's mesh may be one that was not among ours: it is searched too.
        if options.mesh is None and limit is None:
            known = {m.sizes for m in over}
            more = [b.mesh for b in given if b.mesh.sizes not in known and b.cost < found.solution.cost]
            found = search_meshes(problem, more, say, found) if more else found
    total_s = time.perf_counter() - start
    seconds = {"trace": traced_s, **found.seconds, **methods, "total": total_s}
    plan = plan_found(problem, found, name, traced, seconds, given, skipped)
    return Compiled(plan=plan, problem=problem, traced=traced, given=tuple(given))


def compare_model(
    model: Any, params: Any, batch: Sequence[Any], options: CompileOptions, progress: Progress | None = None
) -> list[tuple[str, PlanData]]:
    """What ``pase.compare`` does."""
    c = compile_model(model, params, batch, options, progress)
    given = c.given or price_methods(c.problem)[0]
    plans = [("pase", c.plan)]
    plans += [(b.name, plan_of(c.problem, b.strategy, b.mesh, c.plan.model, c.traced)) for b in given]
    return sorted(plans, key=lambda pair: (pair[1].cost, pair[0] != "pase"))
