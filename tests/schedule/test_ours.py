"""The policy ours is never worse than any other, never below the lower bound, and optimal if the optimum is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from bench.cases.schedules import chain, link, profile, random_problem, small_problems, vgg19
from pase.errors import PaseError
from pase.schedule import (
    BucketPlan,
    Link,
    Message,
    Options,
    Piece,
    ScheduleProblem,
    SendTime,
    all_policies,
    check_plan,
    compare_policies,
    evaluate,
    get_policy,
    lower_bound_s,
    whole,
)
from pase.schedule.bound import jackson_s, preemptive_bound_s
from pase.schedule.coarse import coarsen, refine
from pase.schedule.cpsat import best_order
from pase.schedule.exact import exact_plan
from pase.schedule.fast import fast_plan
from pase.schedule.greedy import instance
from pase.schedule.policies.tictac import parameter_server
from pase.schedule.types import AxisGroup
from pase.schedule.view import plain_view


def enumerate_all(problem: ScheduleProblem, cuts: int) -> float:
    """The best iteration over all plans that cut each tensor into `cuts` equal parts: every assignment of parts to
    messages, every order of messages, and every choice of links.
    """
    atoms = [
        Piece(tensor=i, offset=t.nbytes * c // cuts, nbytes=t.nbytes * (c + 1) // cuts - t.nbytes * c // cuts)
        for i, t in enumerate(problem.tensors)
        for c in range(cuts)
    ]
    atoms = [a for a in atoms if a.nbytes]
    best = float("inf")
    for label in itertools.product(range(len(atoms)), repeat=len(atoms)):
        used = sorted(set(label))
        if used != list(range(len(used))):
            continue
        messages = [tuple(a for a, x in zip(atoms, label, strict=True) if x == m) for m in used]
        for links in itertools.product(range(len(problem.links)), repeat=len(messages)):
            plan = BucketPlan(
                policy="x",
                messages=tuple(Message(pieces=p, link=k) for p, k in zip(messages, links, strict=True)),
            )
            best = min(
                best, evaluate(problem, plan, kernel="python", timeline=False, check=False).iteration_s
            )
    return best


@settings(max_examples=12)
@given(small_problems(most=3))
def test_exact_is_no_worse_than_any_enumerated_plan(problem: ScheduleProblem) -> None:
    start = BucketPlan(policy="x", messages=(whole(problem, range(len(problem.tensors))),))
    exact = exact_plan(problem, start, bound_s=lower_bound_s(problem), time_limit_s=20)
    enumerated = enumerate_all(problem, 1)
    assert exact.proven
    assert exact.iteration_s <= enumerated * (1 + 2e-5)
    assert exact.bound_s <= exact.iteration_s
    assert exact.bound_s >= lower_bound_s(problem) * (1 - 1e-5)


def test_exact_equals_enumeration_where_cutting_does_not_pay() -> None:
    problem = chain([1.0, 2.0, 1.0], [2.0, 1.0, 3.0], [4, 3, 5], link(alpha_s=6.0))
    start = get_policy("fifo").make(problem, Options())
    exact = exact_plan(problem, start)
    assert exact.proven
    assert exact.iteration_s == pytest.approx(enumerate_all(problem, 1), rel=2e-5)
    assert exact.iteration_s == pytest.approx(enumerate_all(problem, 2), rel=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_fast_is_within_one_percent_of_exact(seed: int) -> None:
    problem = random_problem(6, seed)
    plan, cost, bound = fast_plan(problem)
    exact = exact_plan(problem, plan, bound_s=bound, time_limit_s=30)
    assert exact.proven
    assert cost <= exact.iteration_s * 1.01
    assert evaluate(problem, plan).iteration_s == pytest.approx(cost, rel=1e-9)


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


def test_vgg19_needs_no_staleness_beyond_its_bound() -> None:
    """257.99 ms is the ideal preemptive schedule. Cutting tensors reaches it, and it is proven optimal."""
    problem = vgg19()
    plan = get_policy("ours").make(problem, Options())
    assert evaluate(problem, plan).iteration_s * 1e3 == pytest.approx(257.99, abs=0.005)
    assert plan.detail["proven"]


def test_cp_sat_finds_the_optimum_of_whole_buckets() -> None:
    pytest.importorskip("ortools", reason="the extra `ortools` is not installed")
    problem = vgg19()
    plan, bound = best_order(problem, get_policy("fifo").make(problem, Options()))
    assert evaluate(problem, plan).iteration_s * 1e3 == pytest.approx(258.32, abs=0.005)
    assert bound * 1e3 == pytest.approx(258.32, abs=0.01)


def test_exact_on_a_measured_table_and_two_groups() -> None:
    """A concave table with three segments, and tensors that may not share a message."""
    curve = SendTime.table([1, 10, 30], [3.0, 5.0, 7.0])
    problem = chain([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [9, 12, 8], Link(name="net", curve=curve))
    problem = replace(
        problem,
        tensors=tuple(replace(t, axes=AxisGroup(("ab"[i % 2],))) for i, t in enumerate(problem.tensors)),
    )
    plan, cost, bound = fast_plan(problem)
    exact = exact_plan(problem, plan, bound_s=bound)
    assert exact.iteration_s <= cost
    assert exact.iteration_s <= enumerate_groups(problem) * (1 + 1e-5)
    check_plan(problem, exact.plan)


def enumerate_groups(problem: ScheduleProblem) -> float:
    """The best iteration with tensors 0 and 2 together or apart and tensor 1 alone, in every order."""
    best = float("inf")
    for parts in (((0, 2), (1,)), ((0,), (1,), (2,))):
        for order in itertools.permutations(parts):
            plan = BucketPlan(policy="x", messages=tuple(whole(problem, p) for p in order))
            best = min(best, evaluate(problem, plan).iteration_s)
    return best


def test_on_a_parameter_server_no_policy_beats_ours() -> None:
    problem = parameter_server(random_problem(8, 2), push=link("up", beta=1e-9), pull=link("down", beta=1e-9))
    outcomes = compare_policies(problem, None, Options())
    costs = {o.policy: o.evaluation.iteration_s for o in outcomes if o.evaluation}
    assert min(costs.values()) == costs["ours"] >= lower_bound_s(problem)
    assert "us_byte" not in costs


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


@pytest.mark.parametrize("n", [1, 5, 100])
def test_jackson_is_the_windows_maximum(n: int) -> None:
    """Jackson's bound is the maximum over (R, Q) of R + work released at R or later with a tail of at least Q + Q."""
    g = np.random.default_rng(n)
    r, p, q = g.integers(0, 50, n) * 1.0, g.integers(1, 9, n) * 1.0, g.integers(0, 50, n) * 1.0
    windows = max(a + p[(r >= a) & (q >= b)].sum() + b for a in r for b in q if ((r >= a) & (q >= b)).any())
    assert jackson_s(r, p, q) == windows


def test_bad_modes_are_named() -> None:
    with pytest.raises(PaseError, match="'slow'") as e:
        get_policy("ours").make(vgg19(), Options(mode="slow"))
    assert e.value.where == "--mode"
    with pytest.raises(PaseError, match="'best'"):
        get_policy("best")


@pytest.mark.data("traces/pipedream_profiles")
@pytest.mark.parametrize("name", ["gnmt", "resnet101", "vgg16", "inception_v3"])
def test_on_measured_profiles(name: str) -> None:
    problem = profile(name, link("net", alpha_s=50e-6, beta=1e-9))
    plan, cost, bound = fast_plan(problem)
    check_plan(problem, plan)
    assert bound <= cost * (1 + 1e-9)
    assert cost <= 1.03 * preemptive_bound_s(problem)
