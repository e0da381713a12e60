"""Random numbers in micro-batches: if their key does not change, each draws its part of the whole batch's numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.frontends.jax.blocks import batch_inputs, batch_size, micro
from pase.frontends.jax.frontend import trace
from pase.frontends.registry import NotInParts


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


def _in_rows(params, batch, key):
    """The batch is merged with the dims before and after it."""
    h = jnp.tanh(batch @ params["up"])
    seen = jnp.stack([h, h * h]).reshape(2 * len(batch), 4, 4).reshape(8 * len(batch), 4)
    seen = seen * jax.random.normal(key, seen.shape)
    return jnp.mean(seen.reshape(2, len(batch), 16) @ params["down"])


def _noisy_weights(params, batch, key):
    up = params["up"] + jax.random.normal(key, params["up"].shape)
    return jnp.mean(jnp.tanh(batch @ up) @ params["down"])


def _per_example(params, batch, keys):
    h = jnp.tanh(batch @ params["up"])
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, h.shape[1:]))(keys)
    return jnp.mean(jnp.where(keep, h, 0.0) @ params["down"])


def _split_per_example(params, batch, keys):
    """Keys that each example makes of its own, as the layers of a model under jax.vmap do."""

    def one(x, key):
        first, second = jax.random.split(key)
        h = jnp.tanh(x @ params["up"]) * jax.random.bernoulli(first, 0.8, (16,))
        return h * jax.random.uniform(jax.random.fold_in(second, 3), (16,)) @ params["down"]

    return jnp.mean(jax.vmap(one)(batch, keys))


def _keys_split_by_the_batch(params, batch, key):
    return _per_example(params, batch, jax.random.split(key, len(batch)))


def _keys_counted_by_the_batch(params, batch, key):
    return _per_example(params, batch, jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(batch))))


def _handed_on(of):
    def loss(params, batch, key):
        own, after = jax.random.split(key)
        return of(params, batch, own), after

    return loss


def _by_the_number_of_the_step(params, batch, step):
    return _dropped(params, batch, jax.random.fold_in(jax.random.key(0), step))


KEY = jax.random.key(0)
DRAWN = {
    "a typed key": (_dropped, KEY),
    "a raw key": (_dropped, jax.random.PRNGKey(0)),
    "another generator": (_dropped, jax.random.key(0, impl="rbg")),
    "in a loop": (_in_a_loop, KEY),
    "in rows": (_in_rows, KEY),
    "a key made of a number": (_by_the_number_of_the_step, 3),
    "weights": (_noisy_weights, KEY),
    "one key per example": (_per_example, jax.random.split(KEY, 16)),
    "several keys per example": (_split_per_example, jax.random.split(KEY, 16)),
    "a raw key per example": (_split_per_example, jax.random.split(jax.random.PRNGKey(0), 16)),
}


@pytest.fixture(scope="module")
def model():
    up, down, batch = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(8, 16), (16, 8), (16, 8)])
    )
    return {"up": up, "down": down}, batch


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("case", "lowering"),
    [(case, "annotated") for case in DRAWN]
    + [(case, "manual") for case in ("a typed key", "another generator", "in a loop", "in rows")]
    + [(case, "manual") for case in ("one key per example", "a raw key per example")],
)
def test_micro_batches_draw_what_the_whole_batch_draws(model, case, lowering):
    loss, key = DRAWN[case]
    params, batch = model
    plan = pase.compile(loss, params, batch, key, devices=2, mesh="2", accumulate=4, baselines=False)
    step = plan.jax.value_and_grad(lowering=lowering)
    value, grads = step(*plan.jax.device_put(params, batch, key))
    wanted, by = jax.value_and_grad(loss)(params, batch, key)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, by)


@pytest.mark.parametrize("examples", [16, 512])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_that_are_split_with_the_batch_draw_what_the_whole_array_draws(model, examples, impl):
    """A few keys are gathered. Of many, a device draws with its own, unless the generator draws with the first."""
    params, batch = model[0], jnp.tile(model[1], (examples // 16, 1))
    keys = jax.random.split(jax.random.key(0, impl=impl), examples)
    plan = pase.compile(
        _split_per_example, params, batch, keys, devices=2, mesh="data=2", constraints={"batch": "data"}
    )
    given = plan.jax.device_put(params, batch, keys)
    assert not given[2].is_fully_replicated
    value, grads = plan.jax.value_and_grad(lowering="manual")(*given)
    wanted, by = jax.jit(jax.value_and_grad(_split_per_example))(params, batch, keys)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, by)


def test_micro_batches_of_keys_that_draw_by_the_first_key_are_refused(model):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 16)
    with pytest.raises(NotInParts, match="by its first key") as e:
        micro(trace(_per_example, *model, keys), 2)
    assert "test_random.py" in e.value.what and "threefry" in e.value.fix


@pytest.mark.parametrize("of", [_dropped, _in_a_loop])
def test_a_key_that_is_handed_on_changes_between_micro_batches(model, of):
    traced = trace(_handed_on(of), *model, KEY, carry={1: 1})
    assert not micro(traced, 2).drawn
    assert micro(trace(of, *model, KEY), 2).drawn


@pytest.mark.parametrize("of", [_keys_split_by_the_batch, _keys_counted_by_the_batch])
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)])
def test_as_many_keys_as_examples_are_refused_with_the_way_out(model, of, key):
    with pytest.raises(NotInParts) as e:
        micro(trace(of, *model, key), 2)
    assert "makes 16 keys" in e.value.what and "test_random.py" in e.value.what
    assert e.value.fix.startswith("pass one key per example")


def test_a_raw_key_in_the_batch_is_not_the_batch():
    """A raw key has a dim of two, which comes first in the order of the batch's names."""
    params, batch = {"w": jnp.ones((8, 4))}, {"key": jax.random.PRNGKey(0), "x": jnp.ones((16, 8))}
    traced = trace(lambda p, b: jnp.mean(b["x"] @ p["w"] * jax.random.normal(b["key"], (4,))), params, batch)
    assert batch_size(traced) == 16
    assert batch_inputs(traced) == {"b.x"}
    table = trace(lambda p, x, t: jnp.mean(x @ p["w"] @ t), params, jnp.ones((16, 8)), jnp.ones((4, 99)))
    assert batch_size(table) == 16, "the first of two"


def test_rows_whose_example_is_not_known_are_refused(model):
    def loss(params, batch, key):
        h = batch @ params["up"]
        return jnp.mean(h @ params["down"]) + jnp.mean(jax.random.normal(key, (3 * len(batch),)))

    with pytest.raises(NotInParts) as e:
        micro(trace(loss, *model, KEY), 2)
    assert "48 rows" in e.value.what and "test_random.py" in e.value.what
