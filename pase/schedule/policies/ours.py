"""The policy ours: optimizes fusion, partition, order and link together, and gives a lower bound and the gap."""

from __future__ import annotations

from dataclasses import replace

from pase.errors import Infeasible, PaseError
from pase.schedule.bound import delayed_bound_s
from pase.schedule.delayed import delayed_plans
from pase.schedule.exact import PROVEN, exact_plan
from pase.schedule.fast import fast_plan
from pase.schedule.general import general_plan
from pase.schedule.plan import BucketPlan
from pase.schedule.policies.deft import deft
from pase.schedule.preserver import TrainingState, judge
from pase.schedule.registry import Options, register
from pase.schedule.simulate import evaluate
from pase.schedule.types import ScheduleProblem

__all__ = ["ours"]

AUTO_EXACT_TENSORS = 8
"""mode="auto" uses the exact solver for up to this many tensors."""


@register("ours", "fusion + partition + order + link at once, with a lower bound and the gap", rank=2)
def ours(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """The best plan found. Its detail has bound_s, gap, proven, and how it was found."""
    if options.mode not in ("auto", "fast", "exact"):
        raise PaseError(
            f"there is no mode '{options.mode}'", where="--mode", fix="choose auto, fast or exact"
        )
    if not problem.tensors:
        return BucketPlan(policy="ours", messages=(), detail={"bound_s": problem.compute_s, "gap": 0.0})
    if problem.is_plain:
        plan, cost, bound = fast_plan(problem, seed=options.seed, warm_starts=options.warm_starts)
        how, proven = "fast", cost <= bound * (1 + PROVEN)
        small = len(problem.tensors) <= AUTO_EXACT_TENSORS
        if not proven and (options.mode == "exact" or (options.mode == "auto" and small)):
            exact = exact_plan(problem, plan, time_limit_s=options.time_limit_s, bound_s=bound)
            plan, cost, bound, proven = exact.plan, exact.iteration_s, exact.bound_s, exact.proven
            how = "exact"
    else:
        if options.mode == "exact":
            raise PaseError(
                "exact mode is for plain gradient synchronisation, and the problem has gathers, pulls or dataflow",
                where=f"problem '{problem.name}'",
                fix="use mode fast",
            )
        plan, cost, bound = general_plan(problem, warm_starts=options.warm_starts)
        how, proven = "general", cost <= bound * (1 + PROVEN)
    detail = {"bound_s": bound, "gap": max(0.0, cost / bound - 1.0), "proven": proven, "how": how}
    plan = replace(plan, detail=detail)
    if options.staleness and all(t.lag == 1 and not t.follows for t in problem.tensors) and problem.is_plain:
        return _delayed(problem, plan, cost, options)
    return plan


def _delayed(problem: ScheduleProblem, sync: BucketPlan, cost: float, options: Options) -> BucketPlan:
    """The plan with the shortest iteration that passes the Preserver: plain, merged, delayed, or DeFT's.

    Among equals, it is the one that updates most often, then the one with the smallest staleness.
    """
    walk = options.walk or TrainingState()
    candidates = [(cost, sync), *delayed_plans(problem, sync, options.staleness)]
    try:
        plan = deft(problem, options)
        candidates.append((evaluate(problem, plan, timeline=False).iteration_s, plan))
    except Infeasible:
        pass
    for plan in options.warm_starts:
        if 0 < plan.staleness <= options.staleness:
            candidates.append((evaluate(problem, plan, timeline=False).iteration_s, plan))
    judged = [(c, p, judge(walk, [u.batches for u in p.updates])) for c, p in candidates]
    passed = [(c, p, v) for c, p, v in judged if v.passed]
    least = min(c for c, _, _ in passed)
    c, plan, verdict = min(
        ((c, p, v) for c, p, v in passed if c <= least * (1 + 1e-4)),
        key=lambda x: (-x[1].updates_per_iteration, x[1].staleness, x[0]),
    )
    bound = delayed_bound_s(problem, options.staleness)
    detail = {
        "bound_s": bound,
        "gap": max(0.0, c / bound - 1.0),
        "proven": c <= bound * (1 + PROVEN),
        "how": "delayed" if plan is not sync else sync.detail["how"],
        "preserver": str(verdict),
        "passed": verdict.passed,
        "without_staleness": {"iteration_s": cost, "bound_s": sync.detail["bound_s"]},
    }
    return replace(plan, policy="ours", detail=detail)
