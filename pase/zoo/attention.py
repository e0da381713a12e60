"""Multi-head attention and feed-forward layers of the transformers of 2017 to 2020.

Attention weights have a separate dim for heads ([d, heads, head_dim]), so that a split over heads is an annotation and
needs no reshape. Parameters are float32 and are cast where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pase.errors import PaseError
from pase.zoo.layers import Weights, bias, ones, weight

__all__ = [
    "Attend",
    "attend",
    "attention",
    "attention_leaves",
    "block_leaves",
    "causal_mask",
    "feed_forward",
    "feed_forward_leaves",
    "fused_attend",
    "norm_leaves",
    "the_attend",
]

Attend = Callable[..., jax.Array]
"""(q, k, v, *, causal, mask) -> y: queries [b, q, heads, k]; keys and values [b, s, kv heads, k]; y like q. mask: true
for the keys to attend to, broadcastable to [b, heads, q, s]; None for all keys."""


def attention(
    x: jax.Array, memory: jax.Array, p: Weights, attend: Attend, *, causal: bool = False
) -> jax.Array:
    """Attention with queries from x [b, q, d], and keys and values from memory [b, s, d].

    If memory is x, it is self-attention.
    """
    q = _project(x, p, "q")
    k = _project(memory, p, "k")
    v = _project(memory, p, "v")
    y = jnp.einsum("bshk,hkd->bsd", attend(q, k, v, causal=causal), p["wo"].astype(x.dtype))
    return y + p["bo"].astype(x.dtype) if "bo" in p else y


def _project(x: jax.Array, p: Weights, name: str) -> jax.Array:
    y = jnp.einsum("bsd,dhk->bshk", x, p[f"w{name}"].astype(x.dtype))
    return y + p[f"b{name}"].astype(x.dtype) if f"b{name}" in p else y


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, mask: jax.Array | None = None
) -> jax.Array:
    """softmax(q kᵀ / √head_dim) v for q [b, q, h, k] and k, v [b, s, h, k]; the softmax is in float32."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(causal_mask(scores.shape[-2:]), scores, -1e30)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


def fused_attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, mask: jax.Array | None = None
) -> jax.Array:
    """Like `attend`, by jax.nn.dot_product_attention: cuDNN's fused kernel on a GPU, otherwise XLA's implementation.

    Its name in the jaxpr requests the kernel of the device that a plan is for (``pase.frontends.jax.attention``).
    """
    on_gpu = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
    kernel: Literal["cudnn", "xla"] = "cudnn" if on_gpu else "xla"

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *masks: jax.Array) -> jax.Array:
        mask = masks[0] if masks else None
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=kernel)

    attention.__name__ = f"{'causal_' if causal else ''}fused_attention_scaled_{float(q.shape[-1] ** -0.5)!r}"
    return jax.jit(attention)(q, k, v, *(() if mask is None else (mask,)))


def the_attend(name: str) -> Attend:
    """The attention function for a model's setting ``attention``: ``plain`` or ``fused``."""
    return {"plain": attend, "fused": fused_attend}[name]


def causal_mask(shape: tuple[int, ...]) -> jax.Array:
    """[queries, keys]: true if the key is not in the query's future."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) >= jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def feed_forward(x: jax.Array, p: Weights, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """d → ff → d for x [b, s, d], with the activation between the two matrices."""
    h = jnp.einsum("bsd,df->bsf", x, p["w1"].astype(x.dtype)) + p["b1"].astype(x.dtype)
    return jnp.einsum("bsf,fd->bsd", activation(h), p["w2"].astype(x.dtype)) + p["b2"].astype(x.dtype)


def norm_leaves(d: int) -> Weights:
    """A layer norm's scale and bias."""
    return {"scale": ones(d), "bias": bias(d)}


def attention_leaves(d: int, heads: int, *, biases: bool) -> Weights:
    """Four projections between d and heads x (d / heads)."""
    if d % heads:
        raise PaseError(
            f"a width of {d} cannot be divided into {heads} heads",
            fix="choose a width that is a multiple of the heads",
        )
    k = d // heads
    leaves: dict[str, Weights] = {f"w{name}": weight(d, heads, k, fan_in=d) for name in "qkv"}
    leaves["wo"] = weight(heads, k, d, fan_in=d)
    if biases:
        leaves |= {f"b{name}": bias(heads, k) for name in "qkv"} | {"bo": bias(d)}
    return leaves


def feed_forward_leaves(d: int, ff: int) -> Weights:
    """Two matrices with their biases."""
    return {
        "w1": weight(d, ff, fan_in=d),
        "b1": bias(ff),
        "w2": weight(ff, d, fan_in=ff),
        "b2": bias(d),
    }


def block_leaves(d: int, heads: int, ff: int) -> Weights:
    """One block: self-attention and feed-forward with biases, and a layer norm for each."""
    return {
        "attention": attention_leaves(d, heads, biases=True),
        "ff": feed_forward_leaves(d, ff),
        "norm1": norm_leaves(d),
        "norm2": norm_leaves(d),
    }
