"""The encoder-decoder transformer of Vaswani et al. 2017."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pase.zoo.attention import attention as multi_head
from pase.zoo.attention import attention_leaves, feed_forward, feed_forward_leaves, norm_leaves, the_attend
from pase.zoo.layers import Built, Stack, Weights, cross_entropy, integers, layer_norm, normal

__all__ = ["positions", "seq2seq"]


def positions(seq: int, d: int) -> jax.Array:
    """[seq, d] sinusoids: sines in the first half of the width, cosines in the second."""
    half = jnp.arange(d // 2, dtype=jnp.float32)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * jnp.exp(half * (-math.log(10_000.0) / (d // 2)))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def seq2seq(*, batch: int, seq: int, vocab: int, heads: int, ff: int, **sizes: Any) -> Built:
    """A transformer with post-norm blocks, as many in the encoder as in the decoder. sizes: of the `Stack` of each.

    Both embeddings and the output share one table (section 3.4 of the paper).
    """
    stack = Stack(**sizes)
    d, attend = stack.d, the_attend(stack.attention)

    def encode(x: jax.Array, p: Weights) -> jax.Array:
        x = layer_norm(x + multi_head(x, x, p["attention"], attend), p["norm1"])
        return layer_norm(x + feed_forward(x, p["ff"], jax.nn.relu), p["norm2"])

    def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return stack.lookup(table, tokens) * math.sqrt(d) + positions(tokens.shape[1], d).astype(stack.dtype)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        table = params["table"]
        memory = stack.run(encode, embed(table, batch["source"]), params["encoder"])

        def decode(x: jax.Array, p: Weights) -> jax.Array:
            x = layer_norm(x + multi_head(x, x, p["attention"], attend, causal=True), p["norm1"])
            x = layer_norm(x + multi_head(x, memory, p["cross"], attend), p["norm3"])
            return layer_norm(x + feed_forward(x, p["ff"], jax.nn.relu), p["norm2"])

        x = stack.run(decode, embed(table, batch["target"]), params["decoder"])
        return cross_entropy(stack.scores(x, table), batch["labels"])

    encoder = {
        "attention": attention_leaves(d, heads, biases=False),
        "ff": feed_forward_leaves(d, ff),
        "norm1": norm_leaves(d),
        "norm2": norm_leaves(d),
    }
    decoder = encoder | {"cross": attention_leaves(d, heads, biases=False), "norm3": norm_leaves(d)}
    params = {
        "table": normal(vocab, d),
        "encoder": stack.leaves(encoder),
        "decoder": stack.leaves(decoder),
    }
    names = ("source", "target", "labels")
    return Built(
        loss_fn=loss_fn, params=params, batch={name: integers(batch, seq, below=vocab) for name in names}
    )
