"""Every policy that is registered keeps to what a plan is."""

from __future__ import annotations

import pytest

from bench.cases.schedules import random_problem
from pase.schedule import (
    Options,
    all_policies,
    check_plan,
    get_policy,
)


@pytest.mark.parametrize("name", list(all_policies()))
def test_every_policy_covers_each_byte_once_and_repeats_itself(name: str) -> None:
    problem = random_problem(15, 7)
    options = Options(staleness=4, mode="fast")
    plan = get_policy(name).make(problem, options)
    check_plan(problem, plan)
    assert get_policy(name).make(problem, options) == plan
    assert plan.policy == name
