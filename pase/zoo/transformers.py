"""Transformers with one kind of block: GPT.

Attention weights keep heads as a dim of their own ([d, heads, head_dim]), so that a split over heads is an
annotation and no reshape stands in its way. Parameters are float32 and cast where they are used.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pase.zoo.layers import (
    Built,
    constant,
    cross_entropy,
    integers,
    layer_norm,
    lookup,
    normal,
    repeat,
    run_layers,
    weight,
)

__all__ = ["attend", "gpt", "norm_leaves"]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """softmax(q kᵀ / √head_dim) v for q [b, q, h, k] and k, v [b, s, h, k]; the softmax is in float32."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(causal_mask(scores.shape[-2:]), scores, -1e30)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


def causal_mask(shape: tuple[int, ...]) -> jax.Array:
    """[queries, keys]: true where the key does not lie in the query's future."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) >= jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def attention(x: jax.Array, p: Any, *, causal: bool) -> jax.Array:
    """Multi-head self-attention with biases."""
    q = jnp.einsum("bsd,dhk->bshk", x, p["wq"].astype(x.dtype)) + p["bq"].astype(x.dtype)
    k = jnp.einsum("bsd,dhk->bshk", x, p["wk"].astype(x.dtype)) + p["bk"].astype(x.dtype)
    v = jnp.einsum("bsd,dhk->bshk", x, p["wv"].astype(x.dtype)) + p["bv"].astype(x.dtype)
    y = attend(q, k, v, causal=causal)
    return jnp.einsum("bshk,hkd->bsd", y, p["wo"].astype(x.dtype)) + p["bo"].astype(x.dtype)


def feed_forward(x: jax.Array, p: Any, *, approximate: bool) -> jax.Array:
    """Two matrices with a GELU between them (by tanh where ``approximate``)."""
    h = jnp.einsum("bsd,df->bsf", x, p["w1"].astype(x.dtype)) + p["b1"].astype(x.dtype)
    h = jax.nn.gelu(h, approximate=approximate)
    return jnp.einsum("bsf,fd->bsd", h, p["w2"].astype(x.dtype)) + p["b2"].astype(x.dtype)


def norm_leaves(d: int) -> Any:
    return {"scale": constant(d, value=1.0), "bias": constant(d)}


def block_leaves(d: int, heads: int, ff: int) -> Any:
    """One block: attention and feed-forward with biases, a layer norm each."""
    if d % heads:
        raise ValueError(f"{heads} heads do not divide d = {d}")
    k = d // heads
    return {
        "attention": {
            **{f"w{n}": weight(d, heads, k, fan_in=d) for n in "qkv"},
            **{f"b{n}": constant(heads, k) for n in "qkv"},
            "wo": weight(heads, k, d, fan_in=d),
            "bo": constant(d),
        },
        "ff": {
            "w1": weight(d, ff, fan_in=d),
            "b1": constant(ff),
            "w2": weight(ff, d, fan_in=ff),
            "b2": constant(d),
        },
        "norm1": norm_leaves(d),
        "norm2": norm_leaves(d),
    }


def gpt(
    *,
    batch: int,
    seq: int,
    layers: int,
    vocab: int,
    dtype: str,
    scan: int,
    remat: int,
    d: int,
    heads: int,
    context: int,
) -> Built:
    """GPT-2: pre-norm causal blocks, learned positions, the output tied to the token embedding.

    ``context`` positions are stored; a longer ``seq`` stores as many as it needs.
    """

    def block(x: jax.Array, p: Any) -> jax.Array:
        x = x + attention(layer_norm(x, p["norm1"]), p["attention"], causal=True)
        return x + feed_forward(layer_norm(x, p["norm2"]), p["ff"], approximate=True)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        x = lookup(params["wte"], tokens, dtype) + params["wpe"][: tokens.shape[1]].astype(dtype)
        x = run_layers(block, x, params["blocks"], scan=scan, remat=remat)
        x = layer_norm(x, params["norm"])
        logits = jnp.einsum("bsd,vd->bsv", x, params["wte"].astype(dtype), preferred_element_type=jnp.float32)
        return cross_entropy(logits, batch["labels"])

    params = {
        "wte": normal(vocab, d),
        "wpe": normal(max(context, seq), d),
        "blocks": repeat(block_leaves(d, heads, 4 * d), layers, scan=scan),
        "norm": norm_leaves(d),
    }
    tokens = {"tokens": integers(batch, seq, below=vocab), "labels": integers(batch, seq, below=vocab)}
    return Built(loss_fn=loss_fn, params=params, batch=tokens)
