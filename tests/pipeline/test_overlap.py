"""The exposed time of a stage's all-gathers and reductions: against a flow shop, and in the search for cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pase.pipeline.cuts import TOLERANCE, CutProblem, best_cuts
from pase.pipeline.overlap import HoistedCollectives, exposed_s
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import Kind, StageTimes


def flow_shop(gathers: list[float], compute: list[float]) -> float:
    """Seconds until all units have run, each after its own gather. Gathers run one after another from the start."""
    here = done = 0.0
    for g, c in zip(gathers, compute, strict=True):
        here += g
        done = max(done, here) + c
    return done


def test_a_stage_waits_as_long_as_the_flow_shop_says():
    rng = np.random.default_rng(0)
    for _ in range(200):
        g, c = rng.uniform(0, 2, 3) * rng.integers(0, 2, 3), rng.uniform(0, 2, 3)
        n = int(rng.integers(1, 6))
        each = [[x[0], *[x[1]] * n, x[2]] for x in (g, c)]
        assert exposed_s(g, c, n, 0.0) == pytest.approx(flow_shop(*each) - sum(each[1]))
        assert exposed_s(g, c, n, 1.0) == pytest.approx(sum(each[0]))
        slowed = [exposed_s(g, c, n, slow) for slow in (0.0, 0.2, 0.7, 1.0)]
        assert slowed == sorted(slowed)


def problem_of(rng: np.random.Generator, name: str, p: int, v: int, m: int, blocks: int) -> CutProblem:
    s, n = schedule(name, p, m, v), p * v
    units = np.zeros((6, 3, n))  # forward, input, weight, again, gathers, sums
    units[:, 1] = rng.uniform(0.2, 1.5, (6, 1))
    units[:, 0, 0], units[:, 2, -1] = rng.uniform(0, 2, 6), rng.uniform(0, 3, 6)
    units[4:] *= rng.choice([0.5, 4.0])
    forward, back, weight, again, gathers, sums = units
    by_kind = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: again + back + weight,
        Kind.INPUT: again + back,
        Kind.WEIGHT: weight,
    }
    fixed, each = (
        StageTimes.of(*(f(x) for x in (forward, back, weight)), recompute=f(again), ranks=r)
        for f, r in ((lambda x: x[0] + x[2], p), (lambda x: x[1], n))
    )
    return CutProblem(
        schedule=s,
        blocks=blocks,
        fixed=fixed,
        each=each,
        hoisted=HoistedCollectives(
            gathers=gathers,
            sums=sums,
            compute=np.stack([by_kind[k] for k in Kind]),
            slow=rng.choice([0.0, 0.2, 1.0], p),
        ),
    )


@pytest.mark.parametrize(
    ("name", "p", "v"), [("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 2, 2), ("zb-h1", 3, 1)]
)
def test_cuts_with_what_is_sent_once_equal_enumeration(name, p, v):
    rng = np.random.default_rng(p * v)
    for _ in range(3):
        problem, best = problem_of(rng, name, p, v, 2 * p, 10), np.inf
        for cut in itertools.combinations(range(1, 10), p * v - 1):
            counts = np.diff([0, *cut, 10])
            best = min(best, simulate(problem.schedule, problem.times(counts)).step_s)
        found = best_cuts(problem)
        assert found.simulated is not None
        assert found.simulated.step_s == pytest.approx(best, rel=2 * TOLERANCE)
        assert found.bound <= best * (1 + 1e-9)


def test_one_stage_a_rank_waits_as_a_stage_alone_does():
    rng = np.random.default_rng(2)
    problem, counts = problem_of(rng, "1f1b", 4, 1, 8, 12), np.array([2, 4, 5, 1])
    once, times = problem.hoisted, problem.times(counts)
    assert once is not None
    for r in range(4):
        for moved, kind, told in (
            (once.gathers, Kind.FORWARD, times.before),
            (once.sums, Kind.BACKWARD, times.after),
        ):
            alone = exposed_s(moved[:, r], once.compute[kind, :, r], int(counts[r]), float(once.slow[r]))
            assert told[r] == pytest.approx(alone)
    assert (problem.hidden(counts) >= 0).all() and problem.hidden(counts).max() > 0


def test_nothing_is_hidden_where_nothing_overlaps():
    """The hidden time is exactly zero, without rounding errors of sums."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = problem_of(rng, "interleaved", 2, 2, 4, 12)
        assert problem.hoisted is not None
        alone = replace(problem, hoisted=replace(problem.hoisted, slow=np.ones(2)))
        assert not alone.hidden(np.array([2, 4, 5, 1])).any()
