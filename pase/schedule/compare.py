"""Compares policies on one problem, for the table of `pase schedule`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pase.errors import Infeasible
from pase.files.json_values import JsonObject
from pase.schedule.bound import delayed_bound_s, lower_bound_s
from pase.schedule.plan import BucketPlan
from pase.schedule.registry import Options, Policy, all_policies, get_policy
from pase.schedule.simulate import Evaluation, as_sequence, evaluate
from pase.schedule.types import ScheduleProblem

__all__ = ["PolicyResult", "compare_policies"]


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """A policy's plan and its evaluation. If the policy does not apply, both are None and note gives the reason."""

    policy: str
    plan: BucketPlan | None
    evaluation: Evaluation | None
    bound_s: float
    note: str = ""

    @property
    def iteration_s(self) -> float:
        return self.evaluation.iteration_s if self.evaluation else float("inf")

    @property
    def gap(self) -> float:
        """How far the iteration is above the bound, as a fraction of the bound."""
        return max(0.0, self.evaluation.iteration_s / self.bound_s - 1.0) if self.evaluation else float("inf")

    def to_json(self) -> JsonObject:
        e = self.evaluation
        if e is None or self.plan is None:
            return {"policy": self.policy, "skipped": self.note}
        return {
            "policy": self.policy,
            "iteration_s": e.iteration_s,
            "exposed_s": e.exposed_s,
            "bubble_s": e.bubble_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "updates_per_iteration": e.updates_per_iteration,
            "staleness": e.staleness,
            "messages": e.messages,
            "efficiency": e.efficiency,
            "speedup": e.speedup,
            "link_busy_s": e.link_busy_s,
            "detail": self.plan.detail,
        }


def compare_policies(
    problem: ScheduleProblem, names: Iterable[str] | None, options: Options
) -> list[PolicyResult]:
    """Evaluate the named policies (None for all), each as a plan with one fixed order.

    "ours" comes last and starts from the plans of the others. If all policies were asked for, one that does not apply
    is in the list with the reason. If it was named, Infeasible is raised.
    """
    wanted = [get_policy(n) for n in names] if names is not None else list(all_policies().values())
    wanted.sort(key=lambda p: p.name == "ours")
    bound = lower_bound_s(problem)
    out: list[PolicyResult] = []
    for policy in wanted:
        reason = _why_not(problem, policy, options)
        try:
            if reason:
                raise Infeasible(reason)
            mine = options
            if policy.name == "ours":
                mine = replace(options, warm_starts=(*options.warm_starts, *(o.plan for o in out if o.plan)))
            plan = policy.make(problem, mine)
        except Infeasible as e:
            if names is not None:
                raise
            out.append(
                PolicyResult(policy=policy.name, plan=None, evaluation=None, bound_s=bound, note=str(e))
            )
            continue
        if plan.period == 1 and plan.staleness == 0:
            plan = as_sequence(problem, plan)
        evaluation = evaluate(problem, plan)
        out.append(PolicyResult(policy=policy.name, plan=plan, evaluation=evaluation, bound_s=bound))
    # A bound that ours has proven holds for every plan without staleness.
    proven = max([bound, *(_sync_bound(o.plan) for o in out if o.policy == "ours" and o.plan)])
    late = delayed_bound_s(problem, options.staleness)
    return [
        replace(o, bound_s=late if o.plan is not None and (o.plan.staleness or o.plan.period > 1) else proven)
        for o in out
    ]


def _sync_bound(plan: BucketPlan) -> float:
    without = plan.detail.get("without_staleness", plan.detail)
    return float(without.get("bound_s", 0.0))


def _why_not(problem: ScheduleProblem, policy: Policy, options: Options) -> str:
    if policy.delays and options.staleness < 1:
        return (
            f"{policy.name} delays updates: allow it with --staleness N (gradients at most N iterations old)"
        )
    if policy.plain_only and not problem.is_plain:
        return f"{policy.name} is for plain gradients; '{problem.name}' has gathers, pulls or dataflow"
    return ""
