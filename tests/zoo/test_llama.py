"""Grouped attention and rotary embeddings against JAX's attention and their definition."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pase.zoo.llama import attend_grouped, fused_grouped, grouped_attention, rotary, rotate
from tests.zoo.helpers import close, draw


def test_grouped_attention_is_dot_product_attention_with_shared_heads() -> None:
    d, heads, group, k, seq = 16, 2, 3, 4, 5
    x = draw(2, seq, d)
    p = {"wq": draw(d, heads, group, k), "wk": draw(d, heads, k), "wv": draw(d, heads, k)}
    p["wo"] = draw(heads, group, k, d)
    cos, sin = rotary(seq, k, 10_000.0)

    @jax.jit
    def reference(x: jax.Array) -> jax.Array:
        q = jnp.einsum("bsd,dhk->bshk", x, p["wq"].reshape(d, heads * group, k))
        keys, values = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in ("wk", "wv"))
        y = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(keys, cos, sin), values, is_causal=True)
        return jnp.einsum("bshk,hkd->bsd", y, p["wo"].reshape(heads * group, k, d))

    for function in (attend_grouped, fused_grouped):
        close(jax.jit(partial(grouped_attention, attend=function))(x, p, cos, sin), reference(x), 1e-4)


def test_rotary_scores_depend_on_distance_alone() -> None:
    cos, sin = rotary(9, 8, 500_000.0)
    q, k = draw(8), draw(8)
    rows = (1, 9, 8)
    turned_q = rotate(jnp.broadcast_to(q, rows), cos, sin)[0]
    turned_k = rotate(jnp.broadcast_to(k, rows), cos, sin)[0]
    scores = turned_q @ turned_k.T
    for distance in range(5):
        along = jnp.diagonal(scores, -distance)
        close(along, jnp.full(along.shape, along[0]), 1e-4)
    close(turned_q[0], q)
    assert abs(float(scores[4, 0] - scores[0, 0])) > 1e-3
