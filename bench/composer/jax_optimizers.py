"""Optimizers of optax as people combine them. Those that divide by |g| add 1e-3 to it, so that rounding stays small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

__all__ = ["OPTIMIZERS"]

EPS = 1e-3


def _matrices(params: Any) -> Any:
    """Returns for each parameter whether it has at least two dims, and therefore weight decay."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def _warm(step: Any) -> Any:
    return 1e-2 / (1 + step)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2, eps=EPS),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(_warm, eps=EPS, weight_decay=0.1, mask=_matrices),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2, eps=EPS)),
    "lamb": lambda: optax.lamb(1e-2, eps=EPS, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, eps=EPS, min_dim_size_to_factor=4),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=EPS, momentum=0.5, centered=True),
    "every_second": lambda: optax.MultiSteps(optax.adam(1e-2, eps=EPS), every_k_schedule=2),
    "partitioned": lambda: optax.partition(
        {"matrix": optax.adam(1e-2, eps=EPS), "vector": optax.sgd(0.05)}, _labels
    ),
    "unit_clipped": lambda: optax.chain(
        optax.adaptive_grad_clip(0.1, eps=EPS), optax.sgd(0.05, momentum=0.9)
    ),
    "noisy": lambda: optax.chain(optax.add_noise(0.01, 0.5, 3), optax.sgd(0.05)),
    "muon": lambda: optax.contrib.muon(1e-2, eps=EPS, adam_weight_decay=0.1),
}
