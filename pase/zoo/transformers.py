"""Transformers with one stack of blocks: GPT (causal), BERT (masked tokens), ViT (image patches)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pase.errors import PaseError
from pase.zoo.attention import Attend, block_leaves, feed_forward, norm_leaves, the_attend
from pase.zoo.attention import attention as self_attention
from pase.zoo.layers import (
    Built,
    Weights,
    bias,
    cross_entropy,
    dense,
    gelu,
    integers,
    layer_norm,
    lookup,
    normal,
    repeat,
    run_layers,
    token_loss,
    weight,
)
from pase.zoo.serving import Decoder, served

__all__ = ["bert", "gpt", "vit"]

_gelu = partial(jax.nn.gelu, approximate=False)


def gpt(
    *,
    batch: int,
    seq: int,
    layers: int,
    vocab: int,
    dtype: str,
    attention: str,
    scan: int,
    remat: int,
    d: int,
    heads: int,
    context: int,
    task: str = "train",
    tokens: int = 1,
) -> Built:
    """GPT-2 and GPT-3: pre-norm causal blocks, learned positions, the output tied to the token embedding.

    The table of positions has ``context`` rows, or ``seq`` if that is more. task, tokens: see `pase.zoo.serving`.
    """

    attend = the_attend(attention)

    def block(x: jax.Array, p: Weights, attend: Attend = attend) -> jax.Array:
        y = layer_norm(x, p["norm1"])
        x = x + self_attention(y, y, p["attention"], attend, causal=True)
        return x + feed_forward(layer_norm(x, p["norm2"]), p["ff"], gelu)

    def logits_of(params: Weights, x: jax.Array) -> jax.Array:
        x = layer_norm(x, params["norm"])
        table = params["wte"].astype(dtype)
        return jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        tokens = batch["tokens"]
        x = lookup(params["wte"], tokens, dtype) + params["wpe"][: tokens.shape[1]].astype(dtype)
        x = run_layers(block, x, params["blocks"], scan=scan, remat=remat)
        return cross_entropy(logits_of(params, x), batch["labels"])

    def embed(params: Weights, tokens: jax.Array, start: jax.Array | None) -> jax.Array:
        positions = jax.lax.dynamic_slice_in_dim(
            params["wpe"], 0 if start is None else start, tokens.shape[1]
        )
        return lookup(params["wte"], tokens, dtype) + positions.astype(dtype)

    params = {
        "wte": normal(vocab, d),
        "wpe": normal(max(context, seq), d),
        "blocks": repeat(block_leaves(d, heads, 4 * d), layers, scan=scan),
        "norm": norm_leaves(d),
    }
    if task != "train":
        decoder = Decoder(
            embed=embed,
            block_at=lambda seq, start: block,
            logits=logits_of,
            attend=attend,
            layers=layers,
            kv_heads=heads,
            head_dim=d // heads,
            dtype=dtype,
            scan=scan,
        )
        return served(
            decoder, params, task, batch=batch, seq=seq, context=context, vocab=vocab, tokens=tokens
        )
    inputs = {"tokens": integers(batch, seq, below=vocab), "labels": integers(batch, seq, below=vocab)}
    return Built(loss_fn=loss_fn, params=params, batch=inputs)


def bert(
    *,
    batch: int,
    seq: int,
    layers: int,
    vocab: int,
    dtype: str,
    attention: str,
    scan: int,
    remat: int,
    d: int,
    heads: int,
    context: int,
) -> Built:
    """BERT pre-training: post-norm blocks, the masked-token loss plus the next-sentence loss.

    ``batch["mask"]`` is 1 for the tokens to predict. The logits' weights are tied to the token embedding.
    """

    attend = the_attend(attention)

    def block(x: jax.Array, p: Weights) -> jax.Array:
        x = layer_norm(x + self_attention(x, x, p["attention"], attend), p["norm1"], eps=1e-12)
        return layer_norm(x + feed_forward(x, p["ff"], _gelu), p["norm2"], eps=1e-12)

    def loss_fn(params: Weights, batch: Weights) -> jax.Array:
        tokens = batch["tokens"]
        x = lookup(params["token"], tokens, dtype) + lookup(params["segment"], batch["segments"], dtype)
        x = x + params["position"][: tokens.shape[1]].astype(dtype)
        x = layer_norm(x, params["norm"], eps=1e-12)
        x = run_layers(block, x, params["blocks"], scan=scan, remat=remat)
        return masked_loss(params, x, batch) + next_loss(params, x[:, 0], batch["next"])

    def masked_loss(params: Weights, x: jax.Array, batch: Weights) -> jax.Array:
        p = params["masked"]
        y = layer_norm(_gelu(dense(x, p)), p["norm"], eps=1e-12)
        table = params["token"].astype(dtype)
        logits = jnp.einsum("bsd,vd->bsv", y, table, preferred_element_type=jnp.float32)
        losses = token_loss(logits + p["bias"], batch["labels"])
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
        "blocks": repeat(block_leaves(d, heads, 4 * d), layers, scan=scan),
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


def vit(
    *,
    batch: int,
    image: int,
    layers: int,
    classes: int,
    dtype: str,
    attention: str,
    scan: int,
    remat: int,
    d: int,
    heads: int,
    patch: int,
) -> Built:
    """Vision transformer: patches by a strided convolution, a class token, pre-norm blocks."""
    if image % patch:
        raise PaseError(
            f"it is not a multiple of the model's patches of {patch} pixels",
            where=f"image={image}",
            fix=f"give a multiple of {patch}",
        )
    patches = (image // patch) ** 2

    attend = the_attend(attention)

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
        x = run_layers(block, x, params["blocks"], scan=scan, remat=remat)
        x = layer_norm(x[:, 0], params["norm"], eps=1e-6)
        p = params["classifier"]
        logits = jnp.matmul(x, p["w"].astype(dtype), preferred_element_type=jnp.float32) + p["b"]
        return cross_entropy(logits, batch["labels"])

    params = {
        "patch": {"w": weight(patch, patch, 3, d, fan_in=patch * patch * 3), "b": bias(d)},
        "class": normal(d),
        "position": normal(patches + 1, d),
        "blocks": repeat(block_leaves(d, heads, 4 * d), layers, scan=scan),
        "norm": norm_leaves(d),
        "classifier": {"w": normal(d, classes), "b": bias(classes)},
    }
    images = {"images": normal(batch, image, image, 3, std=1.0), "labels": integers(batch, below=classes)}
    return Built(loss_fn=loss_fn, params=params, batch=images)
