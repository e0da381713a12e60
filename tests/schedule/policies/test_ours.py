"""The policy ours is never worse than any other, and never below the lower bound."""

from __future__ import annotations

import math

import pytest

from bench.cases.schedules import BETA, link, random_problem, vgg19
from pase.errors import PaseError
from pase.schedule import (
    Options,
    all_policies,
    evaluate,
    get_policy,
    lower_bound_s,
)
from pase.schedule.bound import delayed_bound_s

NCCL = link("nccl", beta=BETA)


GLOO = link("gloo", beta=BETA * 1.65)


def test_ours_with_staleness() -> None:
    problem = vgg19(NCCL, GLOO)
    last = math.inf
    for allowed in range(4):
        plan = get_policy("ours").make(problem, Options(staleness=allowed, mode="fast"))
        cost = evaluate(problem, plan).iteration_s
        assert plan.staleness <= allowed
        # Among plans that are within 1e-4, the policy takes the one that updates more often.
        assert cost <= last * (1 + 2e-4)
        assert cost >= delayed_bound_s(problem, allowed) * (1 - 1e-9)
        if allowed:
            deft = get_policy("deft").make(problem, Options(staleness=allowed))
            assert cost <= evaluate(problem, deft).iteration_s * (1 + 2e-4)
            assert plan.detail["passed"]
        last = cost
    assert last == pytest.approx(problem.compute_s, rel=1e-6)


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_any_other(seed: int, links: int) -> None:
    """The policy ours does not start from the plans of the others here."""
    problem = random_problem(40, seed, links=links)
    ours = evaluate(problem, get_policy("ours").make(problem, Options(mode="fast"))).iteration_s
    assert ours >= lower_bound_s(problem) * (1 - 1e-9)
    for policy in all_policies().values():
        if not policy.delays and policy.name != "ours":
            other = evaluate(problem, policy.make(problem, Options())).iteration_s
            assert ours <= other * (1 + 1e-9), policy.name


def test_vgg19_needs_no_staleness_beyond_its_bound() -> None:
    """257.99 ms is the ideal preemptive schedule. Cutting tensors reaches it, and it is proven optimal."""
    problem = vgg19()
    plan = get_policy("ours").make(problem, Options())
    assert evaluate(problem, plan).iteration_s * 1e3 == pytest.approx(257.99, abs=0.005)
    assert plan.detail["proven"]


def test_bad_modes_are_named() -> None:
    with pytest.raises(PaseError, match="'slow'") as e:
        get_policy("ours").make(vgg19(), Options(mode="slow"))
    assert e.value.where == "--mode"
    with pytest.raises(PaseError, match="'best'"):
        get_policy("best")
