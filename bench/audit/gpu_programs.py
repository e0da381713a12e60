"""Models of Flax NNX as people write them, for ``bench.audit.gpu``: plain lists of layers, Flax's own attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

__all__ = ["decoder", "vision"]

WIDTH, HEADS, HIDDEN, LAYERS = 1024, 16, 4096, 4


class _NnxBlock(nnx.Module):
    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.before, self.between = (nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, dropout_rate=0.0, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = x + self.dropout(self.attention(self.before(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.between(x)))))


class _NnxDecoder(nnx.Module):
    def __init__(self, vocab: int, seq: int, dropout: float, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (seq, WIDTH)) * 0.02)
        self.blocks = nnx.List([_NnxBlock(dropout, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocab, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]].astype(jnp.bfloat16)
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).astype(jnp.float32)


class _NnxVision(nnx.Module):
    def __init__(self, classes: int, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, WIDTH, (16, 16), strides=(16, 16), dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([_NnxBlock(0.1, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, classes, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for block in self.blocks:
            x = block(x, None)
        return self.head(self.norm(x).mean(axis=1)).astype(jnp.float32)


def decoder() -> tuple[Any, ...]:
    """A language model with dropout, a causal mask and weighted losses."""
    vocab, batch, seq = 32000, 32, 1024

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    given = {
        "inputs": tokens,
        "targets": tokens,
        "weights": jax.ShapeDtypeStruct((batch, seq), jnp.float32),
    }
    return loss_fn, nnx.eval_shape(lambda: _NnxDecoder(vocab, seq, 0.1, nnx.Rngs(0))), given


def vision() -> tuple[Any, ...]:
    """A vision transformer with dropout."""

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    given = {
        "x": jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.bfloat16),
        "y": jax.ShapeDtypeStruct((128,), jnp.int32),
    }
    return loss_fn, nnx.eval_shape(lambda: _NnxVision(1000, nnx.Rngs(0))), given
