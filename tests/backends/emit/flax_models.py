"""A small Flax model whose parameters have logical names."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCAB, WIDTH, HIDDEN, BATCH, LENGTH = 512, 64, 256, 32, 16


def _named(*names: str) -> Any:
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
        y = nn.LayerNorm(scale_init=ones, use_bias=False)(x)
        y = nn.gelu(nn.Dense(HIDDEN, kernel_init=_named("embed", "mlp"), bias_init=zeros)(y))
        return x + nn.Dense(WIDTH, kernel_init=_named("mlp", "embed"), use_bias=False)(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCAB, WIDTH, embedding_init=_named("vocab", "embed"))(tokens)
        for _ in range(3):
            x = nn.with_logical_constraint(Block()(x), ("batch", None, None))
        return nn.Dense(VOCAB, kernel_init=_named("embed", "vocab"), use_bias=False)(x)


def loss(variables: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(Model().apply(variables, batch["tokens"]))
    return -jnp.mean(jnp.take_along_axis(logits, batch["labels"][..., None], -1))


def init(key: Any) -> Any:
    return Model().init(key, jnp.ones((BATCH, LENGTH), "int32"))


def named_mlp() -> tuple[Any, Any, Any]:
    """(loss, shapes of its variables, shapes of its batch)."""
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
    return loss, jax.eval_shape(init, jax.random.key(0)), {"tokens": tokens, "labels": tokens}
