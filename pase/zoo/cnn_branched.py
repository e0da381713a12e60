"""Convolutional networks with branches that are concatenated: Inception V3, DenseNet-121."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.zoo.convolution import (
    Padding,
    average_over_space,
    average_pool,
    batch_norm,
    conv,
    images,
    linear_loss,
    max_pool,
    unit,
    unit_leaves,
)
from pase.zoo.layers import Built, Weights, bias, normal, ones, weight

__all__ = ["densenet", "inception"]


def _relu_unit(x: jax.Array, p: Weights, *, stride: int = 1, padding: Padding = "SAME") -> jax.Array:
    return jax.nn.relu(unit(x, p, stride=stride, padding=padding, eps=1e-3))


def _chain(x: jax.Array, units: Weights) -> jax.Array:
    for p in units:
        x = _relu_unit(x, p)
    return x


def _shrink(x: jax.Array, units: Weights) -> jax.Array:
    """A chain whose last convolution halves the image."""
    return _relu_unit(_chain(x, units[:-1]), units[-1], stride=2, padding="VALID")


def _pooled(x: jax.Array, units: Weights) -> jax.Array:
    return _chain(average_pool(x, window=3, stride=1, padding="SAME"), units)


def _halved(x: jax.Array) -> jax.Array:
    return max_pool(x, window=3, stride=2)


def _fork(x: jax.Array, units: Weights) -> jax.Array:
    """A chain whose last two convolutions run in parallel."""
    x = _chain(x, units[:-2])
    return jnp.concatenate([_relu_unit(x, p) for p in units[-2:]], axis=-1)


# The modules of figures 5, 6 and 7 of the paper, and the two grid reductions between them.


def _mixed_5(x: jax.Array, p: Weights) -> jax.Array:
    branches = [_chain(x, p["1x1"]), _chain(x, p["5x5"]), _chain(x, p["3x3"]), _pooled(x, p["pool"])]
    return jnp.concatenate(branches, axis=-1)


def _reduce_6(x: jax.Array, p: Weights) -> jax.Array:
    return jnp.concatenate([_shrink(x, p["3x3"]), _shrink(x, p["3x3 twice"]), _halved(x)], axis=-1)


def _mixed_6(x: jax.Array, p: Weights) -> jax.Array:
    branches = [_chain(x, p["1x1"]), _chain(x, p["7x7"]), _chain(x, p["7x7 twice"]), _pooled(x, p["pool"])]
    return jnp.concatenate(branches, axis=-1)


def _reduce_7(x: jax.Array, p: Weights) -> jax.Array:
    return jnp.concatenate([_shrink(x, p["3x3"]), _shrink(x, p["7x7"]), _halved(x)], axis=-1)


def _mixed_7(x: jax.Array, p: Weights) -> jax.Array:
    branches = [_chain(x, p["1x1"]), _fork(x, p["3x3"]), _fork(x, p["3x3 twice"]), _pooled(x, p["pool"])]
    return jnp.concatenate(branches, axis=-1)


def inception(
    *, batch: int, image: int, classes: int, dtype: str, narrow: int, blocks: tuple[int, int, int]
) -> Built:
    """Inception V3 without its auxiliary classifier.

    ``blocks`` has the number of modules at each of the three grid sizes (3, 4, 2 as published). All channels are
    divided by ``narrow`` (1 as published) and rounded up to a multiple of 8.
    """

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        a, b, c, d, e = params["stem"]
        x = batch["images"].astype(dtype)
        x = _relu_unit(x, a, stride=2, padding="VALID")
        x = _relu_unit(x, b, padding="VALID")
        x = _halved(_relu_unit(x, c))
        x = _halved(_relu_unit(_relu_unit(x, d), e, padding="VALID"))
        for p in params["mixed5"]:
            x = _mixed_5(x, p)
        x = _reduce_6(x, params["reduce6"])
        for p in params["mixed6"]:
            x = _mixed_6(x, p)
        x = _reduce_7(x, params["reduce7"])
        for p in params["mixed7"]:
            x = _mixed_7(x, p)
        return linear_loss(average_over_space(x), params["classifier"], batch["labels"])

    def n(channels: int) -> int:
        return -(-channels // (8 * narrow)) * 8

    def units(c: int, *kernels: tuple[int, int, int]) -> list[Weights]:
        """Leaves of a chain of (height, width, channels) convolutions from c channels."""
        leaves = []
        for kh, kw, out in kernels:
            leaves.append(unit_leaves(kh, kw, c, n(out)))
            c = n(out)
        return leaves

    def fork(c: int, *kernels: tuple[int, int, int]) -> list[Weights]:
        """Leaves of a chain that ends with parallel (1, 3) and (3, 1) convolutions of 384 channels."""
        middle = n(kernels[-1][2])
        return [
            *units(c, *kernels),
            unit_leaves(1, 3, middle, n(384)),
            unit_leaves(3, 1, middle, n(384)),
        ]

    def mixed_5(c: int, pool: int) -> Weights:
        return {
            "1x1": units(c, (1, 1, 64)),
            "5x5": units(c, (1, 1, 48), (5, 5, 64)),
            "3x3": units(c, (1, 1, 64), (3, 3, 96), (3, 3, 96)),
            "pool": units(c, (1, 1, pool)),
        }

    def mixed_6(c: int, m: int) -> Weights:
        return {
            "1x1": units(c, (1, 1, 192)),
            "7x7": units(c, (1, 1, m), (1, 7, m), (7, 1, 192)),
            "7x7 twice": units(c, (1, 1, m), (7, 1, m), (1, 7, m), (7, 1, m), (1, 7, 192)),
            "pool": units(c, (1, 1, 192)),
        }

    def mixed_7(c: int) -> Weights:
        return {
            "1x1": units(c, (1, 1, 320)),
            "3x3": fork(c, (1, 1, 384)),
            "3x3 twice": fork(c, (1, 1, 448), (3, 3, 384)),
            "pool": units(c, (1, 1, 192)),
        }

    pools = (32, 64, 64)[: blocks[0]]
    middles = (128, 160, 160, 192)[: blocks[1]]
    c5 = [n(192), *(n(64) + n(64) + n(96) + n(pool) for pool in pools)]
    c6 = n(384) + n(96) + c5[-1]
    c6_mixed = 4 * n(192)
    c7 = n(320) + n(192) + c6_mixed
    c7_mixed = n(320) + 4 * n(384) + n(192)
    params = {
        "stem": [
            *units(3, (3, 3, 32), (3, 3, 32), (3, 3, 64)),
            *units(n(64), (1, 1, 80), (3, 3, 192)),
        ],
        "mixed5": [mixed_5(c, pool) for c, pool in zip(c5[:-1], pools, strict=True)],
        "reduce6": {
            "3x3": units(c5[-1], (3, 3, 384)),
            "3x3 twice": units(c5[-1], (1, 1, 64), (3, 3, 96), (3, 3, 96)),
        },
        "mixed6": [mixed_6(c6_mixed if i else c6, m) for i, m in enumerate(middles)],
        "reduce7": {
            "3x3": units(c6_mixed, (1, 1, 192), (3, 3, 320)),
            "7x7": units(c6_mixed, (1, 1, 192), (1, 7, 192), (7, 1, 192), (3, 3, 192)),
        },
        "mixed7": [mixed_7(c7_mixed if i else c7) for i in range(blocks[2])],
        "classifier": {"w": normal(c7_mixed, classes), "b": bias(classes)},
    }
    return Built(loss_fn=loss_fn, params=params, batch=images(batch, image, classes))


def densenet(
    *,
    batch: int,
    image: int,
    classes: int,
    dtype: str,
    stem: int,
    growth: int,
    blocks: tuple[int, ...],
) -> Built:
    """DenseNet-BC: in a block, each layer appends ``growth`` channels to its input.

    ``blocks`` has the number of layers of each block. A transition between blocks halves channels and image.
    """

    def norm_relu(x: jax.Array, p: Weights) -> jax.Array:
        return jax.nn.relu(batch_norm(x, p))

    def layer(x: jax.Array, p: Weights) -> jax.Array:
        y = conv(norm_relu(x, p["norm1"]), p["w1"])
        y = conv(norm_relu(y, p["norm2"]), p["w2"])
        return jnp.concatenate([x, y], axis=-1)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        x = batch["images"].astype(dtype)
        x = jax.nn.relu(unit(x, params["stem"], stride=2, padding=((3, 3), (3, 3))))
        x = max_pool(x, window=3, stride=2, padding=((0, 0), (1, 1), (1, 1), (0, 0)))
        for block in params["blocks"]:
            for p in block["layers"]:
                x = layer(x, p)
            if "transition" in block:
                p = block["transition"]
                x = average_pool(conv(norm_relu(x, p["norm"]), p["w"]), window=2, stride=2)
        x = average_over_space(norm_relu(x, params["norm"]))
        return linear_loss(x, params["classifier"], batch["labels"])

    def norm_leaves(c: int) -> Weights:
        return {"scale": ones(c), "bias": bias(c)}

    def layer_leaves(c: int) -> Weights:
        return {
            "norm1": norm_leaves(c),
            "w1": weight(1, 1, c, 4 * growth, fan_in=c, gain=2),
            "norm2": norm_leaves(4 * growth),
            "w2": weight(3, 3, 4 * growth, growth, fan_in=36 * growth, gain=2),
        }

    c, tree = stem, []
    for number, depth in enumerate(blocks, start=1):
        block: dict[str, Weights] = {"layers": [layer_leaves(c + i * growth) for i in range(depth)]}
        c += depth * growth
        if number < len(blocks):
            block["transition"] = {"norm": norm_leaves(c), "w": weight(1, 1, c, c // 2, fan_in=c, gain=2)}
            c //= 2
        tree.append(block)
    params = {
        "stem": unit_leaves(7, 7, 3, stem),
        "blocks": tree,
        "norm": norm_leaves(c),
        "classifier": {"w": normal(c, classes), "b": bias(classes)},
    }
    return Built(loss_fn=loss_fn, params=params, batch=images(batch, image, classes))
