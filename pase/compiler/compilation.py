"""The overall flow: a model is traced and searched, and the result becomes a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.baselines import Baseline
from pase.compiler.batch import most_throughput
from pase.compiler.constraints import with_costs
from pase.compiler.idle import or_fewer
from pase.compiler.meshes.baselines import Rivals, price_baselines
from pase.compiler.meshes.plans import plan_of
from pase.compiler.passes import PASSES, Compilation, Pass, Question, compilation_text, problem_of, run_passes
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.compiler.resolve import traced_model
from pase.compiler.targets import for_target
from pase.compiler.uneven import or_padded
from pase.errors import Infeasible
from pase.files.terminal import console
from pase.garbage import seldom_collected
from pase.ir import Remark
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.frontends.registry import Traced
    from pase.plan.types import PlanData

__all__ = ["Compiled", "compare_model", "compile_model"]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A plan and what it was made from. rivals: the baselines of the same problem."""

    plan: PlanData
    problem: SplitProblem
    traced: Traced
    rivals: Rivals

    @property
    def given(self) -> list[Baseline]:
        """The baselines, priced."""
        return self.rivals.all[0]


@seldom_collected()
def compile_model(
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    progress: Progress | None = None,
) -> Compiled:
    """The implementation of ``pase.compile``."""
    if options.print_after not in (None, "all"):
        PASSES[options.print_after]  # an unknown name is an error
    say = progress or (lambda _: None)
    if options.objective == "throughput" and options.ranks is None:
        return most_throughput(compile_model, model, params, batch, options, say)
    start = time.perf_counter()
    say("tracing the model")
    traced, name = traced_model(model, params, batch, options)
    tracing_s = time.perf_counter() - start
    asked = Question(traced=traced, name=name, options=options, say=say, start=start, tracing_s=tracing_s)
    if options.ranks is not None:
        return _compiled(asked)

    def split(o: CompileOptions) -> Compiled:
        if o.target == "any":
            return _compiled(replace(asked, options=o))
        return for_target(o, lambda limited, form: _compiled(replace(asked, options=limited, form=form)), say)

    def compiled(o: CompileOptions) -> Compiled:
        if o.uneven == "padded":
            return _padded(replace(asked, options=o))
        made = split(o)
        return with_costs(made, o, split) if o.constraints and o.baselines else made

    return or_fewer(compiled(options), options, compiled, say)


def _padded(q: Question) -> Compiled:
    """Return the plan of a traced model, as written or with padded dims."""
    written: Compiled | Infeasible
    try:
        written = _compiled(q)
    except Infeasible as e:  # with padded dims, more of it can be split
        written = e
    return or_padded(
        problem_of(q.traced, q.options),
        q.traced,
        written,
        lambda t: _compiled(replace(q, traced=t, start=time.perf_counter(), tracing_s=0.0)),
        q.options.accumulate,
        q.say,
    )


def _compiled(q: Question) -> Compiled:
    """Return a traced model's plan."""

    def after(p: Pass, a: Compilation) -> None:
        if q.options.print_after in (p.name, "all"):
            form = "" if q.form is None else f", {q.form.name}"
            console(err=True).print(
                f"--- after {p.name}, {q.options.devices} devices{form}",
                compilation_text(a),
                sep="\n",
                markup=False,
                highlight=False,
            )

    a = run_passes(q, after)
    return Compiled(plan=a.whole, problem=a.problem, traced=q.traced, rivals=a.rivals)


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
        noted = (*plan.noted, *(Remark("assumed", note) for note in b.notes))
        plans.append((b.name, replace(plan, memory_limit=c.plan.memory_limit, work=c.plan.work, noted=noted)))
    return sorted(plans, key=lambda pair: (pair[1].cost, pair[0] != "pase"))
