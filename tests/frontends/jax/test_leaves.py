"""Trees are divided into arrays and static leaves, and into what is trained and what is not, and put together again."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.frontends.jax.leaves import (
    arrays,
    combine,
    loss_and_aux,
    static,
    trained,
    untrained,
    value_and_grad,
)

MODEL = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
TREE = {
    "model": MODEL,
    "steps": jnp.int32(3),
    "rate": 0.5,
    "key": jax.random.key(1),
    "mask": np.ones(3, bool),
}


def test_functions_of_a_module_are_static() -> None:
    assert arrays(TREE)["model"].activation is None
    assert static(TREE)["model"].activation is MODEL.activation
    assert static(TREE)["steps"] is None and static(TREE)["rate"] is None


def test_floating_leaves_are_trained() -> None:
    mine = trained(arrays(TREE))
    assert mine["rate"] == 0.5 and mine["model"].layers[0].weight is MODEL.layers[0].weight
    assert mine["steps"] is None and mine["key"] is None and mine["mask"] is None


def test_parts_combine_to_the_tree() -> None:
    held = arrays(TREE)
    again = combine(combine(trained(held), untrained(held)), static(TREE))
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(TREE), strict=True))


@pytest.mark.parametrize(
    ("out", "loss", "aux"),
    [
        (1.0, 1.0, None),
        ((1.0, {"a": 2}), 1.0, {"a": 2}),
        ((1.0, 2, 3), 1.0, (2, 3)),
        ({"a": 1.0, "b": 2}, 1.0, {"a": 1.0, "b": 2}),
        (({"a": 1.0}, 2), 1.0, ({"a": 1.0}, 2)),
    ],
)
def test_the_loss_is_the_first_leaf(out: Any, loss: Any, aux: Any) -> None:
    assert loss_and_aux(out) == (loss, aux)


def test_gradients_are_of_trained_leaves_only() -> None:
    """They are those of JAX, with respect to these leaves."""
    params = {"w": jnp.array([1.0, 2.0]), "n": jnp.int32(3)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(p["w"] ** 2 * x) * p["n"], p["n"] + 1

    (value, aux), grads = value_and_grad(loss)(params, jnp.array([1.0, 10.0]))
    assert (float(value), int(aux)) == (123.0, 4) and grads["n"] is None
    np.testing.assert_allclose(grads["w"], [6.0, 120.0])
