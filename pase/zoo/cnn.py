"""Convolutional networks that are a single chain of layers: AlexNet, VGG-19, ResNet-101."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.zoo.convolution import average_over_space, conv, images, linear_loss, max_pool, unit, unit_leaves
from pase.zoo.layers import Built, Weights, bias, cross_entropy, normal, weight

__all__ = ["alexnet", "resnet", "vgg"]


def alexnet(
    *, batch: int, image: int, classes: int, dtype: str, channels: tuple[int, ...], hidden: int
) -> Built:
    """AlexNet in one column: five convolutions, three 3/2 max-pools, and three fully connected layers."""

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        c1, c2, c3, c4, c5 = params["conv"]
        x = batch["images"].astype(dtype)
        x = jax.nn.relu(conv(x, c1["w"], stride=4, padding="VALID") + c1["b"].astype(dtype))
        x = max_pool(x, window=3, stride=2)
        x = jax.nn.relu(conv(x, c2["w"]) + c2["b"].astype(dtype))
        x = max_pool(x, window=3, stride=2)
        for p in (c3, c4, c5):
            x = jax.nn.relu(conv(x, p["w"]) + p["b"].astype(dtype))
        x = max_pool(x, window=3, stride=2)
        return _fully_connected_loss(x, params["fc"], batch["labels"])

    size = (image - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    params = {
        "conv": [
            _conv_leaves(window, c, n)
            for window, c, n in zip((11, 5, 3, 3, 3), (3, *channels[:-1]), channels, strict=True)
        ],
        "fc": _fully_connected_leaves(size, channels[-1], hidden, classes),
    }
    return Built(loss_fn=loss_fn, params=params, batch=images(batch, image, classes))


def vgg(
    *,
    batch: int,
    image: int,
    classes: int,
    dtype: str,
    stages: tuple[tuple[int, int], ...],
    hidden: int,
) -> Built:
    """VGG: stages of (convolutions, channels), each followed by a 2/2 max-pool, and three fully connected layers."""

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        x = batch["images"].astype(dtype)
        for stage in params["stages"]:
            for p in stage:
                x = jax.nn.relu(conv(x, p["w"]) + p["b"].astype(dtype))
            x = max_pool(x, window=2, stride=2)
        return _fully_connected_loss(x, params["fc"], batch["labels"])

    inputs = (3, *(n for _, n in stages[:-1]))
    params = {
        "stages": [
            [_conv_leaves(3, c if i == 0 else n, n, gain=2 if i else 1) for i in range(depth)]
            for c, (depth, n) in zip(inputs, stages, strict=True)
        ],
        "fc": _fully_connected_leaves(image // 2 ** len(stages), stages[-1][1], hidden, classes),
    }
    return Built(loss_fn=loss_fn, params=params, batch=images(batch, image, classes))


def resnet(
    *,
    batch: int,
    image: int,
    classes: int,
    dtype: str,
    stem: int,
    stages: tuple[tuple[int, int], ...],
    expansion: int,
) -> Built:
    """ResNet with bottleneck blocks: stages of (blocks, width). Every stage except the first halves the image."""

    def bottleneck(x: jax.Array, p: Weights, stride: int) -> jax.Array:
        y = jax.nn.relu(unit(x, p["reduce"]))
        y = jax.nn.relu(unit(y, p["conv"], stride=stride, padding=((1, 1), (1, 1))))
        y = unit(y, p["expand"])
        shortcut = unit(x, p["shortcut"], stride=stride) if "shortcut" in p else x
        return jax.nn.relu(y + shortcut)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        x = batch["images"].astype(dtype)
        x = jax.nn.relu(unit(x, params["stem"], stride=2, padding=((3, 3), (3, 3))))
        x = max_pool(x, window=3, stride=2, padding=((0, 0), (1, 1), (1, 1), (0, 0)))
        for s, stage in enumerate(params["stages"]):
            for i, p in enumerate(stage):
                x = bottleneck(x, p, stride=2 if s > 0 and i == 0 else 1)
        return linear_loss(average_over_space(x), params["classifier"], batch["labels"])

    def bottleneck_leaves(c: int, width: int, shortcut: bool) -> Weights:
        leaves = {
            "reduce": unit_leaves(1, 1, c, width),
            "conv": unit_leaves(3, 3, width, width),
            "expand": unit_leaves(1, 1, width, width * expansion),
        }
        return leaves | ({"shortcut": unit_leaves(1, 1, c, width * expansion)} if shortcut else {})

    inputs = (stem, *(width * expansion for _, width in stages[:-1]))
    params = {
        "stem": unit_leaves(7, 7, 3, stem),
        "stages": [
            [bottleneck_leaves(width * expansion if i else c, width, i == 0) for i in range(blocks)]
            for c, (blocks, width) in zip(inputs, stages, strict=True)
        ],
        "classifier": {
            "w": normal(stages[-1][1] * expansion, classes),
            "b": bias(classes),
        },
    }
    return Built(loss_fn=loss_fn, params=params, batch=images(batch, image, classes))


def _fully_connected_loss(x: jax.Array, layers: Weights, labels: jax.Array) -> jax.Array:
    """Three fully connected layers from x [b, h, w, c], and the loss.

    The first one contracts height, width and channel as separate dims, because flattening would merge dims that may be
    split.
    """
    first, second, last = layers
    x = jax.nn.relu(jnp.einsum("bhwc,hwcn->bn", x, first["w"].astype(x.dtype)) + first["b"].astype(x.dtype))
    x = jax.nn.relu(x @ second["w"].astype(x.dtype) + second["b"].astype(x.dtype))
    logits = jnp.matmul(x, last["w"].astype(x.dtype), preferred_element_type=jnp.float32) + last["b"]
    return cross_entropy(logits, labels)


def _fully_connected_leaves(size: int, c: int, hidden: int, classes: int) -> list[Weights]:
    return [
        {"w": weight(size, size, c, hidden, fan_in=size * size * c, gain=2), "b": bias(hidden)},
        {"w": weight(hidden, hidden, fan_in=hidden, gain=2), "b": bias(hidden)},
        {"w": normal(hidden, classes), "b": bias(classes)},
    ]


def _conv_leaves(window: int, c: int, n: int, gain: float = 1.0) -> Weights:
    # Gain 1 after a max-pool, because taking maxima raises the variance by itself, and for the first layer, which no
    # ReLU precedes.
    return {"w": weight(window, window, c, n, fan_in=window * window * c, gain=gain), "b": bias(n)}
