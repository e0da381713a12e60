"""Shared by the tests of ``plan.jax.check``: a small model under a random strategy, and planted errors."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import jax
import jax.numpy as jnp

from bench.cases.plans import case_of
from pase.backends.jax.spmd.lower import Manual

B, D, F = 16, 8, 16
KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "b": jnp.zeros(F),
    "c": 0.3 * jax.random.normal(KEYS[0], (F,), jnp.complex64),
    "n": jnp.arange(F),
    "w1": 0.3 * jax.random.normal(KEYS[1], (D, F)),
    "w2": 0.3 * jax.random.normal(KEYS[2], (F, D)),
}
BATCH = {"x": jax.random.normal(KEYS[3], (B, D)), "y": jax.random.normal(KEYS[4], (B, D))}


def loss(p, batch):
    """A complex parameter, one of integers, and a second result."""
    h = jax.nn.relu(batch["x"] @ p["w1"] + p["b"])[:, p["n"]]
    y = jnp.real(h * p["c"]) @ p["w2"]
    return jnp.mean((y - batch["y"]) ** 2), {"largest": y.max()}


@cache
def random_plan():
    made = case_of(loss, PARAMS, BATCH).plan("random1@2x4")
    assert made is not None and made.collectives
    return made.jax


def off_by(name, how):
    """Make one gradient of plans in the manual lowering wrong."""
    right = Manual.gradients
    return patch.object(
        Manual, "gradients", lambda self, grads: (g := right(self, grads)) | {name: how(g[name])}
    )
