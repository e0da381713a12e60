"""What is no loss or no program of its mode is refused, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace

KEY = jax.random.key(0)


X = jax.random.normal(KEY, (32, 16))


SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PARAMS = {"w": jax.random.normal(KEY, (16, 16)) / 4, "count": jnp.int32(3), "key": jax.random.key(1)}


def with_statistics(p: Any, x: Any, stats: Any) -> Any:
    h = x @ p["w"] + 0.1 * jax.random.normal(p["key"], (16,))
    new = {"mean": 0.9 * stats["mean"] + 0.1 * jnp.mean(h, 0), "steps": stats["steps"] + 1}
    return jnp.mean((h - stats["mean"]) ** 2) / p["count"], {"stats": new, "largest": jnp.max(h)}


def test_what_is_no_loss_is_said() -> None:
    params, stats = (
        {"w": jnp.ones((16, 16)), "b": jnp.ones(16)},
        {"mean": jnp.zeros(16), "steps": jnp.int32(0)},
    )

    def loss_first(p: Any, x: Any) -> Any:
        return jnp.sum(x @ p["w"]), jax.tree.map(lambda w: 2 * w, p)

    def batch_first(batch: Any, params: Any) -> Any:
        return jnp.sum(batch @ params["w"])

    with pytest.raises(PaseError, match="mode='step'"):
        pase.compile(loss_first, params, X, devices=8)
    with pytest.raises(PaseError) as e:
        pase.compile(batch_first, X, params, devices=8)
    assert e.value.where == "batch_first(batch, params)" and "fn(params, …)" in e.value.fix
    with pytest.raises(PaseError, match="nothing"):
        pase.compile(with_statistics, PARAMS, X, stats, devices=8, carry={1: (1, "nothing")})


def test_statistics_of_the_parameters_form_are_no_parameters() -> None:
    """A single batch normalization of Keras: two weights and two statistics for each channel."""

    def loss(p: Any, stats: Any, x: Any) -> Any:
        mean, spread = jnp.mean(x, 0), jnp.var(x, 0)
        made = (x - mean) / jnp.sqrt(spread + 1e-3) * p[0] + p[1]
        return jnp.mean(made**2), [0.9 * stats[0] + 0.1 * mean, 0.9 * stats[1] + 0.1 * spread]

    ones = [jnp.ones(16), jnp.ones(16)]
    assert pase.compile(loss, ones, ones, X[:, :16], devices=8)

    def with_momentum(p: Any, momentum: Any, x: Any) -> Any:
        value, rest = loss(p, momentum, x)
        return value, rest, p

    with pytest.raises(PaseError, match="returns new parameters"):
        pase.compile(with_momentum, ones, ones, X[:, :16], devices=8)


def test_a_users_exception_stays_what_it_is() -> None:
    def loss(p: Any, x: Any) -> Any:
        return {}["missing"]

    with pytest.raises(KeyError) as e:
        pase.compile(loss, {"w": X}, X, devices=8)
    assert any("while pase traced loss" in note for note in e.value.__notes__)


@pytest.mark.parametrize(
    ("fn", "params", "message"),
    [
        (lambda p: p * 2, SQUARE, "returns float32[4,4]: pase needs a scalar loss"),
        (lambda p: (), SQUARE, "returns nothing: pase needs a scalar loss"),
        (lambda p: jnp.sum(p > 0), SQUARE, "returns a int32 scalar, but a loss must be floating-point"),
        (lambda p: p @ jnp.ones((3, 3)), SQUARE, "JAX cannot trace <lambda> on these shapes"),
    ],
)
def test_bad_input(fn: Callable[..., Any], params: Any, message: str) -> None:
    with pytest.raises(PaseError) as e:
        trace(fn, params)
    assert message in str(e.value)
    assert "\n" not in str(e.value).partition("on these shapes")[0]


def test_an_error_of_the_program_names_the_line_that_raised_it() -> None:
    def inner(w: Any, x: Any) -> Any:
        return x @ w  # of (3, 4) and (3, 4)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(inner(w, x))

    x = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    with pytest.raises(PaseError) as e:
        trace(loss, x, x)
    path, _, line = e.value.where.rpartition(":")
    assert Path(path) == Path(__file__)
    assert "of (3, 4) and (3, 4)" in Path(__file__).read_text().splitlines()[int(line) - 1]
