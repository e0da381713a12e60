"""Delayed updates under plans that gather parameters, compute in two dtypes or in micro-batches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.jax.steps.updates import waiting_bytes
from pase.errors import PaseError
from pase.schedule.plan import Update
from tests.backends.jax.steps.test_delayed import DELAYED, drawn, looped, scheduled

assert drawn  # a fixture


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_plans_that_gather_parameters_refuse_delays(drawn, strategy):
    """A gathered parameter is needed in its own step, so the bucket plan of such a plan cannot delay updates."""
    params, batches = drawn
    period, updates = DELAYED["one, two, one"]
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, "float32"), (params, batches[0]))
    plan = case_of(looped, params, batch).plan(strategy)
    with pytest.raises(PaseError, match="delays updates"):
        scheduled(plan, period, updates)


def on_a_device(waiting):
    """Bytes of gradients that wait on one device."""
    return sum(x.nbytes // len(x.sharding.device_set) for x in jax.tree.leaves(waiting))


def test_a_stack_that_is_cast_before_its_loop_is_summed_at_once_and_the_warning_says_so():
    """The cast joins the gradients of all iterations, so they are in no message. They wait as sums, and are counted."""

    def loss(params, x):
        stack = params["stack"].astype("bfloat16")
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x.astype("bfloat16"), stack)[0]
        return jnp.mean((h.astype("float32") @ params["out"]) ** 2)

    params = {"stack": jnp.full((3, 8, 8), 0.1), "out": jnp.full((8, 4), 0.1)}
    batch = jnp.ones((8, 8))
    plan = scheduled(case_of(loss, params, batch).plan("data_parallel"), 2, (Update(first=0, last=1, at=1),))
    optimizer = optax.sgd(0.1)
    with pytest.warns(UserWarning, match="gradients of 'stack'"):
        step = plan.jax.train_step(optimizer, lowering="manual")
    _, state, _ = step(params, plan.jax.init(optimizer, params), batch)
    assert [list(w["sums"]) for w in state.waiting] == [[(1,)]]
    assert on_a_device(state.waiting) == plan.waiting_bytes == 4 * (3 * 8 * 8 + 8 * 4)


def test_gradients_of_casts_are_added_as_their_parameters_are_stored():
    """Products in bfloat16 have gradients in bfloat16. While these wait they are added up in float32, so the sum of
    three is not rounded to bfloat16."""
    one = 1 + 2**-7

    def loss(params, x):
        return jnp.sum(x.astype("bfloat16") @ params["w"].astype("bfloat16")).astype("float32")

    params = {"w": jnp.zeros((8, 4), "float32")}
    batch = jnp.full((8, 8), one, "float32")
    plan = scheduled(case_of(loss, params, batch).plan("data_parallel"), 4, (Update(first=0, last=3, at=3),))
    optimizer = optax.sgd(1.0)
    with pytest.warns(UserWarning, match="by design"):
        step = plan.jax.train_step(optimizer, lowering="manual")
    held, state = params, plan.jax.init(optimizer, params)
    for k in range(3):
        held, state, _ = step(held, state, batch)
        (waiting,) = state.waiting
        (value,) = waiting["values"].values()
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, (k + 1) * one)
        assert on_a_device(state.waiting) == plan.waiting_bytes == waiting_bytes(plan.jax.program, plan.graph)
    held, state, _ = step(held, state, batch)
    assert held["w"].dtype == jnp.float32 and state.waiting == ()
    np.testing.assert_allclose(held["w"], -8 * one, rtol=2**-7)


def test_micro_batches_apply_their_own_gradients_and_say_so():
    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(32, 64)) / 8, "b": rng.normal(size=(64, 8)) / 8}
    params = jax.tree.map(lambda x: jnp.asarray(x, "float32"), params)
    batch = jnp.asarray(rng.normal(size=(32, 32)), "float32")
    plan = scheduled(case_of(loss, params, batch).plan("data_parallel"), 1, (Update(first=0, last=0, at=1),))
    plan = replace(plan, accumulate=2)
    optimizer = optax.sgd(0.1)
    with pytest.warns(UserWarning, match="bucket plan 'by hand'"):
        step = plan.jax.train_step(optimizer, lowering="manual", donate=False)
        held, _, _ = step(params, plan.jax.init(optimizer, params), batch)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), held, expected)
