"""flax.nnx modules as they are: counters, keys and statistics among their leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.programs.catalog import LibraryProgram, normal, program


def _program(make: Callable[[Any], Any], *inputs: Any) -> LibraryProgram:
    """All of the module's state as parameters, as nnx.split gives it."""
    import jax.numpy as jnp
    from flax import nnx

    graphdef, state = nnx.split(make(nnx.Rngs(0)))

    def loss(state: Any, *inputs: Any) -> Any:
        model = nnx.merge(graphdef, state, copy=True)
        return jnp.mean(model(*inputs) ** 2)

    return loss, state, *inputs


@program
def mlp_with_dropout() -> LibraryProgram:
    from flax import nnx

    return _program(
        lambda r: nnx.Sequential(
            nnx.Linear(24, 64, rngs=r), nnx.relu, nnx.Dropout(0.3, rngs=r), nnx.Linear(64, 8, rngs=r)
        ),
        normal(16, 24),
    )


@program
def batch_norm() -> LibraryProgram:
    from flax import nnx

    return _program(
        lambda r: nnx.Sequential(nnx.Linear(24, 32, rngs=r), nnx.BatchNorm(32, rngs=r), nnx.relu),
        normal(16, 24),
    )


@program
def attention() -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: nnx.MultiHeadAttention(4, 32, decode=False, rngs=r), normal(8, 12, 32))


@program
def lora() -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: nnx.LoRALinear(24, 32, lora_rank=4, rngs=r), normal(16, 24))


@program
def rnn() -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: nnx.RNN(nnx.LSTMCell(24, 32, rngs=r)), normal(8, 12, 24))
