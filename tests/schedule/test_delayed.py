"""Merged and delayed updates: what they send, and that hiding more takes no longer."""

from __future__ import annotations

import pytest

from bench.cases.schedules import chain, link, random_problem
from pase.schedule import Options, ScheduleProblem, check_plan, evaluate, get_policy
from pase.schedule.bound import delayed_bound_s
from pase.schedule.delayed import delayed_plans
from pase.schedule.plan import BucketPlan


def plans_of(problem: ScheduleProblem, staleness: int) -> list[tuple[float, BucketPlan]]:
    sync = get_policy("fifo").make(problem, Options())
    return list(delayed_plans(problem, sync, staleness))


def test_each_way_to_merge_and_to_delay_is_tried_once() -> None:
    """Of k batches, applied d iterations late, the oldest gradient is k - 1 + d iterations old."""
    found = [(p.updates[0].batches, p.staleness) for _, p in plans_of(random_problem(6, 1), 3)]
    assert sorted(found) == sorted(
        (k, k - 1 + d) for k in range(1, 5) for d in range(5 - k) if (k, d) != (1, 0)
    )
    assert not plans_of(random_problem(6, 1), 0)


@pytest.mark.parametrize("links", [1, 2])
def test_plans_are_valid_priced_as_evaluated_and_not_below_the_bound(links: int) -> None:
    problem = random_problem(8, 2, links=links)
    for cost, plan in plans_of(problem, 2):
        check_plan(problem, plan)
        assert evaluate(problem, plan).iteration_s == pytest.approx(cost)
        assert cost >= delayed_bound_s(problem, plan.staleness) * (1 - 1e-9)


def test_where_communication_fits_into_compute_one_delay_hides_it() -> None:
    problem = chain([2.0, 2.0], [3.0, 3.0], [4, 5])
    costs = {(p.period, p.staleness): cost for cost, p in plans_of(problem, 1)}
    assert costs[1, 1] == problem.compute_s == 10.0


def test_where_it_does_not_fit_merging_halves_it() -> None:
    """Two iterations of compute, and one message of 20 s after them."""
    problem = chain([1.0], [1.0], [20], link())
    costs = {(p.period, p.staleness): cost for cost, p in plans_of(problem, 1)}
    assert costs[1, 1] == 20.0 and costs[2, 1] == (2 + 2 + 20) / 2
