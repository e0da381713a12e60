"""Checks of a plan's steps: by the other lowering, and in each step of a training."""

from __future__ import annotations

import optax
import pytest

from pase.errors import PaseError
from tests.backends.jax.checked import BATCH, PARAMS, off_by, random_plan


@pytest.fixture(scope="module")
def plan():
    return random_plan()


def test_the_other_lowering_tells_which_is_off(plan):
    with off_by("w2", lambda g: 0 * g):
        found = plan.check(PARAMS, BATCH, against="lowering")
    assert [p.name for p in found.by("off")] == ["w2"]
    assert "annotated lowering" in found.by("off")[0].why


def test_a_checked_step_trains_or_names_what_is_off(plan):
    optimizer = optax.sgd(0.1)
    step = plan.train_step(optimizer, check=True)
    params, batch = plan.device_put(PARAMS, BATCH)
    state = plan.init(optimizer, params)
    with off_by("w1", lambda g: -g), pytest.raises(PaseError, match="OFF w1"):
        step(params, state, batch)
    assert step.result is None and not params["w1"].is_deleted()
