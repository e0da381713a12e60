"""Loops and branches with a plan's constraints inside of them: the sharded step equals the unsharded one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from bench.cases.plans import TOLERANCE, case_of, measured
from pase.backends.audit.xla import sharded_step, unsharded_step
from pase.backends.jax.spmd.lower import Lowering

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {name: jax.random.normal(k, (64, 64)) / 8 for name, k in zip("abc", KEYS, strict=False)}
X = jax.random.normal(KEYS[3], (32, 64))


def branches(p: Any, x: Any, which: Any) -> Any:
    def body(h: Any, _: Any) -> Any:
        made = [lambda a: jnp.tanh(a @ p["a"]), lambda a: a + 1.0, lambda a: jnp.sin(a @ p["b"]) @ p["c"].T]
        return lax.switch(which, made, h), None

    return jnp.mean(lax.scan(body, x @ p["b"], None, length=2)[0] ** 2)


def turning(p: Any, x: Any, turns: Any) -> Any:
    q = lax.stop_gradient(p)
    turned = lax.fori_loop(0, turns, lambda i, h: jnp.tanh(h @ q["a"] @ q["b"]), x)
    return jnp.mean((turned @ p["c"]) ** 2)


def ending_alone(p: Any, x: Any, turns: Any) -> Any:
    """A while loop under vmap: each row ends when it is long enough, some rows before the first iteration."""
    a = lax.stop_gradient(p["a"])

    def one(row: Any) -> Any:
        grown, times = lax.while_loop(
            lambda c: (jnp.sum(c[0] ** 2) < 30.0 * (1 + turns)) & (c[1] < 4),
            lambda c: (c[0] + jnp.tanh(c[0] @ a), c[1] + 1),
            (row, 0),
        )
        return grown * (1 + times)

    return jnp.mean((jax.vmap(one)(x) @ p["c"]) ** 2)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("strategy", "lowering"),
    [("ours@2x4", "annotated"), ("random1@2x2x2", "annotated"), ("random1@2x2x2", "manual")],
)
@pytest.mark.parametrize("fn", [branches, turning, ending_alone])
def test_step_equals_unsharded(fn: Any, strategy: str, lowering: Lowering) -> None:
    case, optimizer = case_of(fn, PARAMS, X, jnp.int32(2)), optax.adam(1e-2, eps=1e-3)
    plan = case.plan(strategy)
    assert plan is not None
    for which in (0, 2):
        args = (PARAMS, X, jnp.int32(which))
        off = unsharded_step(fn, optimizer, *args).differences(
            sharded_step(plan, optimizer, *args, lowering=lowering)
        )
        assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}


def test_stacks_that_a_loop_slices_are_moved_before_it():
    off, rows = measured("rnnlm", "random1@2x4", "manual")
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}
    assert all(r.compiled <= r.predicted for r in rows)
