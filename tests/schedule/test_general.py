"""Plans of problems with gathers: neighbours are fused up to a cap, large tensors are cut, no warm start is better."""

from __future__ import annotations

import pytest

from bench.cases.schedules import chain, link, random_problem
from pase.schedule import Options, check_plan, evaluate, get_policy, lower_bound_s
from pase.schedule.general import fused_plan, general_plan
from pase.schedule.policies.tictac import parameter_server

KIND = "all_reduce"


def sizes(plan: object) -> list[list[int]]:
    return [[p.nbytes for p in m.pieces] for m in plan.messages]  # type: ignore[attr-defined]


def test_neighbours_are_fused_up_to_the_cap() -> None:
    problem = chain([1.0] * 4, [1.0] * 4, [3, 4, 5, 6])
    assert sizes(fused_plan(problem, {KIND: 9}, {}, by_need=True)) == [[3, 4], [5], [6]]
    assert sizes(fused_plan(problem, {KIND: 11}, {}, by_need=False)) == [[6, 5], [4, 3]]
    assert sizes(fused_plan(problem, {}, {}, by_need=True)) == [[3], [4], [5], [6]]


def test_tensors_above_the_cut_are_sent_in_equal_pieces() -> None:
    problem = chain([1.0] * 2, [1.0] * 2, [10, 3])
    plan = fused_plan(problem, {KIND: 100}, {KIND: 4}, by_need=True)
    assert sizes(plan) == [[3], [3], [4], [3]]
    check_plan(problem, plan)


@pytest.mark.parametrize("seed", range(3))
def test_no_warm_start_is_better_and_the_cost_is_the_evaluators(seed: int) -> None:
    problem = parameter_server(
        random_problem(6, seed), push=link("up", beta=1e-9), pull=link("down", beta=1e-9)
    )
    start = get_policy("tac").make(problem, Options())
    plan, cost, bound = general_plan(problem, warm_starts=(start,))
    check_plan(problem, plan)
    assert evaluate(problem, plan).iteration_s == pytest.approx(cost)
    assert bound == lower_bound_s(problem) <= cost * (1 + 1e-9)
    assert cost <= evaluate(problem, start).iteration_s * (1 + 1e-9)


def test_startups_make_it_fuse() -> None:
    """With a startup of 100 s, one message is the best plan."""
    problem = parameter_server(
        chain([1.0] * 3, [1.0] * 3, [1, 1, 1]),
        push=link("up", alpha_s=100.0),
        pull=link("down", alpha_s=100.0),
    )
    plan, _, _ = general_plan(problem)
    assert len(plan.messages) == 2
