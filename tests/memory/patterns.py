"""Small programs, one for each pattern of what backward keeps: functions of parameters and a batch [B, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.memory.programs import spec

__all__ = ["PATTERNS", "pattern"]

B, D = 64, 32


def _softmax(x: Any) -> Any:
    return jax.nn.softmax(x)


def _norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _batch_norm(x: Any) -> Any:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


def _dropout(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(jnp.int32(x[0, 0])), 0.9, x.shape), x / 0.9, 0.0)


def _attention(x: Any) -> Any:
    q = x.reshape(4, B // 4, D)
    return (jax.nn.softmax(q @ q.mT) @ q).reshape(x.shape)


def _one_hot(x: Any) -> Any:
    return -(jax.nn.one_hot(jnp.arange(B) % D, D) * jax.nn.log_softmax(x)).sum(-1)


def _picked(x: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x), (jnp.arange(B) % D)[:, None], 1)


def _convolved(x: Any) -> Any:
    image = x.reshape(4, 16, D, 1)
    filters = jnp.ones((3, 3, 1, 2)) * x[0, 0]
    return lax.conv_general_dilated(
        image, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.tanh(x)


_clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -1, 1) * (jnp.abs(x) < 1),))


def _half(x: Any) -> Any:
    y = x.astype(jnp.bfloat16)
    return (y * jax.nn.sigmoid(y)).astype(jnp.float32)


PATTERNS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "softmax": _softmax,
    "layer norm": _norm,
    "batch norm": _batch_norm,
    "dropout": _dropout,
    "where": lambda x: jnp.where(x > 0, jnp.sin(x), 2 * x),
    "maximum": lambda x: jnp.maximum(x, 0.5 * x[::-1]),
    "max": lambda x: x - x.max(-1, keepdims=True),
    "gather": lambda x: jnp.sin(x[jnp.arange(B)[::-1]]),
    "scatter": lambda x: jnp.sin(jnp.zeros_like(x).at[jnp.arange(B)[::-1]].add(x)),
    "condition": lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, lambda x: 2 * x, x),
    "custom derivative": _clipped,
    "convolution": _convolved,
    "cumulative sum": lambda x: jnp.sin(jnp.cumsum(x, 0)),
    "sort": lambda x: jnp.sort(x, -1),
    "top-k": lambda x: lax.top_k(x, 4)[0],
    "attention": _attention,
    "mixed dtypes": _half,
    "integer powers": lambda x: x**3 + x**2,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "one-hot cross entropy": _one_hot,
    "picked cross entropy": _picked,
    "again": jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x))),
    "again but products": jax.checkpoint(
        lambda x: jnp.tanh(jnp.sin(x) @ jnp.ones((D, D))), policy=jax.checkpoint_policies.dots_saveable
    ),
    "stop gradient": lambda x: jnp.tanh(lax.stop_gradient(jnp.sin(x))) * x,
    "quotient": lambda x: x / (1 + jnp.exp(-x)),
}
"""name -> a function between two dense layers."""


def pattern(name: str) -> tuple[Any, Any, Any]:
    """Return (loss, parameters, batch): a dense layer, the pattern, and the mean square of a second dense layer."""
    inside = PATTERNS[name]

    def loss(p: Any, x: Any) -> Any:
        y = inside(x @ p["a"])
        y = y.reshape(-1, D) @ p["b"] if y.size % D == 0 else y
        return jnp.mean(y**2)

    return loss, {"a": spec(D, D), "b": spec(D, D)}, spec(B, D)
