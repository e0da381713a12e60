"""The linear program of end times: with all durations fixed, its least step is the simulated one."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from pase.pipeline.potentials import StepRows, path_rows, step_rows
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import Schedule, StageTimes
from tests.pipeline.timing import CASES


def random_times(rng: np.random.Generator, s: Schedule) -> StageTimes:
    n = s.stages
    send, around = rng.random((2, n - 1)), rng.random((2, s.ranks))
    return StageTimes.of(*rng.random((3, n)), ranks=s.ranks, send=send, before=around[0], after=around[1])


def least_step(rows: StepRows, s: Schedule, t: StageTimes) -> float:
    """The least step under the rows, where the durations are those of ``t``."""
    given = np.concatenate([t.by_kind.ravel(), t.before, t.after])
    bounds = [(x, x) for x in given] + [(None, None)] * (rows.columns - given.size)
    goal = np.zeros(rows.columns)
    goal[given.size] = 1.0
    return float(linprog(goal, A_ub=rows.rows, b_ub=rows.tops(t.send), bounds=bounds).fun)


@pytest.mark.parametrize(("name", "chunks"), [c for c in CASES if not SCHEDULES[c[0]].lockstep])
def test_the_least_step_of_all_actions_is_the_simulated_one(name, chunks):
    s = schedule(name, 2, 4, chunks)
    t = random_times(np.random.default_rng(chunks), s)
    assert least_step(step_rows(s), s, t) == pytest.approx(simulate(s, t, kernel="numpy").step_s)


def test_the_least_step_of_some_paths_is_the_longest_of_them():
    """The paths are those of other times, so each is a lower bound; with its own path the bound is exact."""
    rng = np.random.default_rng(0)
    s = schedule("1f1b", 3, 5)
    t = random_times(rng, s)
    others = [simulate(s, random_times(rng, s), kernel="numpy").path for _ in range(3)]
    own = simulate(s, t, kernel="numpy")
    assert least_step(path_rows(s, others), s, t) == pytest.approx(max(p.seconds(t) for p in others))
    assert least_step(path_rows(s, [*others, own.path]), s, t) == pytest.approx(own.step_s)
