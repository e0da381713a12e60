"""Shared by the tests of train steps: a small model with its plan."""

import jax
import jax.numpy as jnp

from bench.cases.plans import case_of

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "norm": {"scale": jnp.ones(16)},
    "up": jax.random.normal(KEYS[0], (16, 128)) / 4,
    "down": jax.random.normal(KEYS[1], (128, 16)) / 11,
}
X = jax.random.normal(KEYS[2], (8, 16))


def loss_fn(params, x):
    h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) * params["norm"]["scale"]
    return jnp.mean((jax.nn.relu(h @ params["up"]) @ params["down"] - x) ** 2)


def data_parallel_plan():
    return case_of(loss_fn, PARAMS, X).plan("ours@2x4")
