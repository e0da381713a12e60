"""The Preserver: expected losses under merged and delayed updates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pase.errors import PaseError
from pase.schedule.preserver import TrainingState, expected_loss, expected_next, judge


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("lr_scaling", [True, False])
def test_expected_next_agrees_with_monte_carlo(batches: int, lr_scaling: bool) -> None:
    walk = TrainingState(
        loss=0.03, lowest=0.01, lr=0.05, mean=0.2, spread=4.0, batch=64, lr_scaling=lr_scaling
    )
    lr = walk.lr * (batches if lr_scaling else 1)
    g = np.random.default_rng(0)
    step = g.normal(walk.mean, walk.spread / math.sqrt(walk.batch * batches), 1_000_000)
    after = walk.loss - lr * step
    after = np.where(after < walk.lowest, 2 * walk.lowest - after, after)
    assert expected_next(walk, batches) == pytest.approx(after.mean(), abs=4 * after.std() / 1000)


def test_table_5() -> None:
    """Table V: the plain sequence falls from .2103 to .1922 in four steps. The merged sequence reaches .2012 with its
    first step and ends at .1935, a ratio of .993, which is within DeFT's threshold of 1%."""
    walk = TrainingState()
    assert walk.loss == 0.2103
    assert expected_loss(walk, [1] * 4) == pytest.approx(0.1922, abs=5e-5)
    assert expected_next(walk, 2) == pytest.approx(0.2012, abs=1e-4)
    verdict = judge(walk, [2, 1, 1])
    assert verdict.planned == pytest.approx(0.1935, rel=0.01)
    assert verdict.passed and verdict.ratio == verdict.plain / verdict.planned
    assert verdict.ratio == pytest.approx(0.993, abs=0.01)


def test_averaging_without_lr_scaling_loses_a_step() -> None:
    """Three steps at the plain learning rate, whatever they merge, get about as far as three plain steps."""
    verdict = judge(TrainingState(), [2, 1, 1])
    plain = [expected_loss(TrainingState(lr_scaling=False), [1] * steps) for steps in (3, 4)]
    assert verdict.ratio_without_lr_scaling == pytest.approx(plain[1] / plain[0], abs=1e-3)
    assert not judge(TrainingState(lr_scaling=False), [2, 1, 1]).passed


def test_a_walk_must_make_sense() -> None:
    with pytest.raises(PaseError) as e:
        TrainingState(loss=0.1, lowest=0.2)
    assert e.value.where == "--loss" and "loss=0.1" in e.value.what
