"""A composed program as a module of Flax NNX, and modules that such a program contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["ComposedModel", "with_streams"]


class Fixed(nnx.Variable[Any]):
    """An array among the parameters that is not trained."""


class ComposedModel(nnx.Module):
    """A model whose arrays of floats are nnx.Param, other arrays their own kind of Variable, and the rest static."""

    def __init__(self, params: Any, modules: Mapping[str, Any]) -> None:
        leaves, self.form = jax.tree.flatten(params)
        self.static: tuple[Any, ...] = tuple(
            None if isinstance(x, np.ndarray | np.generic | jax.Array) else x for x in leaves
        )
        for i, x in enumerate(leaves):
            if self.static[i] is None:
                kind = nnx.Param if jnp.issubdtype(x.dtype, jnp.inexact) else Fixed
                setattr(self, f"p{i}", kind(jnp.asarray(x)))
        for name, module in modules.items():
            setattr(self, name, module)

    def params(self) -> Any:
        """Returns the tree of parameters."""
        return jax.tree.unflatten(
            self.form, [getattr(self, f"p{i}")[...] if x is None else x for i, x in enumerate(self.static)]
        )


class Counted(nnx.Variable[Any]):
    """A counter with a custom kind of Variable."""


class CountingBlock(nnx.Module):
    """Dropout after a product, and a counter."""

    def __init__(self, d: int, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(d, d, rngs=rngs, param_dtype=jnp.float64)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.turns = Counted(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.turns[...] += 1
        return x + self.dropout(jnp.tanh(self.inner(x))) / self.turns[...]


def with_streams(kind: str, d: int, seed: int) -> Any:
    """Returns a module of Flax NNX whose random streams, counters or vectors change in each call."""
    rngs = nnx.Rngs(seed, dropout=seed + 1)
    wide: dict[str, Any] = {"rngs": rngs, "param_dtype": jnp.float64}
    if kind == "dropout":
        return nnx.Sequential(nnx.Linear(d, d, **wide), nnx.gelu, nnx.Dropout(0.2, rngs=rngs))
    if kind == "attention":
        return nnx.MultiHeadAttention(2, d, decode=False, dropout_rate=0.2, deterministic=False, **wide)
    if kind == "spectral":
        return nnx.SpectralNorm(nnx.Linear(d, d, **wide), rngs=rngs)
    if kind == "rnn":
        return nnx.RNN(nnx.GRUCell(d, d, **wide), rngs=rngs)
    if kind == "lora":
        return nnx.LoRA(d, 2, d, **wide)
    if kind == "nested":
        one = CountingBlock(d, rngs)
        return nnx.Sequential(one, CountingBlock(d, rngs), one)  # the same module twice
    if kind == "scan":
        layers = nnx.vmap(lambda r: CountingBlock(d, r), in_axes=(0,), out_axes=0)
        return layers(rngs.fork(split=2))
    return CountingBlock(d, rngs)
