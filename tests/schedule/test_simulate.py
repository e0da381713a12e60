"""The evaluator agrees with a direct computation, with its compiled forms, and with the papers' figures."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.schedules import chain, link, random_problem, small_problems, vgg19
from pase.errors import PaseError
from pase.schedule import (
    BucketPlan,
    ComputeBlock,
    Message,
    Options,
    Piece,
    ScheduleProblem,
    Transfer,
    Update,
    all_policies,
    evaluate,
    whole,
)
from pase.schedule.chain import plain_iteration_s


def by_hand(problem: ScheduleProblem, order: tuple[int, ...]) -> float:
    """Seconds of an iteration that sends whole tensors in this order on one link, for a chain of layers."""
    n = len(problem.tensors)
    f = [b.seconds for b in problem.blocks[:n]]
    b = [x.seconds for x in problem.blocks[n:]]
    curve = problem.links[0].curve
    made = {n - 1 - i: sum(b[: i + 1]) for i in range(n)}
    arrived, now = {}, 0.0
    for t in order:
        now = max(now, made[t]) + curve.seconds_for(problem.tensors[t].nbytes)
        arrived[t] = now
    clock = sum(b)
    for i in range(n):
        clock = max(clock, arrived[i]) + f[i]
    return clock


@settings(max_examples=40, deadline=None)
@given(small_problems(most=5), st.randoms(use_true_random=False))
def test_agrees_with_a_run_by_hand(problem: ScheduleProblem, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(problem.tensors)))
    random.shuffle(order)
    plan = BucketPlan(policy="x", messages=tuple(whole(problem, [t]) for t in order))
    expected = by_hand(problem, tuple(order))
    for kernel in ("python", "numba"):
        assert evaluate(problem, plan, kernel=kernel).iteration_s == pytest.approx(expected, abs=1e-9)
    assert plain_iteration_s(problem, plan) == pytest.approx(expected, abs=1e-9)


def test_deft_table_2() -> None:
    """DeFT's Table II: DDP 295.05 ms, priority 263.30 ms, the best order of whole buckets (6,4,1,2,3,5) 258.32 ms, and
    compute 130.28 ms."""
    problem = vgg19()

    def ms(order: tuple[int, ...], **how: object) -> float:
        messages = tuple(whole(problem, [t]) for t in order)
        return evaluate(problem, BucketPlan(policy="x", messages=messages, **how)).iteration_s * 1e3  # type: ignore[arg-type]

    assert problem.compute_s * 1e3 == pytest.approx(130.285)
    assert ms((5, 4, 3, 2, 1, 0), barrier=True) == pytest.approx(295.05, abs=0.005)
    assert ms((0, 1, 2, 3, 4, 5), dispatch="priority") == pytest.approx(263.30, abs=0.005)
    best = min(itertools.permutations(range(6)), key=ms)
    assert ms(best) == pytest.approx(258.32, abs=0.005)
    assert ms((5, 3, 0, 1, 2, 4)) == ms(best)


def test_links_are_exclusive_and_tensors_ready() -> None:
    problem = random_problem(30, 5, links=2)
    plan = all_policies()["ours"].make(problem, Options(mode="fast"))
    e = evaluate(problem, plan)
    for name in [x.name for x in problem.links] + ["compute"]:
        row = sorted((i.start_s, i.end_s) for i in e.timeline if i.resource == name)
        assert row
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(row))
    release = np.cumsum([b.seconds for b in problem.blocks])
    assert e.starts_s is not None
    period = e.iteration_s
    for m, start in zip(plan.messages, e.starts_s, strict=True):
        ready = max(release[problem.tensors[p.tensor].ready_after or 0] for p in m.pieces)
        # Starts are times of the run, and the steady period is the second of three.
        assert start >= ready - 1e-12
        assert start <= 3 * period


def test_a_gather_needed_in_its_own_iteration() -> None:
    """Forward waits for the gather (2 s). Backward makes the gradient, and the next gather waits for its
    reduce-scatter."""
    blocks = (
        ComputeBlock(name="f", phase="forward", seconds=1.0),
        ComputeBlock(name="b", phase="backward", seconds=2.0),
    )
    scatter = Transfer(name="g", nbytes=3, ready_after=1, needed_before=None, kind="reduce_scatter")
    gather = Transfer(name="p", nbytes=2, ready_after=None, needed_before=0, kind="all_gather", follows=(0,))
    problem = ScheduleProblem(name="zero", blocks=blocks, tensors=(scatter, gather), links=(link(),))
    plan = BucketPlan(policy="x", messages=(whole(problem, [0]), whole(problem, [1])))
    assert evaluate(problem, plan).iteration_s == 1 + 2 + 3 + 2


def test_a_delayed_update_hides_all_communication_that_fits() -> None:
    problem = chain([2.0, 2.0], [3.0, 3.0], [4, 5])
    messages = tuple(whole(problem, [t]) for t in (1, 0))
    plain = BucketPlan(policy="x", messages=messages)
    assert (
        evaluate(problem, plain).iteration_s == 16.0
    )  # backward 3, then 5, then 4 of communication, forward 4
    late = replace(plain, updates=(Update(first=0, last=0, at=1),))
    assert evaluate(problem, late).iteration_s == problem.compute_s == 10.0
    assert late.staleness == 1


def test_a_delay_does_not_beat_the_link() -> None:
    """With ten iterations of slack, the result still shows that the link cannot keep up."""
    problem = chain([1.0], [1.0], [5])
    plan = BucketPlan(policy="x", messages=(whole(problem, [0]),), updates=(Update(first=0, last=0, at=10),))
    assert evaluate(problem, plan).iteration_s == 5.0


def test_merging_two_batches_halves_the_load() -> None:
    problem = chain([1.0], [1.0], [4])
    plan = BucketPlan(
        policy="x", messages=(whole(problem, [0]),), period=2, updates=(Update(first=0, last=1, at=1),)
    )
    assert evaluate(problem, plan).iteration_s == (2 + 2 + 4) / 2
    assert plan.updates_per_iteration == 0.5


def test_a_dead_order_is_named() -> None:
    blocks = (
        ComputeBlock(name="f", phase="forward", seconds=1.0),
        ComputeBlock(name="b", phase="backward", seconds=1.0),
    )
    first = Transfer(name="gather", nbytes=1, ready_after=None, needed_before=0, lag=0, kind="all_gather")
    grad = Transfer(name="grad", nbytes=1, ready_after=1, needed_before=0)
    problem = ScheduleProblem(name="dead", blocks=blocks, tensors=(first, grad), links=(link(),))
    plan = BucketPlan(policy="x", messages=(whole(problem, [1]), whole(problem, [0])))
    with pytest.raises(PaseError, match="deadlocks") as e:
        evaluate(problem, plan)
    assert e.value.where == "plan 'x'" and "'dead'" in e.value.what


def test_credit_lets_later_needed_bytes_through() -> None:
    """With credit for two messages, the link accepts the second message before the urgent third is ready."""
    problem = chain([5.0, 5.0], [3.0, 1.0], [4, 8])
    pieces = [whole(problem, [0]), *(_half(problem, 1, i) for i in (0, 1))]
    costs = []
    for credit in (1, 5):
        plan = BucketPlan(policy="x", messages=tuple(pieces), dispatch="priority", credit_bytes=credit)
        costs.append(evaluate(problem, plan).iteration_s)
    assert costs == [19.0, 23.0]


def _half(problem: ScheduleProblem, tensor: int, i: int):  # type: ignore[no-untyped-def]

    n = problem.tensors[tensor].nbytes // 2
    return Message(pieces=(Piece(tensor=tensor, offset=i * n, nbytes=n),))


def test_efficiency_and_speedup() -> None:
    """U is all work and L is the busiest resource: 4 + 4 s of compute, 6 s on the link."""
    problem = chain([2.0, 2.0], [2.0, 2.0], [3, 3])
    plan = BucketPlan(policy="x", messages=(whole(problem, [1]), whole(problem, [0])))
    e = evaluate(problem, plan)
    assert e.iteration_s == 2 + 3 + 3 + 4
    assert e.efficiency == pytest.approx((14 - 12) / (14 - 8))
    assert e.speedup == pytest.approx((14 - 8) / 8)
