"""Mixtures of experts as in published benchmarks, from the zoo's parts: uniform routing, latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pase.zoo.attention import fused_attend
from pase.zoo.layers import Built, Weights, ones, silu, weight
from pase.zoo.llama import gated_forward, gated_leaves, grouped_model, rms_norm, rotate

__all__ = ["DENSE", "LATENT", "Latent", "mixture"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks of the compressed queries (0: not
    compressed) and of keys and values; widths of a head. shared: experts that every token takes, each as wide as a
    routed one."""

    queries: int
    keys: int
    plain: int = 128
    rotated: int = 64
    value: int = 128
    shared: int = 1

    @property
    def width(self) -> int:
        """Returns the width of an attention with equally wide queries, keys and values that has the same products and
        bytes as this one: q·kᵀ over plain + rotated and the rest over value."""
        return (self.plain + self.rotated + self.value) // 2


LATENT = {
    "deepseek-v3": Latent(queries=1536, keys=512),
    "kimi": Latent(queries=1536, keys=512),
    "moonlight": Latent(queries=0, keys=512, shared=2),
    "deepseek-v2-lite": Latent(queries=0, keys=512, shared=2),
    "deepseek-coder-v2-lite": Latent(queries=0, keys=512, shared=2),
    "deepseek-v2": Latent(queries=1536, keys=512, shared=2),
}
"""By the prefix of the model's name: q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim,
n_shared_experts of its public config.json. Longer prefixes come first."""


DENSE = {
    "deepseek-v3": (3, 18432),
    "kimi": (1, 18432),
    "moonlight": (1, 11264),
    "deepseek-v2-lite": (1, 10944),
    "deepseek-coder-v2-lite": (1, 10944),
    "deepseek-v2": (1, 12288),
}
"""By the prefix of the model's name, in the order of ``LATENT``: the number of first layers without experts and the
width of their feed-forward (first_k_dense_replace and intermediate_size of the public config.json)."""


def mixture(
    *,
    batch: int,
    seq: int,
    layers: int,
    vocab: int,
    d: int,
    ff: int,
    experts: int,
    chosen: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    latent: Latent | None,
    dense: tuple[int, int] = (0, 0),
) -> Built:
    """Returns a decoder: attention, and experts with SwiGLU. dense: how many of its layers, the first ones, have one
    SwiGLU of this width in place of experts."""

    def forward(x: jax.Array, p: Weights) -> jax.Array:
        out = even_experts(x, p, chosen=chosen)
        return out + gated_forward(x, p["shared"]) if "shared" in p else out

    leaves: Weights = {
        "router": weight(d, experts, fan_in=d),
        "in": weight(2, experts, d, ff, fan_in=d),
        "down": weight(experts, ff, d, fan_in=ff),
    }
    own = None
    if latent is not None:
        own = partial(latent_attention, sizes=latent), _latent_leaves(d, kv_heads * group, latent)
        if latent.shared:
            leaves["shared"] = gated_leaves(d, latent.shared * ff)
    return grouped_model(
        forward,
        leaves,
        batch=batch,
        seq=seq,
        layers=layers - dense[0],
        vocab=vocab,
        dtype="bfloat16",
        attention="fused",
        scan=1,
        remat=0,
        d=d,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim if latent is None else latent.plain + latent.rotated,
        theta=1e4,
        own=own,
        first=[(gated_forward, gated_leaves(d, dense[1])) for _ in range(dense[0])],
    )


def even_experts(x: jax.Array, p: Weights, *, chosen: int) -> jax.Array:
    """Passes x [b, s, d] through experts with uniform routing: the n-th choices of a row's tokens go to the experts of
    the n-th part in turn, whatever the router says. A token's choices are therefore on experts far apart, as in random
    routing: dispatch sends each of them and computes nothing. The router's gates weight the results.

    If the experts do not divide the tokens, each is padded to the same number. Gate and up are one product, as in
    Megatron-Core.
    """
    b, s, d = x.shape
    experts = p["router"].shape[-1]
    gates = jax.nn.softmax(jnp.einsum("bsd,de->bse", x.astype(jnp.float32), p["router"]))
    # If the choices do not divide the experts, their parts have no whole number of experts: all choices are one part.
    parts = chosen if experts % chosen == 0 else 1
    taken, part = chosen // parts * s, experts // parts
    slots = -(-taken // part)
    copies = jnp.broadcast_to(x[:, None, :, :], (b, chosen, s, d)).reshape(b, parts, taken, d)
    if slots * part > taken:
        copies = jnp.pad(copies, ((0, 0), (0, 0), (0, slots * part - taken), (0, 0)))
    inputs = copies.reshape(b, experts, slots, d)
    gate, up = jnp.einsum("becd,xedf->xbecf", inputs, p["in"].astype(x.dtype))
    outputs = jnp.einsum("becf,efd->becd", silu(gate) * up, p["down"].astype(x.dtype))
    weights = gates[..., :chosen].astype(x.dtype)
    back = outputs.reshape(b, parts, slots * part, d)
    back = back[:, :, :taken] if slots * part > taken else back
    return jnp.einsum("bksd,bsk->bsd", back.reshape(b, chosen, s, d), weights)


def latent_attention(x: jax.Array, p: Weights, cos: jax.Array, sin: jax.Array, sizes: Latent) -> jax.Array:
    """Returns causal attention of x [b, s, d] with compressed queries, keys and values: the products with weights, the
    norms and the rotations of the model, and an attention of ``sizes.width`` between them."""
    dtype = x.dtype
    half = sizes.rotated // 2
    queries = x
    if sizes.queries:
        queries = rms_norm(jnp.einsum("bsd,dr->bsr", x, p["q_down"].astype(dtype)), p["q_norm"])
    q = rotate(jnp.einsum("bsr,rhk->bshk", queries, p["q_up"].astype(dtype)), cos, sin)
    keys = rms_norm(jnp.einsum("bsd,dr->bsr", x, p["kv_down"].astype(dtype)), p["kv_norm"])
    turned = rotate(
        jnp.einsum("bsd,dk->bsk", x, p["k_rotated"].astype(dtype))[:, :, None], cos[:, :half], sin[:, :half]
    )
    plain = jnp.einsum("bsr,rhk->bshk", keys, p["k_up"].astype(dtype))
    every_head = jnp.broadcast_to(turned, (*plain.shape[:3], sizes.rotated))
    k = jnp.concatenate([plain, every_head[..., : sizes.width - sizes.plain]], axis=-1)
    v = jnp.einsum("bsr,rhk->bshk", keys, p["v_up"].astype(dtype))
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, sizes.width - sizes.value)))
    y = fused_attend(q[..., : sizes.width], k, v, causal=True)
    return jnp.einsum("bshk,hkd->bsd", y[..., : sizes.value], p["wo"].astype(dtype))


def _latent_leaves(d: int, heads: int, sizes: Latent) -> Weights:
    turned = sizes.plain + sizes.rotated
    rank = sizes.queries or d
    leaves = {
        "q_up": weight(rank, heads, turned, fan_in=rank),
        "kv_down": weight(d, sizes.keys, fan_in=d),
        "kv_norm": ones(sizes.keys),
        "k_rotated": weight(d, sizes.rotated, fan_in=d),
        "k_up": weight(sizes.keys, heads, sizes.plain, fan_in=sizes.keys),
        "v_up": weight(sizes.keys, heads, sizes.value, fan_in=sizes.keys),
        "wo": weight(heads, sizes.value, d, fan_in=heads * sizes.value),
    }
    if sizes.queries:
        leaves |= {"q_down": weight(d, rank, fan_in=d), "q_norm": ones(rank)}
    return leaves
