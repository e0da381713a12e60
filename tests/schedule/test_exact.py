"""The exact mode finds the optimum: against enumeration of all plans."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings

from bench.cases.schedules import chain, link, small_problems
from pase.schedule import (
    BucketPlan,
    Link,
    Message,
    Options,
    Piece,
    ScheduleProblem,
    SendTime,
    check_plan,
    evaluate,
    get_policy,
    lower_bound_s,
    whole,
)
from pase.schedule.exact import exact_plan
from pase.schedule.fast import fast_plan
from pase.schedule.types import AxisGroup


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
