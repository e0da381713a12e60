"""Random numbers in micro-batches: a key that does not change between them gives all of them the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pase


def _dropped(params, batch, key):
    h = jnp.tanh(batch @ params["up"])
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0.0) @ params["down"])


def _in_a_loop(params, batch, key):
    def layer(carried, _):
        h, k = carried
        k, own = jax.random.split(k)
        return (h * jax.random.bernoulli(own, 0.8, h.shape), k), None

    (h, _), _ = jax.lax.scan(layer, (batch @ params["up"], key), length=3)
    return jnp.mean(h @ params["down"])


def _noisy_weights(params, batch, key):
    up = params["up"] + jax.random.normal(key, params["up"].shape)
    return jnp.mean(jnp.tanh(batch @ up) @ params["down"])


def _per_example(params, batch, keys):
    h = jnp.tanh(batch @ params["up"])
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, h.shape[1:]))(keys)
    return jnp.mean(jnp.where(keep, h, 0.0) @ params["down"])


def _handed_on(of):
    def loss(params, batch, key):
        own, after = jax.random.split(key)
        return of(params, batch, own), after

    return loss


def _by_the_number_of_the_step(params, batch, step):
    return _dropped(params, batch, jax.random.fold_in(jax.random.key(0), step))


@pytest.mark.parametrize(
    ("loss", "drawn_from", "carry", "repeated"),
    [
        (_dropped, jax.random.key(0), None, True),
        (_dropped, jax.random.PRNGKey(0), None, True),
        (_in_a_loop, jax.random.key(0), None, True),
        (_by_the_number_of_the_step, 3, None, True),
        (_noisy_weights, jax.random.key(0), None, False),
        (_per_example, jax.random.split(jax.random.key(0), 16), None, False),
        (_handed_on(_dropped), jax.random.key(0), {1: 1}, False),
        (_handed_on(_in_a_loop), jax.random.key(0), {1: 1}, False),
    ],
)
def test_random_numbers_that_each_micro_batch_would_repeat_are_remarked(loss, drawn_from, carry, repeated):
    params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    args = (loss, params, jnp.ones((16, 8)), drawn_from)
    plan = pase.compile(*args, devices=2, mesh="2", accumulate=2, carry=carry, baselines=False)
    said = [r.kind for r in plan.noted if "the same random numbers" in r.what]
    assert said == (["state"] if repeated else [])
    if not repeated:
        whole = pase.compile(*args, devices=2, mesh="2", carry=carry, baselines=False)
        assert not any("the same random numbers" in r.what for r in whole.noted)
