"""Prefill and decode under one plan: a small decoder with a KV cache on eight devices of this computer.

.venv/bin/python examples/generate.py [--tokens 8]

``pase.Generation`` takes the two functions: ``prefill(params, prompt) -> (token, cache)`` and
``decode(params, token, cache) -> (token, cache)``. Parameters are stored once for both, and the cache is laid out as
decode wants it. Each token is compared with what the functions give by themselves.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

import pase

CONTEXT, WIDTH, HEADS, WORDS = 64, 128, 8, 256


def decoder(params, tokens, cache, start):
    """Logits [b, words] behind the last of tokens [b, s], whose first stands at position ``start``."""
    x = params["words"][tokens] + jax.lax.dynamic_slice_in_dim(params["places"], start, tokens.shape[1])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
    cache = {
        "keys": jax.lax.dynamic_update_slice(cache["keys"], k, (0, start, 0, 0)),
        "values": jax.lax.dynamic_update_slice(cache["values"], v, (0, start, 0, 0)),
        "filled": jnp.int32(start + tokens.shape[1]),
    }
    seen = jnp.arange(CONTEXT)[None, :] <= start + jnp.arange(tokens.shape[1])[:, None]
    y = jax.nn.dot_product_attention(q, cache["keys"], cache["values"], mask=seen[None, None])
    x = x + jnp.einsum("bshk,hkd->bsd", y, params["o"])
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return x[:, -1] @ params["words"].T, cache


def prefill(params, prompt):
    empty = jnp.zeros((prompt.shape[0], CONTEXT, HEADS, WIDTH // HEADS))
    logits, cache = decoder(params, prompt, {"keys": empty, "values": empty}, 0)
    return jnp.argmax(logits, -1).astype(jnp.int32), cache


def decode(params, token, cache):
    logits, cache = decoder(params, token[:, None], cache, cache["filled"])
    return jnp.argmax(logits, -1).astype(jnp.int32), cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8)
    tokens = parser.parse_args().tokens

    head = WIDTH // HEADS
    shapes = {"words": (WORDS, WIDTH), "places": (CONTEXT, WIDTH), "up": (WIDTH, 512), "down": (512, WIDTH)}
    shapes |= {name: (WIDTH, HEADS, head) for name in "qkv"} | {"o": (HEADS, head, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        n: jax.random.normal(k, s) / s[0] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    prompt = jax.random.randint(jax.random.key(1), (4, 16), 0, WORDS)

    model = pase.Generation(prefill=prefill, decode=decode, tokens=tokens)
    plan = pase.compile(model, params, prompt, devices=8, machine="1080tix8", mesh="2x4", baselines=False)
    print(plan)
    alone, onwards = jax.jit(prefill), jax.jit(decode)
    stored, given = plan.jax.device_put(params, prompt)
    token, cache = plan.jax.prefill(stored, given)
    plain, kept = alone(params, prompt)
    for step in range(tokens):
        assert (token == plain).all()
        print(f"token {step}: {token.tolist()}, keys split as {cache['keys'].sharding.spec}")
        token, cache = plan.jax.decode(stored, token, cache)
        plain, kept = onwards(params, plain, kept)
    print("the same tokens as without a plan")


if __name__ == "__main__":
    main()
