"""The way through: a model, traced and searched, becomes a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pase.baselines import Baseline
from pase.compiler.fit import fitted
from pase.compiler.options import CompileOptions
from pase.compiler.problem import Problem, Progress
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
    problem: Problem
    traced: Traced
    given: tuple[Baseline, ...]


def compile_model(
    model: Any, params: Any, batch: Sequence[Any], options: CompileOptions, progress: Progress | None = None
) -> Compiled:
    """What ``pase.compile`` does."""
    say = progress or (lambda _: None)
    start = time.perf_counter()
    say("tracing the model")
    traced, name = traced_model(model, params, batch, options.unknown, options.dims)
    problem = Problem.of(
        traced.graph, options.devices, options.machine, options.cost_model, options.optimizer
    )
    problem = replace(problem, overlap=options.overlap)
    limit = options.limit_bytes(problem.machine)
    tries = list(variants(traced, problem.graph, options.accumulate, options.remat, limit is not None))
    if tries[0][0] != Variant():
        problem = problem.varied(traced, tries[0][0])
    seconds = {"trace": time.perf_counter() - start}
    over = problem.meshes(options.mesh, options.max_axes)
    found = problem.search(over, say, seconds)
    if limit is not None:
        problem, found = fitted(problem, found, tries, traced, over, limit, options.time_limit, say, seconds)
    if options.baselines:
        say("pricing what people do by hand")
        t0 = time.perf_counter()
        given, skipped = problem.baselines()
        found = problem.never_worse(found, given, limit)
        seconds["baselines"] = time.perf_counter() - t0
        # A method's mesh may be one that was not among ours: it is searched too.
        if options.mesh is None and limit is None:
            known = {m.sizes for m in over}
            more = [b.mesh for b in given if b.mesh.sizes not in known and b.cost < found.solution.cost]
            found = problem.search(more, say, seconds, found) if more else found
    else:
        given, skipped = [], []
    seconds["total"] = time.perf_counter() - start
    plan = problem.plan(found, name, traced, seconds, given, skipped)
    return Compiled(plan=plan, problem=problem, traced=traced, given=tuple(given))


def compare_model(
    model: Any, params: Any, batch: Sequence[Any], options: CompileOptions, progress: Progress | None = None
) -> list[tuple[str, PlanData]]:
    """What ``pase.compare`` does."""
    c = compile_model(model, params, batch, options, progress)
    given = c.given or c.problem.baselines()[0]
    plans = [("pase", c.plan)]
    plans += [(b.name, c.problem.plan_of(b.strategy, b.mesh, c.plan.model, c.traced)) for b in given]
    return sorted(plans, key=lambda pair: (pair[1].cost, pair[0] != "pase"))
