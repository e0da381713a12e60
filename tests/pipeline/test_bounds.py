"""The bounds hold for any times, and are tight where they should be."""

from __future__ import annotations

import numpy as np
import pytest

from pase.pipeline.bounds import lower_bound, slowest_stage_bound, wait_paths, work_paths
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import StageTimes

EPS = 1 + 1e-9


def longest(found, times: StageTimes) -> float:  # type: ignore[no-untyped-def]
    return max(p.seconds(times) for p in found)


def random_times(rng: np.random.Generator, stages: int, ranks: int, *, sends: bool = True) -> StageTimes:
    draw = [rng.random(stages) * rng.choice([0.1, 1, 3]) + 0.01 for _ in range(4)]
    return StageTimes.of(
        *draw[:3],
        recompute=draw[3] * rng.integers(2),
        ranks=ranks,
        send=sends * rng.random((2, stages - 1)) * rng.choice([0, 0.05, 2]),
        before=sends * rng.random(ranks),
        after=sends * rng.random(ranks),
    )


@pytest.mark.some(4)
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_lower_bounds_hold_on_random_pipelines(name):
    rng = np.random.default_rng(len(name))
    low, high = SCHEDULES[name].chunks
    seen = 0
    for _ in range(25):
        p, m, v = int(rng.integers(1, 6)), int(rng.integers(1, 13)), int(rng.integers(low, (high or 3) + 1))
        m = m if SCHEDULES[name].refuses(p, m, v) is None else 2 * p
        s = schedule(name, p, m, v)
        for _ in range(24):
            t = random_times(rng, p * v, p)
            done = simulate(s, t)
            assert lower_bound(s, t) <= done.step_s * EPS
            other = random_times(rng, p * v, p)  # a path of one run is a bound on every other
            step_s = simulate(s, other).step_s
            assert max(lower_bound(s, other), 0 if s.lockstep else done.path.seconds(other)) <= step_s * EPS
            seen += 2
    assert seen == 1200


def test_how_near_the_bounds_of_1f1b_are():
    """On random stages, the upper bound is a few percent too high, and two lower bounds together are nearly exact."""
    rng = np.random.default_rng(0)
    over, under, both = [], [], []
    for _ in range(200):
        p, m = int(rng.integers(2, 9)), int(rng.integers(4, 33))
        s = schedule("1f1b", p, m)
        t = StageTimes.of(rng.uniform(0.5, 1.5, p), rng.uniform(1, 3, p), 0.0, ranks=p)
        truth = simulate(s, t).step_s
        over.append(slowest_stage_bound(m, t) / truth - 1)
        under.append(1 - longest(work_paths(s), t) / truth)
        both.append(1 - max(longest(work_paths(s), t), longest(wait_paths(s), t)) / truth)
    assert min(over) > -1e-9 and min(both) > -1e-9
    assert np.mean(over) > 0.01 and np.mean(both) < 0.01 < np.mean(under)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_tight_at_equal_stages(name):
    s, t = schedule(name, 5, 11), StageTimes.of([1.0] * 5, 1.0, 1.0, ranks=5)
    assert lower_bound(s, t) == pytest.approx(simulate(s, t).step_s)


def test_transfers_in_the_steady_state_are_seen():
    s = schedule("1f1b", 4, 40)
    t = StageTimes.of([1.0] * 4, 2.0, 0.0, ranks=4, send=1.0)
    assert max(longest(work_paths(s), t), longest(wait_paths(s), t)) < 0.8 * lower_bound(s, t)
    assert lower_bound(s, t) >= 0.95 * simulate(s, t).step_s
