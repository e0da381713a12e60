"""Calls, loops, branches and rules of derivatives work on padded arrays, and their gradients do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pase.frontends.blocks import as_padded
from pase.frontends.jax.frontend import trace

W = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.float32)
SIZES = {3: 4, 5: 8}


@jax.custom_jvp
def squared(x: Any) -> Any:
    return x * x


squared.defjvp(lambda primals, tangents: (squared(primals[0]), 3 * primals[0] * tangents[0]))


@jax.custom_vjp
def doubled(x: Any, w: Any) -> Any:
    return 2 * x @ w


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ jnp.cos(g)))


def scanned(w: Any, x: Any) -> Any:
    """A carry, slices of a padded stack, and stacked results."""
    h, rows = lax.scan(lambda h, row: (jnp.tanh(h @ w) + row, h.sum(0)), x, jnp.stack([x[0]] * 3))
    return h.sum() + (rows**2).sum()


def turned(w: Any, x: Any) -> Any:
    start = 0, lax.stop_gradient(x)
    return (x @ w).sum() * lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cos(c[1])), start)[
        1
    ].sum()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda w, x: jax.jit(lambda a: jnp.cos(a @ w))(x).sum(),
    "checkpoint": lambda w, x: jax.checkpoint(lambda a: jnp.exp(a @ w))(x).sum(),
    "scan": scanned,
    "reverse": lambda w, x: lax.scan(lambda h, row: (h * row, h), x[0], x, reverse=True)[1].sum() + w.sum(),
    "cond": lambda w, x: lax.cond(x[0, 0] > 9, lambda a: a @ w, lambda a: jnp.cos(a), x).sum(),
    "while": turned,
    "custom_jvp": lambda w, x: squared(x @ w).sum(),
    "custom_vjp": lambda w, x: (doubled(x, w) ** 2).sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_losses_and_gradients_are_those_of_the_program_as_written(name: str) -> None:
    fn = CALLS[name]
    made = as_padded(trace(fn, W, X), SIZES)
    wide = [jnp.pad(a, [(0, SIZES.get(n, n) - n) for n in a.shape]) for a in (W, X)]
    (got, _), grads = jax.value_and_grad(made.fn, has_aux=True)(*wide)  # type: ignore[attr-defined]
    wanted, wanted_grads = jax.value_and_grad(fn)(W, X)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    np.testing.assert_allclose(grads[:5, :5], wanted_grads, rtol=1e-4, atol=1e-5)
    assert not np.asarray(grads)[5:].any() and not np.asarray(grads)[:, 5:].any()
