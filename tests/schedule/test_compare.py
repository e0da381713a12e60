"""A comparison of policies: none is below its bound, and ours is the best."""

from __future__ import annotations

from hypothesis import given, settings

from bench.cases.schedules import link, random_problem, small_problems
from pase.schedule import (
    Options,
    ScheduleProblem,
    check_plan,
    compare_policies,
    lower_bound_s,
)
from pase.schedule.policies.tictac import parameter_server


@settings(max_examples=15)
@given(small_problems(most=5, links=2))
def test_in_a_comparison_never_worse(problem: ScheduleProblem) -> None:
    outcomes = compare_policies(problem, None, Options(mode="fast"))
    done = {o.policy: o for o in outcomes if o.evaluation is not None}
    assert done["ours"].evaluation is not None
    for o in done.values():
        assert o.evaluation is not None and o.plan is not None
        check_plan(problem, o.plan)
        assert done["ours"].evaluation.iteration_s <= o.evaluation.iteration_s * (1 + 1e-9)
        assert o.evaluation.iteration_s >= o.bound_s * (1 - 1e-6)
    assert {o.policy for o in outcomes if o.plan is None} == {"deft"}


def test_on_a_parameter_server_no_policy_beats_ours() -> None:
    problem = parameter_server(random_problem(8, 2), push=link("up", beta=1e-9), pull=link("down", beta=1e-9))
    outcomes = compare_policies(problem, None, Options())
    costs = {o.policy: o.evaluation.iteration_s for o in outcomes if o.evaluation}
    assert min(costs.values()) == costs["ours"] >= lower_bound_s(problem)
    assert "us_byte" not in costs
