"""Random numbers in manually lowered steps: each device makes its own part of the numbers of one device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import sharded_step, unsharded_step
from pase.backends.jax.ops.draws import counted

KEY = jax.random.key(3)
ARGS = ({"w": jax.random.normal(KEY, (16, 32))}, jax.random.normal(KEY, (8, 4, 16)), KEY)


def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    h, more = x @ params["w"], jax.random.fold_in(key, 1)
    kept = jnp.where(jax.random.bernoulli(more, 0.7, h.shape), h, 0)
    small, short = (jax.random.bits(key, h.shape, d).astype("float32") for d in ("uint8", "uint16"))
    return jnp.mean((kept + jax.random.normal(key, h.shape) + 1e-3 * small + 1e-5 * short) ** 2)


def sizes_of_bits(jaxpr: Any) -> list[int]:
    """The number of random elements that each equation makes, in a jaxpr and in the jaxprs inside of it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("threefry2x32", "random_bits"):
            found.append(math.prod(eqn.outvars[0].aval.shape))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += sizes_of_bits(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("strategy", ["ours@2x4", "random3@2x2x2"])
def test_each_device_makes_its_part(strategy: str) -> None:
    plan, optimizer = case_of(loss, *ARGS).plan(strategy), optax.sgd(1e-2)
    whole = unsharded_step(loss, optimizer, *ARGS)
    off = whole.differences(sharded_step(plan, optimizer, *ARGS, lowering="manual"))
    assert max(off.values()) < 1e-5, off
    if strategy == "ours@2x4":
        made = sizes_of_bits(jax.make_jaxpr(plan.jax.loss(lowering="manual"))(*ARGS).jaxpr)
        assert made.count(8 * 4 * 32 // 8) == 4 and max(made) == 8 * 4 * 32 // 8


def test_numbers_of_elements_beyond_32_bits() -> None:
    shape = (5, 1 << 20, 3, 70_001)
    rng = np.random.default_rng(0)
    places = [np.sort(rng.choice(n, min(n, 9), replace=False)).astype(np.uint32) for n in shape]
    high, low = jax.jit(lambda *at: counted(at, shape))(*places)
    wanted = np.ravel_multi_index(np.meshgrid(*places, indexing="ij"), shape).astype(np.uint64)
    np.testing.assert_array_equal(
        (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low), wanted
    )
