"""The GPT that Megatron-LM trains, as a loss function in JAX, for the benches of its published times.

Unlike the zoo's GPT, it has parameters and activations in float16 or bfloat16, queries, keys and values from one
product, scores in the activations' dtype with the softmax computed in float32 (Megatron's fused kernel), dropout on the
attention and on both residuals, and untied biases everywhere. Shoeybi et al. 2019; Narayanan et al. 2021.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pase.zoo.attention import causal_mask, fused_attend
from pase.zoo.layers import cross_entropy, lookup

__all__ = ["gpt", "padded_vocabulary"]

_DROPOUT = 0.1


def padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """Returns the size padded to a multiple of 128 x tensor parallelism, as Megatron does.

    >>> padded_vocabulary(50257, 8)
    51200
    """
    multiple = 128 * tensor_parallel
    return -(-vocabulary // multiple) * multiple


def gpt(
    *,
    batch: int,
    seq: int,
    layers: int,
    d: int,
    heads: int,
    vocab: int,
    dtype: str = "float16",
    recompute: str = "none",
    attention: str = "unfused",
    drops: bool = True,
    seeded: bool = False,
) -> tuple[Any, Any, Any]:
    """Returns (loss_fn, params, batch) with shapes for arrays.

    recompute: "none"; "full" (each layer from its input); "selective" (scores, softmax and dropout of the
    attention only: Korthikanti et al. 2022).
    """
    k = d // heads
    width = jnp.dtype(dtype)

    def layer_norm(x: jax.Array, p: Any) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return y.astype(width) * p["scale"] + p["bias"]

    def dropout(x: jax.Array, key: jax.Array) -> jax.Array:
        if not drops:
            return x
        return jnp.where(jax.random.bernoulli(key, 1 - _DROPOUT, x.shape), x, jnp.zeros_like(x))

    def bias_dropout_add(x: jax.Array, bias: jax.Array, residual: jax.Array, key: jax.Array) -> jax.Array:
        if not drops:
            return residual + x + bias
        kept = jax.random.bernoulli(key, 1 - _DROPOUT, x.shape)
        return residual + jnp.where(kept, x + bias, jnp.zeros_like(x))

    def bias_gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.gelu(x + bias)

    def softmax(scores: jax.Array) -> jax.Array:
        scores = jnp.where(causal_mask(scores.shape[-2:]), scores.astype(jnp.float32) * k**-0.5, -1e4)
        return jax.nn.softmax(scores, axis=-1).astype(width)

    def core(q: jax.Array, key: jax.Array, value: jax.Array, rng: jax.Array) -> jax.Array:
        scores = softmax(jnp.einsum("bqhk,bshk->bhqs", q, key))
        return jnp.einsum("bhqs,bshk->bqhk", dropout(scores, rng), value)

    attend = jax.checkpoint(core) if recompute == "selective" else core

    def block(x: jax.Array, p: Any) -> jax.Array:
        y = layer_norm(x, p["norm1"])
        q, key, value = (jnp.einsum("bsd,dhk->bshk", y, p[f"w{n}"]) + p[f"b{n}"] for n in "qkv")
        if attention == "fused":
            made = fused_attend(q, key, value, causal=True)
        else:
            made = attend(q, key, value, p["rng"][0])
        y = jnp.einsum("bshk,hkd->bsd", made, p["wo"])
        x = bias_dropout_add(y, p["bo"], x, p["rng"][1])
        y = jnp.einsum("bsd,df->bsf", layer_norm(x, p["norm2"]), p["w1"])
        y = jnp.einsum("bsf,fd->bsd", bias_gelu(y, p["b1"]), p["w2"])
        return bias_dropout_add(y, p["b2"], x, p["rng"][2])

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = lookup(params["wte"], batch["tokens"], dtype) + params["wpe"]
        layer = jax.checkpoint(block, prevent_cse=False) if recompute == "full" else block
        seed = jax.random.wrap_key_data(batch["seed"]) if seeded else jax.random.key(0)
        keys = jax.random.split(seed, (layers, 3))
        x = jax.lax.scan(lambda c, p: (layer(c, p[0] | {"rng": p[1]}), None), x, (params["blocks"], keys))[0]
        logits = jnp.einsum("bsd,vd->bsv", layer_norm(x, params["norm"]), params["wte"])
        return cross_entropy(logits.astype(jnp.float32), batch["labels"])

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, width)

    def norm(*stack: int) -> Any:
        return {"scale": leaf(*stack, d), "bias": leaf(*stack, d)}

    n = layers
    blocks = {
        **{f"w{x}": leaf(n, d, heads, k) for x in "qkv"},
        **{f"b{x}": leaf(n, heads, k) for x in "qkv"},
        "wo": leaf(n, heads, k, d),
        "bo": leaf(n, d),
        "w1": leaf(n, d, 4 * d),
        "b1": leaf(n, 4 * d),
        "w2": leaf(n, 4 * d, d),
        "b2": leaf(n, d),
        "norm1": norm(n),
        "norm2": norm(n),
    }
    params = {"wte": leaf(vocab, d), "wpe": leaf(seq, d), "blocks": blocks, "norm": norm()}
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    seed = {"seed": jax.ShapeDtypeStruct((2,), jnp.uint32)} if seeded else {}
    return loss_fn, params, {"tokens": tokens, "labels": tokens, **seed}
