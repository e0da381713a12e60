"""Llama-3 and Mixtral: grouped-query attention, rotary positions, RMS norms, and a dense or expert feed-forward.

Query heads that share a key-value head are a separate dim: the query weight is [d, kv, group, head_dim]. So the whole
attention can be split over key-value heads without a reshape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pase.errors import PaseError
from pase.zoo.attention import Attend, causal_mask, fused_attend
from pase.zoo.layers import Built, Stack, Weights, normal, ones, silu, weight
from pase.zoo.moe import expert_leaves, experts_forward
from pase.zoo.serving import Decoder, language_model

__all__ = [
    "OwnAttention",
    "attention_leaves",
    "grouped_attention",
    "grouped_model",
    "llama",
    "mixtral",
    "rms_norm",
    "rotary",
    "rotate",
]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide the last dim by its root mean square in float32, then apply the scale (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def rotary(
    seq: int, head_dim: int, theta: float, start: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [seq, head_dim / 2] of rotary positions from ``start`` (default 0) on (Su et al. 2021)."""
    half = jnp.arange(head_dim // 2, dtype=jnp.float32)
    positions = jnp.arange(seq, dtype=jnp.float32)
    if start is not None:
        positions = positions + start
    angles = positions[:, None] * theta ** (-2.0 / head_dim * half)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate each pair (x[i], x[i + head_dim/2]) of x [b, s, ..., head_dim] by its position's angle."""
    middle = tuple(range(1, x.ndim - 2))  # the head dims between sequence and head_dim
    cos, sin = jnp.expand_dims(cos, middle), jnp.expand_dims(sin, middle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def grouped_attention(x: jax.Array, p: Weights, cos: jax.Array, sin: jax.Array, attend: Attend) -> jax.Array:
    """Causal self-attention of x [b, s, d]. Letters: h key-value head, g query head of its group, k head_dim."""
    q = rotate(jnp.einsum("bsd,dhgk->bshgk", x, p["wq"].astype(x.dtype)), cos, sin)
    k = rotate(jnp.einsum("bsd,dhk->bshk", x, p["wk"].astype(x.dtype)), cos, sin)
    v = jnp.einsum("bsd,dhk->bshk", x, p["wv"].astype(x.dtype))
    y = attend(q, k, v, causal=True)
    return jnp.einsum("bqhgk,hgkd->bqd", y, p["wo"].astype(x.dtype))


def attend_grouped(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, mask: jax.Array | None = None
) -> jax.Array:
    """softmax(q kᵀ / √head_dim) v for q [b, q, h, g, k] and k, v [b, s, h, k]; the softmax is in float32."""
    scores = jnp.einsum("bqhgk,bshk->bhgqs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(causal_mask(scores.shape[-2:]), scores, -1e30)
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, -1e30)
    return jnp.einsum("bhgqs,bshk->bqhgk", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


def fused_grouped(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, mask: jax.Array | None = None
) -> jax.Array:
    """Like `attend_grouped`, by jax.nn.dot_product_attention, which finds a query head's group by its index."""
    b, s, h, g, d = q.shape
    return fused_attend(q.reshape(b, s, h * g, d), k, v, causal=causal, mask=mask).reshape(q.shape)


def gated_forward(x: jax.Array, p: Weights) -> jax.Array:
    """SwiGLU: (silu(x gate) * (x up)) down. Shazeer 2020."""
    gate = jnp.einsum("bsd,df->bsf", x, p["gate"].astype(x.dtype))
    up = jnp.einsum("bsd,df->bsf", x, p["up"].astype(x.dtype))
    return jnp.einsum("bsf,fd->bsd", silu(gate) * up, p["down"].astype(x.dtype))


def gated_leaves(d: int, ff: int) -> Weights:
    """The three matrices of `gated_forward`."""
    return {
        "gate": weight(d, ff, fan_in=d),
        "up": weight(d, ff, fan_in=d),
        "down": weight(ff, d, fan_in=ff),
    }


def attention_leaves(d: int, kv_heads: int, group: int, head_dim: int) -> Weights:
    """Four projections between d and the heads of `grouped_attention`."""
    return {
        "wq": weight(d, kv_heads, group, head_dim, fan_in=d),
        "wk": weight(d, kv_heads, head_dim, fan_in=d),
        "wv": weight(d, kv_heads, head_dim, fan_in=d),
        "wo": weight(kv_heads, group, head_dim, d, fan_in=kv_heads * group * head_dim),
    }


FeedForward = tuple[Callable[[jax.Array, Weights], jax.Array], Weights]
"""A feed-forward layer: (f(x [b, s, d], weights) -> y, the shapes of its weights)."""
OwnAttention = tuple[Callable[[jax.Array, Weights, jax.Array, jax.Array], jax.Array], Weights]
"""An attention in place of `grouped_attention`: (f(x [b, s, d], weights, cos, sin) -> y, the shapes of its weights).
cos and sin are those of `rotary` for ``head_dim``."""


def grouped_model(
    forward: Callable[[jax.Array, Weights], jax.Array],
    forward_leaves: Weights,
    *,
    batch: int,
    seq: int,
    vocab: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    theta: float,
    task: str = "train",
    context: int = 0,
    tokens: int = 1,
    own: OwnAttention | None = None,
    first: Sequence[FeedForward] = (),
    **sizes: Any,
) -> Built:
    """The decoder around a feed-forward layer. Embedding and output have separate tables.

    task, context, tokens: see `pase.zoo.serving`. own: another attention. first: the feed-forwards of layers before
    the equal ones. These two are supported only for training. sizes: of the `Stack`.
    """
    if (own is not None or first) and task != "train":
        raise PaseError(
            "the task needs equal layers with keys and values for each head, but the model has layers of its own",
            where=f"task={task!r}",
            fix="leave out own= and first=, or use task='train'",
        )
    stack = Stack(**sizes)
    d, attend = stack.d, {"plain": attend_grouped, "fused": fused_grouped}[stack.attention]

    def block_at(
        seq: int, start: jax.Array | None, forward: Callable[[jax.Array, Weights], jax.Array] = forward
    ) -> Callable[..., jax.Array]:
        cos, sin = rotary(seq, head_dim, theta, start)

        def block(x: jax.Array, p: Weights, attend: Attend) -> jax.Array:
            h = rms_norm(x, p["norm1"])
            if own is None:
                x = x + grouped_attention(h, p["attention"], cos, sin, attend)
            else:
                x = x + own[0](h, p["attention"], cos, sin)
            return x + forward(rms_norm(x, p["norm2"]), p["ff"])

        return block

    def embed(params: Weights, tokens: jax.Array, start: jax.Array | None) -> jax.Array:
        x = stack.lookup(params["embedding"], tokens)
        for (its_forward, _), p in zip(first, params.get("first", ()), strict=True):
            x = block_at(tokens.shape[1], start, its_forward)(x, p, attend)
        return x

    def logits_of(params: Weights, x: jax.Array) -> jax.Array:
        x = rms_norm(x, params["norm"])
        output = params["output"].astype(stack.dtype)
        return jnp.einsum("bsd,dv->bsv", x, output, preferred_element_type=jnp.float32)

    block_leaves = {
        "attention": attention_leaves(d, kv_heads, group, head_dim) if own is None else own[1],
        "ff": forward_leaves,
        "norm1": ones(d),
        "norm2": ones(d),
    }
    params = {
        "embedding": normal(vocab, d),
        "blocks": stack.leaves(block_leaves),
        "norm": ones(d),
        "output": normal(d, vocab),
    }
    if first:
        params["first"] = [{**block_leaves, "ff": leaves} for _, leaves in first]
    decoder = Decoder(
        embed=embed,
        block_at=block_at,
        logits=logits_of,
        attend=attend,
        stack=stack,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return language_model(
        decoder, params, task, batch=batch, seq=seq, context=context, vocab=vocab, tokens=tokens
    )


def llama(*, d: int, ff: int, **sizes: Any) -> Built:
    """Llama-3 with a dense SwiGLU feed-forward. sizes: see `grouped_model`."""
    return grouped_model(gated_forward, gated_leaves(d, ff), d=d, **sizes)


def mixtral(*, d: int, ff: int, experts: int, chosen: int, capacity_percent: int, **sizes: Any) -> Built:
    """Mixtral: each token goes to ``chosen`` of the ``experts``. `pase.zoo.moe` describes the capacity."""

    def forward(x: jax.Array, p: Weights) -> jax.Array:
        return experts_forward(x, p, chosen=chosen, capacity_percent=capacity_percent)

    return grouped_model(forward, expert_leaves(d, ff, experts), d=d, **sizes)
