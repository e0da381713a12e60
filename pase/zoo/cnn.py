"""Convolutional networks that are one chain of layers: AlexNet, VGG-19, ResNet-101. Images are NHWC."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pase.zoo.layers import Built, constant, cross_entropy, integers, normal, weight

__all__ = ["alexnet", "average_pool", "batch_norm", "conv", "max_pool"]


def conv(x: jax.Array, w: jax.Array, *, stride: int = 1, padding: Any = "SAME") -> jax.Array:
    """Convolve images [b, h, w, c] with a kernel [kh, kw, c, n]."""
    return jax.lax.conv_general_dilated(
        x, w.astype(x.dtype), (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def max_pool(x: jax.Array, *, window: int, stride: int, padding: Any = "VALID") -> jax.Array:
    """Largest value of each window of each channel."""
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), padding
    )


def average_pool(x: jax.Array, *, window: int, stride: int, padding: Any = "VALID") -> jax.Array:
    """Mean of each window of each channel; padding counts as zeros."""
    total = jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, window, window, 1), (1, stride, stride, 1), padding
    )
    return total / (window * window)


def batch_norm(x: jax.Array, p: Any, *, eps: float = 1e-5) -> jax.Array:
    """Normalize each channel over batch and space with the batch's own statistics, in float32.

    Training mode; the running averages, which are no parameters, are left out.
    """
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=(0, 1, 2))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=(0, 1, 2)) + eps)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def _classifier(x: jax.Array, layers: Any, labels: jax.Array) -> jax.Array:
    """Fully connected layers with ReLU between them, the first from [b, h, w, c]; then the loss.

    The first contracts height, width and channel as they are: flattening would merge dims that may be split.
    """
    first, *rest = layers
    x = jnp.einsum("bhwc,hwcn->bn", x, first["w"].astype(x.dtype)) + first["b"].astype(x.dtype)
    for p in rest[:-1]:
        x = jax.nn.relu(x)
        x = x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)
    last = rest[-1]
    logits = jnp.matmul(jax.nn.relu(x), last["w"].astype(x.dtype), preferred_element_type=jnp.float32)
    return cross_entropy(logits + last["b"], labels)


def _classifier_leaves(h: int, w: int, c: int, hidden: int, classes: int) -> list[Any]:
    return [
        {"w": weight(h, w, c, hidden, fan_in=h * w * c, gain=2), "b": constant(hidden)},
        {"w": weight(hidden, hidden, fan_in=hidden, gain=2), "b": constant(hidden)},
        {"w": normal(hidden, classes), "b": constant(classes)},
    ]


def _conv_leaves(window: int, c: int, n: int) -> Any:
    return {"w": weight(window, window, c, n, fan_in=window * window * c), "b": constant(n)}


def _images(batch: int, image: int, classes: int) -> Any:
    return {"images": normal(batch, image, image, 3, std=1.0), "labels": integers(batch, below=classes)}


def alexnet(
    *, batch: int, image: int, classes: int, dtype: str, channels: tuple[int, ...], hidden: int
) -> Built:
    """AlexNet in one column: five convolutions, three 3/2 max-pools, three fully connected layers."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        c1, c2, c3, c4, c5 = params["conv"]
        x = batch["images"].astype(dtype)
        x = jax.nn.relu(conv(x, c1["w"], stride=4, padding="VALID") + c1["b"].astype(dtype))
        x = max_pool(x, window=3, stride=2)
        x = jax.nn.relu(conv(x, c2["w"]) + c2["b"].astype(dtype))
        x = max_pool(x, window=3, stride=2)
        for p in (c3, c4, c5):
            x = jax.nn.relu(conv(x, p["w"]) + p["b"].astype(dtype))
        x = max_pool(x, window=3, stride=2)
        return _classifier(x, params["fc"], batch["labels"])

    size = (image - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    widths = (3, *channels)
    params = {
        "conv": [
            _conv_leaves(window, c, n)
            for window, c, n in zip((11, 5, 3, 3, 3), widths, channels, strict=False)
        ],
        "fc": _classifier_leaves(size, size, channels[-1], hidden, classes),
    }
    return Built(loss_fn=loss_fn, params=params, batch=_images(batch, image, classes))
