"""Shared by tests of stages: an optimizer, a small GPT with its arguments, and its unsharded step."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pase.backends.audit.xla import unsharded_step

LAYERS, D, VOCAB, SEQ, BATCH, MICRO = 4, 8, 16, 4, 16, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def block(x, p):
    q, k, v = jnp.einsum("bsd,cde->cbse", norm(x, p["scale"]), p["qkv"])
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), jnp.einsum("bqe,bke->bqk", q, k), -1e9)
    x = x + jnp.einsum("bqk,bke->bqe", jax.nn.softmax(scores), v) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def gpt(params, batch):
    """A small GPT with a tied embedding, its layers in a loop or written out."""
    x, layers = params["wte"][batch["tokens"]] + params["wpe"], params["blocks"]
    if isinstance(layers, dict):
        x = jax.lax.scan(lambda h, p: (block(h, p), None), x, layers)[0]
    else:
        for p in layers:
            x = block(x, p)
    logits = norm(x, params["scale"]) @ params["wte"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
    return -jnp.mean(picked)


def arguments(scan):
    rng = np.random.default_rng(0)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape) / 3)

    def layer():
        shapes = {"qkv": (3, D, D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D), "scale": (D,)}
        return {name: leaf(*shape) for name, shape in shapes.items()}

    blocks = [layer() for _ in range(LAYERS)]
    tokens, labels = (jnp.asarray(rng.integers(VOCAB, size=(BATCH, SEQ))) for _ in range(2))
    params = {
        "wte": leaf(VOCAB, D),
        "wpe": leaf(SEQ, D),
        "blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks) if scan else blocks,
        "scale": leaf(D),
    }
    return params, {"tokens": tokens, "labels": labels}


@cache
def reference(scan):
    with jax.enable_x64(True):
        return unsharded_step(gpt, OPTIMIZER, *arguments(scan))
