"""Transformers with one stack of blocks: GPT (causal), BERT (masked tokens), ViT (image patches)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pase.errors import PaseError
from pase.zoo.attention import Attend, block_leaves, feed_forward, norm_leaves, the_attend
from pase.zoo.attention import attention as self_attention
from pase.zoo.layers import (
    Built,
    Stack,
    Weights,
    bias,
    cross_entropy,
    dense,
    gelu,
    integers,
    layer_norm,
    normal,
    token_loss,
    weight,
)
from pase.zoo.serving import Decoder, language_model

__all__ = ["bert", "gpt", "vit"]

_gelu = partial(jax.nn.gelu, approximate=False)


def gpt(
    *,
    batch: int,
    seq: int,
    vocab: int,
    heads: int,
    context: int,
    task: str = "train",
    tokens: int = 1,
    **sizes: Any,
) -> Built:
    """GPT-2 and GPT-3: pre-norm causal blocks, learned positions, the output tied to the token embedding.

    The table of positions has ``context`` rows, or ``seq`` if that is more. task, tokens: see `pase.zoo.serving`.
    sizes: of the `Stack`.
    """
    stack = Stack(**sizes)
    d = stack.d

    def block(x: jax.Array, p: Weights, attend: Attend) -> jax.Array:
        y = layer_norm(x, p["norm1"])
        x = x + self_attention(y, y, p["attention"], attend, causal=True)
        return x + feed_forward(layer_norm(x, p["norm2"]), p["ff"], gelu)

    def logits_of(params: Weights, x: jax.Array) -> jax.Array:
        return stack.scores(layer_norm(x, params["norm"]), params["wte"])

    def embed(params: Weights, tokens: jax.Array, start: jax.Array | None) -> jax.Array:
        x, table, seq = stack.lookup(params["wte"], tokens), params["wpe"], tokens.shape[1]
        rows = table[:seq] if start is None else jax.lax.dynamic_slice_in_dim(table, start, seq)
        return x + rows.astype(stack.dtype)

    params = {
        "wte": normal(vocab, d),
        "wpe": normal(max(context, seq), d),
        "blocks": stack.leaves(block_leaves(d, heads, 4 * d)),
        "norm": norm_leaves(d),
    }
    decoder = Decoder(
        embed=embed,
        block_at=lambda seq, start: block,
        logits=logits_of,
        attend=the_attend(stack.attention),
        stack=stack,
        kv_heads=heads,
        head_dim=d // heads,
    )
    return language_model(
        decoder, params, task, batch=batch, seq=seq, context=context, vocab=vocab, tokens=tokens
    )


def bert(*, batch: int, seq: int, vocab: int, heads: int, context: int, **sizes: Any) -> Built:
    """BERT pre-training: post-norm blocks, the masked-token loss plus the next-sentence loss.

    ``batch["mask"]`` is 1 for the tokens to predict. The logits' weights are tied to the token embedding. sizes: of the
    `Stack`.
    """
    stack = Stack(**sizes)
    d, attend = stack.d, the_attend(stack.attention)

    def block(x: jax.Array, p: Weights) -> jax.Array:
        x = layer_norm(x + self_attention(x, x, p["attention"], attend), p["norm1"], eps=1e-12)
        return layer_norm(x + feed_forward(x, p["ff"], _gelu), p["norm2"], eps=1e-12)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        tokens = batch["tokens"]
        x = stack.lookup(params["token"], tokens) + stack.lookup(params["segment"], batch["segments"])
        x = x + params["position"][: tokens.shape[1]].astype(stack.dtype)
        x = layer_norm(x, params["norm"], eps=1e-12)
        x = stack.run(block, x, params["blocks"])
        return masked_loss(params, x, batch) + next_loss(params, x[:, 0], batch["next"])

    def masked_loss(params: Weights, x: jax.Array, batch: Weights) -> jax.Array:
        p = params["masked"]
        y = layer_norm(_gelu(dense(x, p)), p["norm"], eps=1e-12)
        losses = token_loss(stack.scores(y, params["token"]) + p["bias"], batch["labels"])
        mask = batch["mask"].astype(jnp.float32)
        return jnp.sum(losses * mask) / (jnp.sum(mask) + 1e-5)

    def next_loss(params: Weights, first: jax.Array, labels: jax.Array) -> jax.Array:
        pooled = jnp.tanh(dense(first, params["pooler"]))
        return cross_entropy(dense(pooled, params["next"]).astype(jnp.float32), labels)

    params = {
        "token": normal(vocab, d),
        "position": normal(max(context, seq), d),
        "segment": normal(2, d),
        "norm": norm_leaves(d),
        "blocks": stack.leaves(block_leaves(d, heads, 4 * d)),
        "pooler": {"w": weight(d, d, fan_in=d), "b": bias(d)},
        "masked": {
            "w": weight(d, d, fan_in=d),
            "b": bias(d),
            "norm": norm_leaves(d),
            "bias": bias(vocab),
        },
        "next": {"w": normal(d, 2), "b": bias(2)},
    }
    tokens = {
        "tokens": integers(batch, seq, below=vocab),
        "segments": integers(batch, seq, below=2),
        "labels": integers(batch, seq, below=vocab),
        "mask": integers(batch, seq, below=2),
        "next": integers(batch, below=2),
    }
    return Built(loss_fn=loss_fn, params=params, batch=tokens)


def vit(*, batch: int, image: int, classes: int, heads: int, patch: int, **sizes: Any) -> Built:
    """Vision transformer: patches by a strided convolution, a class token, pre-norm blocks. sizes: of the `Stack`."""
    if image % patch:
        raise PaseError(
            f"it is not a multiple of the model's patches of {patch} pixels",
            where=f"image={image}",
            fix=f"give a multiple of {patch}",
        )
    stack = Stack(**sizes)
    d, dtype, attend = stack.d, stack.dtype, the_attend(stack.attention)
    patches = (image // patch) ** 2

    def block(x: jax.Array, p: Weights) -> jax.Array:
        y = layer_norm(x, p["norm1"], eps=1e-6)
        x = x + self_attention(y, y, p["attention"], attend)
        return x + feed_forward(layer_norm(x, p["norm2"], eps=1e-6), p["ff"], _gelu)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        p = params["patch"]
        x = jax.lax.conv_general_dilated(
            batch["images"].astype(dtype),
            p["w"].astype(dtype),
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(x.shape[0], patches, d) + p["b"].astype(dtype)
        first = jnp.broadcast_to(params["class"].astype(dtype), (x.shape[0], 1, d))
        x = jnp.concatenate([first, x], axis=1) + params["position"].astype(dtype)
        x = stack.run(block, x, params["blocks"])
        x = layer_norm(x[:, 0], params["norm"], eps=1e-6)
        p = params["classifier"]
        logits = jnp.matmul(x, p["w"].astype(dtype), preferred_element_type=jnp.float32) + p["b"]
        return cross_entropy(logits, batch["labels"])

    params = {
        "patch": {"w": weight(patch, patch, 3, d, fan_in=patch * patch * 3), "b": bias(d)},
        "class": normal(d),
        "position": normal(patches + 1, d),
        "blocks": stack.leaves(block_leaves(d, heads, 4 * d)),
        "norm": norm_leaves(d),
        "classifier": {"w": normal(d, classes), "b": bias(classes)},
    }
    images = {"images": normal(batch, image, image, 3, std=1.0), "labels": integers(batch, below=classes)}
    return Built(loss_fn=loss_fn, params=params, batch=images)
