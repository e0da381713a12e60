"""State of Equinox, Linen and Keras is threaded. State that a function writes but does not return is refused."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import pase
from bench.cases.plans import case_of
from pase.errors import PaseError

KEY = jax.random.key(0)
WIDTH, HIDDEN, STEPS = 16, 32, 10
X = jax.random.normal(KEY, (16, WIDTH))
BATCH = {"x": X, "y": jnp.sin(X)}
OPTIMIZER = optax.adam(1e-2, eps=1e-3)


class Net(eqx.Module):
    """Batch statistics over the examples of a vmap, spectral norm and dropout."""

    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=a)
        self.norm = eqx.nn.BatchNorm(HIDDEN, "batch", mode="batch", momentum=0.9)
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(HIDDEN, HIDDEN, key=b), "weight", key=c)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=d)
        self.dropout = eqx.nn.Dropout(0.3)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        h, state = self.norm(self.up(x), state)
        h, state = self.spectral(jax.nn.relu(h), state)
        return self.down(self.dropout(h, key=key)), state


def stateful(model: Any, state: Any, batch: Any, key: Any) -> Any:
    keys = jax.random.split(key, len(batch["x"]))
    each = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    got, state = each(batch["x"], state, keys)
    return jnp.mean((got - batch["y"]) ** 2), state


def forgetful(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return stateful(model, state, batch, key)[0]


@pytest.mark.some(1)
@pytest.mark.parametrize(("strategy", "lowering"), [("ours@2x4", "manual"), ("random1@2x4", "annotated")])
def test_an_equinox_state_is_handed_on_without_being_named(strategy: str, lowering: str) -> None:
    model, state = eqx.nn.make_with_state(Net)(KEY)
    plan = case_of(stateful, model, state, BATCH, KEY).plan(strategy)
    assert plan is not None and len(plan.traced.carried) == len(jax.tree.leaves(state))

    @eqx.filter_jit
    def whole(model: Any, state: Any, opt: Any, key: Any) -> Any:
        (loss, state), grads = eqx.filter_value_and_grad(stateful, has_aux=True)(model, state, BATCH, key)
        updates, opt = OPTIMIZER.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt, loss

    step = plan.jax.train_step(OPTIMIZER, lowering=lowering)
    mine, held, batch, _ = plan.jax.device_put(model, state, BATCH, KEY)
    opt, plain = plan.jax.init(OPTIMIZER, mine), OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    for i in range(STEPS):
        key = jax.random.fold_in(KEY, i)
        mine, opt, (got, held) = step(mine, opt, held, batch, key)
        model, state, plain, wanted = whole(model, state, plain, key)
        np.testing.assert_allclose(got, wanted, rtol=2e-5)
    pairs = zip(
        *(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in ((mine, held), (model, state))), strict=True
    )
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=5e-5)


def test_an_equinox_state_that_is_dropped_is_refused_unless_it_is_only_read() -> None:
    model, state = eqx.nn.make_with_state(Net)(KEY)
    with pytest.raises(PaseError, match=r"equinox\.nn\.State") as e:
        pase.compile(forgetful, model, state, BATCH, KEY, devices=8)
    assert e.value.where == "forgetful"
    model = eqx.nn.inference_mode(model)
    plan = pase.compile(forgetful, model, state, BATCH, KEY, devices=8, mode="inference", mesh="8")
    np.testing.assert_allclose(
        plan.jax.apply(model, state, BATCH, KEY), forgetful(model, state, BATCH, KEY), rtol=1e-5
    )


def test_variables_of_a_state_that_are_written_are_returned_or_refused() -> None:
    graphdef, params, rest = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Param, ...)
    weights = {"w": jnp.ones((WIDTH, WIDTH))}

    def lost(weights: Any, x: Any, rest: Any) -> Any:
        return jnp.mean(nnx.merge(graphdef, params, rest)(x @ weights["w"]) ** 2)

    def returned(weights: Any, x: Any, rest: Any) -> Any:
        dropout = nnx.merge(graphdef, params, rest)
        return jnp.mean(dropout(x @ weights["w"]) ** 2), nnx.state(dropout)

    with pytest.raises(PaseError, match=r"nnx\.State .*rngs\.count") as e:
        pase.compile(lost, weights, X, rest, devices=8)
    assert e.value.where == "lost" and "pass the module itself" in e.value.fix
    plan = pase.compile(returned, weights, X, rest, devices=8, mesh="8", carry={1: 1})
    step, opt = plan.jax.train_step(OPTIMIZER), plan.jax.init(OPTIMIZER, weights)
    _, _, (_, rest) = step(weights, opt, X, rest)
    assert int(rest["rngs"]["count"][...]) == 1


class Linen(nn.Module):
    """Batch statistics that do not influence the results of examples."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        seen = self.variable("seen", "mean", lambda: jnp.zeros(WIDTH))
        steps = self.variable("seen", "steps", lambda: jnp.zeros(()))
        out = nn.Dense(WIDTH)(x) - seen.value
        if not self.is_initializing():
            seen.value = 0.9 * seen.value + 0.1 * x.mean(0)
            steps.value = steps.value + 1
        return out


def test_state_that_is_not_carried_takes_no_micro_batches() -> None:
    net = Linen()
    xs = jnp.concatenate([X, 2 * X])
    made = net.init(KEY, xs)

    def loss(params: Any, x: Any, seen: Any) -> Any:
        out, new = net.apply({"params": params, "seen": seen}, x, mutable=["seen"])
        return jnp.mean(out**2), new["seen"]

    args = (made["params"], xs, made["seen"])
    with pytest.raises(PaseError, match=r"carry=\{1: place\}"):
        pase.compile(loss, *args, devices=8, accumulate=2)
    plan = pase.compile(loss, *args, devices=8, mesh="8", accumulate=2, carry={1: 1})
    params, x, seen = plan.jax.device_put(*args)
    _, _, (_, seen) = plan.jax.train_step(OPTIMIZER)(params, plan.jax.init(OPTIMIZER, params), x, seen)
    wanted = made["seen"]["mean"]
    for part in (xs[::2], xs[1::2]):
        wanted = 0.9 * wanted + 0.1 * part.mean(0)
    np.testing.assert_allclose(seen["mean"], wanted, atol=1e-6)
    assert float(seen["steps"]) == 2


def test_an_aux_without_arrays_comes_back() -> None:
    plan = pase.compile(
        lambda w, x: (jnp.mean((x @ w) ** 2), {}), jnp.ones((WIDTH, WIDTH)), X, devices=8, mesh="8"
    )
    for lowering in ("manual", "annotated"):
        (value, aux), _ = plan.jax.value_and_grad(lowering=lowering)(jnp.ones((WIDTH, WIDTH)), X)
        assert value.shape == () and aux == {}
