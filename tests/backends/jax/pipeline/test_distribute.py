"""Optimizers that would give other numbers in stages are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from pase.backends.jax.pipeline.distribute import _check_rows
from pase.backends.jax.pipeline.programs import flat
from pase.errors import PaseError
from tests.backends.jax.pipeline.staged import chained, staged

pytestmark = pytest.mark.usefixtures("double")


def by_momentum(grads, state, params=None):
    """Divides by the largest element of the state alone, which has a row for each layer."""
    del params
    updates = jax.tree.map(lambda g, m: g / (1 + jnp.max(m)), grads, state)
    return updates, jax.tree.map(jnp.add, grads, state)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.lamb(1e-3), "each layer of 'params'"),
        (optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-3)), "random numbers"),
        (optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), by_momentum), "reduce_max"),
        (optax.stateless(lambda g, p: jax.tree.map(lambda x: x / x.size, g)), "the number 32.0"),
    ],
)
def test_an_optimizer_that_would_give_other_numbers_in_stages_is_refused(optimizer, why):
    plan, w, x, _ = chained()
    jp = staged(plan, "1f1b", 1, (2, 2)).jax
    with pytest.raises(PaseError) as e:
        jp.train_step(optimizer)(w, jp.init(optimizer, w), x)
    assert why in e.value.what and "choose an optimizer" in e.value.fix


@jax.custom_jvp
def over_sum(x):
    return x / x.sum()


over_sum.defjvps(lambda t, ans, x: t)

MIXING = {
    "transpose": lambda x: x.T,
    "cond": lambda x: jax.lax.cond(True, over_sum, jnp.abs, x),
    "gather": lambda x: x[jnp.array([1, 0])],
    "reduce_window_sum": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME"),
    "cholesky": lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False),
    "scan": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y, x),
    "div": over_sum,
    "mul": lambda x: x * jnp.arange(1.0, 3.0)[:, None],
    "reduce_sum": lambda x: (x * x).sum(),
}


@pytest.mark.parametrize("name", MIXING)
def test_an_update_that_mixes_the_layers_of_a_stack_is_refused(name):
    """Of two stages with two layers each."""
    closed = flat(jax.make_jaxpr(lambda *parts: [MIXING[name](x) for x in parts])(*[jnp.eye(2)] * 2))
    with pytest.raises(PaseError, match=f"'{name}'.*each layer of 'w'"):
        _check_rows(closed.jaxpr, {0: ("w", 0), 1: ("w", 2)})


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.where(x > 0, jax.nn.relu(x), x.astype("bfloat16").astype(x.dtype)),
        lambda x: x / jnp.abs(x).max(1, keepdims=True),
    ],
)
def test_an_update_of_each_layer_by_itself_is_not_refused(fn):
    closed = flat(jax.make_jaxpr(lambda *parts: [fn(x) for x in parts])(*[jnp.eye(2)] * 2))
    _check_rows(closed.jaxpr, {0: ("w", 0), 1: ("w", 2)})


def test_results_are_in_the_order_of_the_program(monkeypatch):
    """Every process compiles these programs. In the order of a set, their results would be at other places in each."""
    from pase.backends.jax.pipeline import distribute

    made, function_of = [], distribute.function_of

    def recorded(closed, equations, reads, makes):
        made.append((equations, makes))
        return function_of(closed, equations, reads, makes)

    monkeypatch.setattr(distribute, "function_of", recorded)
    plan, w, x, _ = chained()
    jp = staged(plan, "1f1b", 1, (2, 2)).jax
    jp.train_step(optax.adamw(1e-3))(w, jp.init(optax.adamw(1e-3), w), x)
    assert any(len(makes) > 3 for _, makes in made)
    for equations, makes in made:
        places = {v: i for i, v in enumerate(v for e in equations for v in e.outvars)}
        assert [places[v] for v in makes] == sorted(places[v] for v in makes)
