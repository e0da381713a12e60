"""Checks of a plan's steps: by the other lowering, in each step of a training, and in stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase.errors import PaseError
from tests.backends.jax.checked import BATCH, KEYS, PARAMS, D, off_by, random_plan


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


def test_micro_batches_and_stages():
    """A plan with two stages and two micro-batches has the whole batch's gradients."""

    def layers(p, batch):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], p["layers"])
        return jnp.mean((h @ p["head"] - batch["y"]) ** 2)

    params = {"layers": 0.3 * jax.random.normal(KEYS[5], (4, D, D)), "head": 0.1 * jnp.eye(D)}
    plan = pase.compile(layers, params, BATCH, devices=4, pipeline=2, accumulate=2, memory_limit="none")
    found = plan.jax.check(params, BATCH)
    assert found.verdict == "agrees" and found.lowering == "in stages" and found.devices == 4, str(found)
    assert [p.name for p in found.parameters] == ["head", "layers"]
    assert np.asarray(params["layers"]).shape == (4, D, D)
