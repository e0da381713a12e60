"""The construction of the fast solver: its arrays, and the preemptive schedule against one of unit steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from bench.cases.schedules import chain, link, random_problem, small_problems
from pase.schedule import ScheduleProblem
from pase.schedule.bound import preemptive_bound_s
from pase.schedule.greedy import construct, instance, preemptive
from pase.schedule.view import plain_view


def test_tensors_stand_in_the_order_in_which_compute_waits_for_them() -> None:
    problem = random_problem(12, 3)
    view = plain_view(problem)
    inst = instance(problem, view)
    line = inst.tensors
    assert (np.diff(line["tail"]) <= 0).all() and sorted(inst.order) == list(range(12))
    np.testing.assert_array_equal(line["nbytes"], view.nbytes[inst.order])
    assert inst.compute == pytest.approx(problem.compute_s) and inst.links == 1


def test_curves_of_a_link_that_does_not_carry_an_axis_are_marked() -> None:
    problem = chain([1.0], [1.0], [4], link("a", alpha_s=2.0, beta=0.5))
    inst = instance(problem, plain_view(problem))
    ((first, last, slope),) = inst.curves.rows.tolist()
    assert (first, last, slope) == (0, 1, 0.5) and inst.curves.corners.tolist() == [(0.0, 2.0)]
    assert inst.tensors["fluid"].tolist() == [pytest.approx(4 * (0.5 + 2.0 / 4))]


def makespan(problem: ScheduleProblem) -> float:
    """The preemptive priority schedule, second by second: every ready tensor has whole bytes of one second each."""
    view = plain_view(problem)
    left = view.nbytes.copy()
    worst, now = view.compute, 0
    while left.any():
        ready = [i for i in range(left.size) if left[i] and view.ready[i] <= now]
        now += 1
        if ready:
            i = max(ready, key=lambda j: view.tail[j])
            left[i] -= 1
            if not left[i]:
                worst = max(worst, now + float(view.tail[i]))
    return worst


@settings(max_examples=40, deadline=None)
@given(small_problems(most=5))
def test_the_preemptive_schedule_reaches_its_bound(problem: ScheduleProblem) -> None:
    """Without startups; all times are whole seconds."""
    bare = chain(
        [b.seconds for b in problem.blocks if b.phase == "forward"],
        [b.seconds for b in reversed(problem.blocks) if b.phase == "backward"],
        [t.nbytes for t in problem.tensors],
    )
    assert preemptive_bound_s(bare) == makespan(bare)
    inst = instance(bare, plain_view(bare))
    _, at, nbytes, _ = preemptive(inst)
    sent = np.bincount(at, weights=nbytes, minlength=inst.order.size)
    assert sent.tolist() == inst.tensors["nbytes"].tolist()


def test_a_target_below_the_bound_is_not_met() -> None:
    """The result has no messages then."""
    problem = chain([1.0] * 4, [1.0] * 4, [20, 30, 10, 20])
    inst = instance(problem, plain_view(problem))
    bound = preemptive_bound_s(problem)
    for share in (0.05, 0.5, 0.99):
        *_, none = construct(inst, share * bound, 0.0, 0.0, np.zeros(1))
        assert none.size == 0
    msg, place, nbytes, link_of = construct(inst, 10 * bound, 0.0, 0.0, np.zeros(1))
    assert link_of.size == len(set(msg.tolist())) >= 1
    np.testing.assert_allclose(
        np.bincount(place.astype(int), weights=nbytes), inst.tensors["nbytes"], rtol=0, atol=0.5
    )
