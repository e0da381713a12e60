"""Decoding with a cache reads the same as one pass over the whole text; what does not fit in a cache is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.errors import PaseError
from pase.zoo.attention import Attend, attend
from pase.zoo.layers import Stack
from pase.zoo.serving import Decoder, language_model

D, HEADS, VOCAB, LAYERS, CONTEXT = 8, 2, 16, 2, 8


def decoder() -> Decoder:
    """Blocks of attention alone, with a table of positions; the output is the table of words."""

    def embed(params: Any, tokens: jax.Array, start: Any) -> jax.Array:
        return params["words"][tokens] + jax.lax.dynamic_slice_in_dim(
            params["places"], 0 if start is None else start, tokens.shape[1]
        )

    def block_at(s: int, start: Any) -> Any:
        def block(x: jax.Array, p: Any, attend: Attend) -> jax.Array:
            q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[n]) for n in "qkv")
            return x + attend(q, k, v, causal=True).reshape(x.shape)

        return block

    def logits(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["words"].T

    return Decoder(
        embed=embed,
        block_at=block_at,
        logits=logits,
        attend=attend,
        stack=Stack(layers=LAYERS, d=D, dtype="float32", attention="plain", scan=1, remat=0),
        kv_heads=HEADS,
        head_dim=D // HEADS,
    )


def parameters() -> Any:
    rng = np.random.default_rng(0)
    blocks: Any = {n: jnp.asarray(rng.normal(size=(LAYERS, D, HEADS, D // HEADS)), "float32") for n in "qkv"}
    words, places = (jnp.asarray(rng.normal(size=(n, D)), "float32") for n in (VOCAB, CONTEXT))
    return {"words": words, "places": places, "blocks": blocks}


def test_decoding_is_a_pass_over_the_longer_prompt() -> None:
    made, params = decoder(), parameters()
    prefill, decode = jax.jit(partial(made.prefill, context=CONTEXT)), jax.jit(made.decode)
    prompt = np.random.default_rng(1).integers(0, VOCAB, (3, 4))
    token, cache = prefill(params, {"tokens": prompt})
    for _ in range(CONTEXT - 4):
        prompt = np.concatenate([prompt, token[:, None]], axis=1)
        token, cache = decode(params, token, cache)
    wanted, whole = prefill(params, {"tokens": prompt})
    assert (token == wanted).all() and int(cache["filled"]) == int(whole["filled"]) == CONTEXT
    for name in ("keys", "values"):
        np.testing.assert_allclose(cache[name], whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("task", "seq", "tokens"), [("prefill", CONTEXT + 1, 1), ("generate", CONTEXT, 1)])
def test_a_prompt_longer_than_the_cache_is_refused(task: str, seq: int, tokens: int) -> None:
    sizes = dict(batch=2, context=CONTEXT, vocab=VOCAB, tokens=tokens)
    with pytest.raises(PaseError) as e:
        language_model(decoder(), {}, task, seq=seq, **sizes)
    assert e.value.where == "context" and str(CONTEXT) in e.value.what and e.value.fix
    fits = language_model(decoder(), {}, task, seq=CONTEXT - 1, **sizes)
    assert fits.task == task
