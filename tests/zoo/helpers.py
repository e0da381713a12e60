"""What the zoo's tests share: the reduced models by what they are, compiled fast, each once."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pase import zoo


def _reduced_key(name: str) -> str:
    found = zoo.entry(name)
    left = {key: value for key, value in found.architecture.items() if key not in found.reduced}
    return f"{found.builder} {sorted(found.reduced.items())} {sorted(left.items())}"


# Sizes of one family shrink to the same reduced model; one of them stands for all.
DISTINCT = tuple({_reduced_key(name): name for name in reversed(zoo.names())}.values())[::-1]


def compiled(function: Any, *arguments: Any) -> Any:
    """The jitted function for these arguments, compiled."""
    return jax.jit(function).lower(*arguments).compile()


@functools.cache
def reduced_step(name: str) -> tuple[Any, Any, Any]:
    """(params, batch, step) of a reduced model, where step(params, batch) gives loss and gradients."""
    model = zoo.reduced(name)
    params, batch = model.init(0)
    return params, batch, compiled(jax.value_and_grad(model.loss_fn), params, batch)
