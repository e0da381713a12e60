"""Finds the best plan that a target can express, and what it costs against the best plan of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.baselines.masks import NO_BATCH
from pase.compiler.meshes.search import add_seconds
from pase.compiler.problem.problem import Progress
from pase.errors import Infeasible, PaseError
from pase.ir import Remark
from pase.ir.blocks import RecomputeKind
from pase.plan.table import cost_text
from pase.plan.targets import TARGETS, PlanTarget, TargetForm

if TYPE_CHECKING:
    from pase.compiler.compilation import Compiled
    from pase.compiler.problem.options import CompileOptions
    from pase.plan.types import PlanData

__all__ = ["ANY_PROGRAM", "for_target", "step_options"]

ANY_PROGRAM = "any_program"
"""The entry of ``PlanData.baselines`` for the best plan of all."""


def for_target(
    options: CompileOptions,
    compiled: Callable[[CompileOptions, TargetForm | None], Compiled],
    say: Progress,
) -> Compiled:
    """Return the best plan of any of the target's forms. Raises Infeasible if there is none.

    compiled: compiles with these options, within a form. Without a form it gives the best plan of all, with its
        baselines; this is left out if the options ask for no baselines.
    """
    target = TARGETS[options.target]
    within = step_options(target, options)
    free = compiled(replace(options, target="any"), None) if options.baselines else None
    found: list[Compiled] = []
    reasons: dict[str, None] = {}
    kinds = _recomputed_kinds(target)
    for form in target.forms:
        say(f"searching what {target.program} can express")
        plain: Compiled | None = None
        try:
            plain = compiled(within, form)
            found.append(plain)
        except Infeasible as e:
            reasons[e.what] = None
        best = plain
        for remat in kinds[::-1]:
            if not _needs_recomputation(best, target, options):
                break
            say(f"with {'every layer' if remat == 'all' else 'the light work of every layer'} recomputed")
            try:
                best = compiled(replace(within, remat=remat), form)
                found.append(best)
            except PaseError as e:  # the model has no repeated blocks, or it does not fit so either
                reasons[e.what] = None
    if not found:
        n = options.devices
        given = any(NO_BATCH in reason for reason in reasons)
        batch = f"take a batch that {n} divides (of hf: and zoo: models, batch={n})"
        raise Infeasible(
            f"no plan that {target.program} can express: {'; '.join(reasons)}",
            where=f"target '{options.target}'",
            fix=f"{batch if given else 'change the batch'} or another number of devices, or leave out target (--for) "
            "for a plan that pase runs",
        )
    best = min(found, key=lambda c: (c.plan.misfit is not None, not c.plan.fits, c.plan.cost))
    return replace(best, plan=_against(best.plan, [c.plan for c in found], target, free))


def step_options(target: PlanTarget, o: CompileOptions) -> CompileOptions:
    """Return the options, limited to what the target runs. Raises PaseError if they ask for more."""
    if o.accumulate not in (None, 1) and not target.micro_batches:
        raise _refused(target, o, f"accumulate={o.accumulate}", "runs no micro-batches", "accumulate")
    if o.remat not in ("auto", "none", *_recomputed_kinds(target)):
        what = "every layer or nothing" if target.recomputes else "only what the model marks"
        what = "whole layers or their light work" if target.recomputes_some else what
        raise _refused(target, o, f"remat='{o.remat}'", f"recomputes {what}", "remat")
    if o.regather == "all" and not target.regathers:
        raise _refused(target, o, "regather='all'", "gathers nothing again for backward", "regather")
    if o.once not in ("none", "auto"):
        raise _refused(target, o, f"once='{o.once}'", "hoists nothing out of micro-batches", "once")
    accumulate = o.accumulate if target.micro_batches else 1
    remat = "none" if o.remat == "auto" else o.remat
    regather = o.regather if target.regathers else "none"
    return replace(o, accumulate=accumulate, remat=remat, once="none", regather=regather, baselines=False)


def _recomputed_kinds(target: PlanTarget) -> list[RecomputeKind]:
    """Return what the target may recompute of every block, the most work first."""
    kinds: list[tuple[RecomputeKind, bool]] = [("all", target.recomputes), ("light", target.recomputes_some)]
    return [kind for kind, runs in kinds if runs]


def _needs_recomputation(plain: Compiled | None, target: PlanTarget, o: CompileOptions) -> bool:
    """Whether recomputation may help: nothing fits without it, or only more micro-batches than asked for.

    plain: what was found without it; None if there is no such plan.
    """
    if not target.recomputes or o.remat != "auto" or o.memory_limit in (None, "none"):
        return False
    return plain is None or plain.plan.misfit is not None or plain.plan.accumulate > (o.accumulate or 1)


def _refused(target: PlanTarget, o: CompileOptions, where: str, what: str, leave: str) -> PaseError:
    return PaseError(
        f"{target.program} {what}",
        where=f"{where} with target '{o.target}'",
        fix=f"leave out {leave}, or target (--for)",
    )


def _against(plan: PlanData, forms: list[PlanData], target: PlanTarget, free: Compiled | None) -> PlanData:
    """Return the plan with bounds over all forms, the baselines of the free plan, and a remark that compares them."""
    rivals = [p for p in forms if p.misfit is None or plan.misfit is not None]
    bound = min(p.bound for p in rivals)
    out = replace(
        plan,
        bound=bound,
        optimal=all(p.optimal or p.bound >= plan.cost for p in rivals) and bound >= plan.cost * (1 - 1e-9),
        tried=tuple(t for p in forms for t in p.tried),
        seconds=_spent(forms),
    )
    if free is None:
        return out
    best = free.plan
    memory = {**best.baseline_memory, ANY_PROGRAM: best.memory.total} if best.baseline_memory else {}
    return replace(
        out,
        baselines={**best.baselines, ANY_PROGRAM: best.cost},
        baseline_memory=memory,
        skipped={**best.skipped, **out.skipped},
        seconds=_spent([best, *forms]),
        noted=(*out.noted, Remark("assumed", _comparison(out, best, target))),
    )


def _spent(plans: Sequence[PlanData]) -> dict[str, float]:
    """The seconds of one search after another. They share the trace, and each total runs from the same start."""
    shared = {k: max(p.seconds.get(k, 0.0) for p in plans) for k in ("trace", "total")}
    return add_seconds(*(p.seconds for p in plans)) | shared


def _comparison(plan: PlanData, best: PlanData, target: PlanTarget) -> str:
    """What it costs to be limited to the target, in a sentence."""
    said = f"limited to what {target.program} can express, which is {target.says}"
    if plan.misfit is not None and best.misfit is None:
        return f"{said}: none of it fits in memory; the best plan of all fits, at {cost_text(best.cost, best.unit)}"
    if best.misfit is not None and plan.misfit is None:
        return f"{said}; nothing else that was searched fits"
    more = plan.cost / best.cost - 1 if best.cost else 0.0
    if more < _EQUAL:
        return f"{said}; the best plan of all is not faster"
    return (
        f"{said}; the best plan of all takes {cost_text(best.cost, best.unit)}, so this costs {more:.1%} more"
    )


_EQUAL = 0.0005
