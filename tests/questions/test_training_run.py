"""A whole run: the interval of checkpoints against brute force, the expected time against a simulation, unknowns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.machine import load
from pase.questions.scale import scale
from pase.questions.training_run import RunTerms, checkpoint_interval_s, stretch, training_run


@pytest.mark.parametrize(("checkpoint", "between"), [(60.0, 3 * 3600.0), (300.0, 2000.0), (1.0, 1e8)])
def test_no_other_interval_of_checkpoints_is_better(checkpoint, between):
    best = checkpoint_interval_s(checkpoint, between)
    others = best * np.geomspace(0.2, 5, 401)
    assert stretch(best, checkpoint, 600, between) <= min(
        stretch(t, checkpoint, 600, between) for t in others
    ) * (1 + 1e-12)


def test_the_expected_time_is_that_of_a_simulation():
    every, checkpoint, restart, between = 900.0, 120.0, 400.0, 4000.0
    random = np.random.default_rng(0)
    spent, segments = 0.0, 4000
    for _ in range(segments):
        while True:
            fails = random.exponential(between)
            if fails >= every + checkpoint:
                spent += every + checkpoint
                break
            spent += fails
            while (again := random.exponential(between)) < restart:  # it fails while it restarts
                spent += again
            spent += restart
    assert stretch(every, checkpoint, restart, between) == pytest.approx(spent / (segments * every), rel=0.05)


def test_a_run_has_what_is_known_and_no_more():
    options = CompileOptions(devices=1, baselines=False)
    (point,) = scale("zoo:gpt2?batch=8&layers=1&seq=64", (8,), options)
    plan = point.plan
    assert plan is not None and plan.work is not None and plan.work.tokens == 8 * 64
    h100, b200 = load("h100x8"), load("b200x8")
    terms = RunTerms(tokens=51_201 * 512.0, price=2.0)
    run = training_run(plan, h100, 8, terms)
    assert run.steps == 51_201 and run.compute_s == run.steps * plan.cost
    assert run.wall_s is not None and run.wall_s > run.compute_s
    assert run.cost == 2 * run.device_hours == pytest.approx(2 * 8 * run.wall_s / 3600)
    assert run.energy_kwh == pytest.approx(0.7 * run.device_hours)
    unknown = training_run(plan, b200, 8, terms)
    assert unknown.wall_s is None and unknown.failures is None and unknown.device_hours > 0
    alike = training_run(plan, h100, 8, terms, count_failures=False)
    assert (alike.wall_s, alike.failures) == (run.wall_s, run.failures)
    assert alike.cost == pytest.approx(2 * 8 * run.compute_s / 3600)
    never = training_run(plan, b200, 8, replace(terms, failures_per_device_hour=0.0))
    assert never.wall_s == never.compute_s and never.failures == 0
    with pytest.raises(PaseError, match="no number of tokens"):
        training_run(replace(plan, work=None), h100, 8, terms)


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"tokens": float("nan")}, {"restart_s": 0}, {"failures_per_device_hour": -1}]
)
def test_what_is_no_figure_is_refused(wrong):
    with pytest.raises(PaseError) as e:
        RunTerms(**{"tokens": 1e9} | wrong)
    assert (e.value.where or "").startswith("--")
