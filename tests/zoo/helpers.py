"""Shared by the zoo's tests: the reduced models, each compiled once, and compiled fast."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pase import zoo


def _reduced_key(name: str) -> str:
    found = zoo.entry(name)
    left = {key: value for key, value in found.architecture.items() if key not in found.reduced}
    return f"{found.builder} {sorted(found.reduced.items())} {sorted(left.items())}"


# All sizes of a family have the same reduced model, so only one of them is tested.
DISTINCT = tuple({_reduced_key(name): name for name in reversed(zoo.names())}.values())[::-1]


def compiled(function: Any, *arguments: Any) -> Any:
    """The function, compiled for these arguments."""
    return jax.jit(function).lower(*arguments).compile()


@functools.cache
def reduced_step(name: str) -> tuple[Any, Any, Any]:
    """(params, batch, step) of a reduced model, where step(params, batch) gives loss and gradients."""
    model = zoo.reduced(name)
    params, batch = model.init(0)
    return params, batch, compiled(jax.value_and_grad(model.loss_fn), params, batch)


RNG = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, dtype=np.float32))


def close(x: Any, y: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
