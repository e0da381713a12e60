"""Checks of a plan in stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pase
from tests.backends.jax.checked import BATCH, KEYS, D


def test_micro_batches_and_stages():
    """A plan with two stages and two micro-batches has the whole batch's gradients."""

    def layers(p, batch):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], p["layers"])
        return jnp.mean((h @ p["head"] - batch["y"]) ** 2)

    params = {"layers": 0.3 * jax.random.normal(KEYS[5], (4, D, D)), "head": 0.1 * jnp.eye(D)}
    plan = pase.compile(
        layers, params, BATCH, devices=4, pipeline=2, baselines=False, accumulate=2, memory_limit="none"
    )
    found = plan.jax.check(params, BATCH)
    assert found.verdict == "agrees" and found.lowering == "in stages" and found.devices == 4, str(found)
    assert [p.name for p in found.parameters] == ["head", "layers"]
    assert np.asarray(params["layers"]).shape == (4, D, D)
