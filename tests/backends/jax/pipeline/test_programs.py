"""A stage's jaxpr without calls, and the sharding of a weight's row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pase.backends.jax.pipeline.programs import _sliced_sharding, flat


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


@pytest.mark.parametrize(
    ("fn", "rows", "spec", "wanted"),
    [
        (lambda w: w.astype("bfloat16"), 4, P("a", "b"), P("a", "b")),
        (lambda w: w[1:3], 4, P(None, "b"), P(None, "b")),
        (lambda w: w[1:3], 4, P("a", "b"), None),
        (lambda w: w[:, 1:3], 4, P(None, "b"), None),
        (lambda w: jax.lax.squeeze(w, (0,)), 1, P(None, "b"), P("b")),
        (jnp.sin, 4, P(None, "b"), None),
    ],
)
def test_the_sharding_of_a_row_or_a_cast_follows_from_the_weights(fn, rows, spec, wanted):
    """It is unknown if the rows themselves are split, or if another dim is sliced."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    (eqn,) = jax.make_jaxpr(fn)(jnp.ones((rows, 8))).jaxpr.eqns
    found = _sliced_sharding(eqn, NamedSharding(mesh, spec))
    assert found == (None if wanted is None else NamedSharding(mesh, wanted))
