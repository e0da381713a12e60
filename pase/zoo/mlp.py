"""A multilayer perceptron. It is the zoo's smallest model, so read it first."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp

from pase.zoo.layers import Built, Weights, bias, cross_entropy, integers, normal, weight

__all__ = ["mlp"]


def mlp(*, batch: int, layers: int, features: int, hidden: int, classes: int, dtype: str) -> Built:
    """A perceptron with ``layers`` hidden ReLU layers between inputs [batch, features] and a classifier."""

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        x = batch["inputs"].astype(dtype)
        for p in params["hidden"]:
            x = jax.nn.relu(x @ p["w"].astype(dtype) + p["b"].astype(dtype))
        p = params["classifier"]
        logits = jnp.matmul(x, p["w"].astype(dtype), preferred_element_type=jnp.float32) + p["b"]
        return cross_entropy(logits, batch["labels"])

    widths = [features] + [hidden] * layers
    params = {
        "hidden": [{"w": weight(n, m, fan_in=n, gain=2), "b": bias(m)} for n, m in pairwise(widths)],
        "classifier": {"w": normal(hidden, classes), "b": bias(classes)},
    }
    inputs = {"inputs": normal(batch, features, std=1.0), "labels": integers(batch, below=classes)}
    return Built(loss_fn=loss_fn, params=params, batch=inputs)
