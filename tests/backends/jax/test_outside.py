"""Steps with collectives under vmap, callbacks, sparse matrices or the user's ``shard_map`` equal unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bench.cases.plans import TOLERANCE, case_of
from pase.backends.audit.xla import sharded_step, unsharded_step

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {name: jax.random.normal(k, (32, 32)) / 6 for name, k in zip("ab", KEYS, strict=False)}
X = jax.random.normal(KEYS[2], (64, 32))
MATRIX = sparse.BCOO.fromdense(jnp.where(X > 1.0, X, 0.0))


def under_vmap(p: Any, x: Any) -> Any:
    def one(x: Any) -> Any:
        h = x @ p["a"]
        spread = jax.lax.pmean((h - jax.lax.pmean(h, "batch")) ** 2, "batch")
        top = jax.lax.pmax(jax.lax.stop_gradient(h), "batch")
        return h / jnp.sqrt(spread + 1.0) + top + jax.lax.axis_index("batch") / 64

    return jnp.mean(jax.vmap(one, axis_name="batch")(x) ** 2)


def callback(p: Any, x: Any) -> Any:
    y = jax.pure_callback(lambda x: np.sort(x, -1), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return jnp.mean((y @ p["a"]) ** 2)


def product(p: Any, x: Any) -> Any:
    return jnp.mean((MATRIX @ (p["a"] @ p["b"])) * x)


def by_hand(p: Any, x: Any) -> Any:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))

    def body(h: Any) -> Any:
        return h / jnp.sqrt(jax.lax.pmean(jnp.mean(h**2), "rows") + 1.0)

    spread = jax.shard_map(body, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    return jnp.mean((spread(x @ p["a"]) @ p["b"]) ** 2)


@pytest.mark.parametrize("fn", [under_vmap, callback, product, by_hand])
def test_step_equals_unsharded(fn: Callable[..., Any]) -> None:
    plan = case_of(fn, PARAMS, X).plan("ours@2x4")
    assert plan is not None
    optimizer = optax.adam(1e-2, eps=1e-3)
    off = unsharded_step(fn, optimizer, PARAMS, X).differences(sharded_step(plan, optimizer, PARAMS, X))
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}
