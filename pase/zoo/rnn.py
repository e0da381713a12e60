"""A recurrent language model: an embedding, LSTM layers, and a classifier over the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.zoo.layers import Built, Weights, bias, cross_entropy, integers, lookup, normal, weight

__all__ = ["lstm", "rnnlm"]


def lstm(x: jax.Array, p: Weights) -> jax.Array:
    """Hidden states [s, b, h] of an LSTM over inputs [s, b, d], from zero states.

    The four gates (input, forget, cell, output) are a separate dim. The product with the inputs does not depend on the
    state, so it is one matrix product for all steps, outside of the loop.
    """
    gates = jnp.einsum("sbd,dgh->sbgh", x, p["wx"].astype(x.dtype)) + p["b"].astype(x.dtype)
    recurrent = p["wh"].astype(x.dtype)

    def step(state: Weights, gates_x: jax.Array) -> Weights:
        h, c = state
        gates = gates_x + jnp.einsum("bh,hgk->bgk", h, recurrent)
        enter, forget, cell, leave = (gates[:, n] for n in range(4))
        c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(enter) * jnp.tanh(cell)
        h = jax.nn.sigmoid(leave) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[1], recurrent.shape[0]), x.dtype)
    return jax.lax.scan(step, (zero, zero), gates)[1]


def rnnlm(*, batch: int, seq: int, layers: int, vocab: int, dtype: str, d: int, hidden: int) -> Built:
    """A language model with ``layers`` LSTM layers of ``hidden`` units and embeddings of width d."""

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        x = lookup(
            params["embedding"], batch["tokens"].T, dtype
        )  # time is the first dim, for the loop over it
        for p in params["lstm"]:
            x = lstm(x, p)
        p = params["classifier"]
        weights = p["w"].astype(dtype)
        logits = jnp.einsum("sbh,hv->bsv", x, weights, preferred_element_type=jnp.float32) + p["b"]
        return cross_entropy(logits, batch["labels"])

    params = {
        "embedding": normal(vocab, d, std=1.0),
        "lstm": [
            {
                "wx": weight(n, 4, hidden, fan_in=n),
                "wh": weight(hidden, 4, hidden, fan_in=hidden),
                "b": bias(4, hidden),
            }
            for n in [d] + [hidden] * (layers - 1)
        ],
        "classifier": {"w": normal(hidden, vocab), "b": bias(vocab)},
    }
    tokens = {"tokens": integers(batch, seq, below=vocab), "labels": integers(batch, seq, below=vocab)}
    return Built(loss_fn=loss_fn, params=params, batch=tokens)
