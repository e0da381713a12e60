"""The fast mode is near the optimum and near the bound, on small and on large problems."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cases.schedules import link, profile, random_problem
from pase.schedule import (
    check_plan,
    evaluate,
)
from pase.schedule.bound import preemptive_bound_s
from pase.schedule.exact import exact_plan
from pase.schedule.fast import coarsen, fast_plan, refine
from pase.schedule.greedy import instance
from pase.schedule.view import plain_view


@pytest.mark.parametrize("seed", range(5))
def test_fast_is_within_one_percent_of_exact(seed: int) -> None:
    problem = random_problem(6, seed)
    plan, cost, bound = fast_plan(problem)
    exact = exact_plan(problem, plan, bound_s=bound, time_limit_s=30)
    assert exact.proven
    assert cost <= exact.iteration_s * 1.01
    assert evaluate(problem, plan).iteration_s == pytest.approx(cost, rel=1e-9)


def test_where_startups_are_free_ours_meets_the_preemptive_bound() -> None:
    for seed in range(3):
        problem = random_problem(25, seed, startup=0.0)
        _, cost, bound = fast_plan(problem)
        assert bound == pytest.approx(preemptive_bound_s(problem))
        assert cost == pytest.approx(bound, rel=1e-6)


def test_two_thousand_tensors() -> None:
    problem = random_problem(2000, 1)
    plan, cost, bound = fast_plan(problem)
    check_plan(problem, plan)
    assert cost <= 1.03 * bound


def test_the_coarse_form_holds_at_least_as_well_taken_apart() -> None:
    problem = random_problem(200, 3)
    view = plain_view(problem)
    inst = instance(problem, view)
    msg = np.arange(200) // 40
    pieces = (msg, np.arange(200), inst.tensors["nbytes"].copy(), np.zeros(5, np.int64))
    small, coarse, first = coarsen(inst, pieces)
    assert small.order.size < 100
    back = refine(inst, coarse, first)
    assert np.bincount(back[1], weights=back[2]).tolist() == inst.tensors["nbytes"].tolist()
    assert (np.sort(back[0]) == np.sort(msg)).all()


@pytest.mark.data("traces/pipedream_profiles")
@pytest.mark.parametrize("name", ["gnmt", "resnet101", "vgg16", "inception_v3"])
def test_on_measured_profiles(name: str) -> None:
    problem = profile(name, link("net", alpha_s=50e-6, beta=1e-9))
    plan, cost, bound = fast_plan(problem)
    check_plan(problem, plan)
    assert bound <= cost * (1 + 1e-9)
    assert cost <= 1.03 * preemptive_bound_s(problem)
