"""A composed program's parameters as a module of Flax NNX, beside modules that the program holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["ComposedModel"]


class Fixed(nnx.Variable[Any]):
    """An array among the parameters that is not trained."""


class ComposedModel(nnx.Module):
    """Arrays of floats are nnx.Param, others Variables of their own kind; what is no array is static."""

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
        """The tree of parameters."""
        return jax.tree.unflatten(
            self.form, [getattr(self, f"p{i}")[...] if x is None else x for i, x in enumerate(self.static)]
        )
