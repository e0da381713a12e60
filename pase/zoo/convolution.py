"""Layers of convolutional networks. Images are [b, h, w, c]; kernels [kh, kw, c, n]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from pase.zoo.layers import Leaf, Weights, bias, cross_entropy, integers, normal, ones, weight

__all__ = [
    "average_over_space",
    "average_pool",
    "batch_norm",
    "conv",
    "images",
    "linear_loss",
    "max_pool",
    "unit",
    "unit_leaves",
]

Padding: TypeAlias = str | Sequence[tuple[int, int]]
"""SAME or VALID, or (elements before, elements after) for each dim."""


def conv(x: jax.Array, w: jax.Array, *, stride: int = 1, padding: Padding = "SAME") -> jax.Array:
    """Convolve images [b, h, w, c] with a kernel [kh, kw, c, n]."""
    return jax.lax.conv_general_dilated(
        x, w.astype(x.dtype), (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def max_pool(x: jax.Array, *, window: int, stride: int, padding: Padding = "VALID") -> jax.Array:
    """The largest value of each window of each channel."""
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), padding
    )


def average_pool(x: jax.Array, *, window: int, stride: int, padding: Padding = "VALID") -> jax.Array:
    """The mean of each window of each channel. Padding counts as zeros."""
    total = jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, window, window, 1), (1, stride, stride, 1), padding
    )
    return total / (window * window)


def batch_norm(x: jax.Array, p: Weights, *, eps: float = 1e-5) -> jax.Array:
    """Normalize each channel over batch and space with the batch's own statistics, in float32.

    This is training mode. The running averages, which are not parameters, are left out.
    """
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=(0, 1, 2))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=(0, 1, 2)) + eps)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def unit(
    x: jax.Array, p: Weights, *, stride: int = 1, padding: Padding = "SAME", eps: float = 1e-5
) -> jax.Array:
    """A convolution without bias, then batch norm."""
    return batch_norm(conv(x, p["w"], stride=stride, padding=padding), p, eps=eps)


def unit_leaves(kh: int, kw: int, c: int, n: int) -> dict[str, Leaf]:
    """The kernel of a `unit` and its batch norm."""
    return {
        "w": weight(kh, kw, c, n, fan_in=kh * kw * c, gain=2),
        "scale": ones(n),
        "bias": bias(n),
    }


def average_over_space(x: jax.Array) -> jax.Array:
    """The mean over height and width: [b, h, w, c] -> [b, c]."""
    return jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(x.dtype)


def linear_loss(x: jax.Array, p: Weights, labels: jax.Array) -> jax.Array:
    """A linear classifier over features [b, c], and its loss."""
    logits = jnp.matmul(x, p["w"].astype(x.dtype), preferred_element_type=jnp.float32) + p["b"]
    return cross_entropy(logits, labels)


def images(batch: int, image: int, classes: int) -> dict[str, Leaf]:
    """A batch of square colour images with one label each."""
    return {"images": normal(batch, image, image, 3, std=1.0), "labels": integers(batch, below=classes)}
