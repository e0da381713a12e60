"""A plan in stages for a Flax NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import pase
from tests.backends.jax.nnx_models import (
    BATCH,
    OPTIMIZER,
    WIDTH,
    assert_alike,
    rngs,
    squares,
    unsharded,
    variables,
)


class Stack(nnx.Module):
    """Layers that write nothing, and a Variable that is only read."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Variable(jnp.full(WIDTH, 0.5))
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x)) * self.scale[...]
        return x


def test_a_model_that_writes_nothing_runs_in_stages() -> None:
    args = Stack(rngs()), BATCH
    expected = unsharded(squares, args, 2)
    plan = pase.compile(squares, Stack(rngs()), BATCH, devices=4, pipeline=2, baselines=False, accumulate=2)
    model, batch = plan.jax.device_put(Stack(rngs()), BATCH)
    assert plan.jax.check(model, batch, most_lines=1).verdict == "agrees"
    step, state = plan.jax.train_step(OPTIMIZER), plan.jax.init(OPTIMIZER, model)
    losses = []
    for _ in range(2):
        model, state, value = step(model, state, batch)
        losses.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_alike(variables(plan.jax.gathered(model)), variables(args[0]))
