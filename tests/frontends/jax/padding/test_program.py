"""Which extents are padded, and which programs cannot be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.frontends.jax.padding.program import extents, padded

S = jax.ShapeDtypeStruct


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


ARGS: Any = ({"w": S((63, 61), "float32"), "b": S((61,), "float32")}, S((32, 63), "float32"))


def test_extents_that_the_devices_do_not_divide_are_padded_to_the_next_multiple() -> None:
    assert extents(trace(loss, *ARGS), 8) == {63: 64, 61: 64}
    assert extents(trace(loss, *ARGS), 1) == {}


def test_parameters_and_inputs_have_the_padded_shapes() -> None:
    made = padded(trace(loss, *ARGS), {63: 64, 61: 62})
    assert sorted(t.shape for t in (*made.graph.parameters, *made.graph.inputs)) == [
        (32, 64),
        (62,),
        (64, 62),
    ]  # type: ignore[type-var]


def test_a_program_that_passes_values_on_is_refused() -> None:
    traced = trace(lambda p, s, x: (p, s), ARGS[0], ARGS[0], ARGS[1], mode="step")
    with pytest.raises(PaseError, match="passes values to its next call"):
        padded(traced, {63: 64})


def test_a_padded_batch_draws_by_its_own_keys() -> None:
    """One key per example: keys are not padded, so that the batch's are as many as its examples."""

    def noisy(w: Any, x: Any, keys: Any) -> Any:
        return jnp.mean(jax.vmap(lambda x, key: jnp.tanh(x @ w) * jax.random.uniform(key, (4,)))(x, keys))

    w, x = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(8, 4), (15, 8)]))
    keys = jax.random.split(jax.random.key(2), 15)
    made = padded(trace(noisy, w, x, keys), {15: 16})
    assert [t.shape for t in made.graph.inputs] == [(16, 8), (15,)]
    wide = jnp.concatenate([x, jnp.ones((1, 8))])
    got = jax.jit(jax.extend.core.jaxpr_as_fun(made.jaxpr))(w, wide, keys)  # type: ignore[arg-type]
    assert jnp.allclose(got[0], noisy(w, x, keys), rtol=1e-5)
