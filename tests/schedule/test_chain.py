"""The evaluator of plain problems agrees with the general one."""

from __future__ import annotations

import pytest

from bench.cases.schedules import random_problem
from pase.schedule import (
    Options,
    all_policies,
    as_sequence,
    evaluate,
)
from pase.schedule.chain import plain_iteration_s


@pytest.mark.some(3)
@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_three_evaluators_and_the_fixed_order_agree(seed: int, links: int) -> None:
    problem = random_problem(20, seed, links=links)
    for policy in all_policies().values():
        if policy.delays:
            continue
        plan = policy.make(problem, Options(mode="fast"))
        cost = evaluate(problem, plan, kernel="python").iteration_s
        assert evaluate(problem, plan, kernel="numba").iteration_s == cost
        assert plain_iteration_s(problem, plan) == pytest.approx(cost, rel=1e-9)
        assert evaluate(problem, as_sequence(problem, plan)).iteration_s == pytest.approx(cost, rel=1e-9)
