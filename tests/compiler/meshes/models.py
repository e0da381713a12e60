"""Models for which a memory limit is tested."""

import jax
import jax.numpy as jnp

MODEL = "zoo:gpt2?layers=2&batch=32&vocab=4096"
S = jax.ShapeDtypeStruct
WIDE = (S((8, 16), "float32"), S((4096, 8), "float32"))
"""Parameters of 512 bytes and a large batch, so that activations take most of the memory."""


def wide(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)
