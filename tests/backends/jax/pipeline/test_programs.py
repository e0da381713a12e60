"""A stage's jaxpr without calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from pase.backends.jax.pipeline.programs import flat


def test_calls_and_recomputed_regions_are_inlined():
    table = jnp.arange(4.0)  # a constant inside of a call

    @jax.jit
    def inner(x):
        return jnp.sin(x) * table

    def fn(x, y):
        return jax.checkpoint(lambda x: inner(inner(x)) + y)(x), y * 2

    closed = jax.make_jaxpr(fn)(jnp.ones(4), jnp.ones(4))
    made = flat(closed)
    names = [e.primitive.name for e in made.jaxpr.eqns]
    assert names.count("sin") == 2 and not {"jit", "pjit", "checkpoint", "remat2"} & set(names)
    given = jnp.linspace(0, 1, 4), jnp.linspace(2, 3, 4)
    for got, wanted in zip(jaxpr_as_fun(made)(*given), fn(*given), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
