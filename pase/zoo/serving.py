"""A decoder, to train or for inference: it reads a prompt in one pass, then one token per call.

The cache holds keys and values of all layers, [layers, batch, context, kv heads, head dim] each, and the number of
filled positions. The layers write to it in place, one after the other. Task "train" is the loss of the next tokens.
Task "prefill" reads a prompt of ``seq`` tokens and makes the cache. Task "decode" takes the cache and adds one token.
Task "generate" is one prefill followed by ``tokens`` decoding steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pase.errors import PaseError
from pase.pytree import Tree
from pase.zoo.attention import Attend
from pase.zoo.layers import Built, Stack, cross_entropy, full, integers, normal

__all__ = ["Decoder", "language_model"]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of a decoder.

    embed: (params, tokens [b, s], start) -> x [b, s, d]. block_at: (s, start) -> block(x, p, attend) -> x. logits:
    (params, x [b, s, d]) -> [b, s, vocab]. Here, start is the position of the first of ``tokens``, or None if they are
    the prompt.
    """

    embed: Callable[[Tree, jax.Array, Tree], jax.Array]
    block_at: Callable[[int, Tree], Callable[[jax.Array, Tree, Attend], jax.Array]]
    logits: Callable[[Tree, jax.Array], jax.Array]
    attend: Attend
    stack: Stack
    kv_heads: int
    head_dim: int

    def loss(self, params: Tree, batch: Tree) -> jax.Array:
        """The mean cross entropy of batch["labels"] after batch["tokens"]."""
        tokens = batch["tokens"]
        block = self.block_at(tokens.shape[1], None)

        def layer(x: jax.Array, p: Tree) -> jax.Array:
            return block(x, p, self.attend)

        x = self.stack.run(layer, self.embed(params, tokens, None), params["blocks"])
        return cross_entropy(self.logits(params, x), batch["labels"])

    def cache_shape(self, batch: int, context: int) -> tuple[int, ...]:
        """The shape of the cached keys, and of the cached values."""
        return (self.stack.layers, batch, context, self.kv_heads, self.head_dim)

    def prefill(self, params: Tree, batch: Tree, context: int) -> tuple[jax.Array, Tree]:
        """(the next token [b], the cache) for a prompt batch["tokens"] [b, s]."""
        tokens = batch["tokens"]
        shape = self.cache_shape(tokens.shape[0], context)
        cache = {n: jnp.zeros(shape, self.stack.dtype) for n in ("keys", "values")}
        x, cache = self._run(params, tokens, cache, None, self.attend)
        return self._next(params, x), cache | {"filled": jnp.int32(tokens.shape[1])}

    def decode(self, params: Tree, token: jax.Array, cache: dict[str, jax.Array]) -> tuple[jax.Array, Tree]:
        """(the next token [b], the cache with one more position) from the last token [b]."""
        at = cache["filled"]
        seen = jnp.arange(cache["keys"].shape[2]) <= at
        stacks = {n: cache[n] for n in ("keys", "values")}
        x, stacks = self._run(params, token[:, None], stacks, at, self.attend, seen[None, None, None, :])
        return self._next(params, x), stacks | {"filled": at + 1}

    def _run(
        self,
        params: Tree,
        tokens: jax.Array,
        cache: dict[str, jax.Array],
        start: Tree,
        attend: Attend,
        seen: Tree = None,
    ) -> tuple[jax.Array, Tree]:
        block = self.block_at(tokens.shape[1], start)
        x = self.embed(params, tokens, start)

        def layer(carry: Tree, given: Tree) -> tuple[Tree, None]:
            x, keys, values = carry
            p, number = given
            stored = _Stored(attend=attend, keys=keys, values=values, layer=number, start=start, seen=seen)
            x = block(x, p, stored)
            return (x, stored.keys, stored.values), None

        carry = x, cache["keys"], cache["values"]
        if self.stack.scan:
            carry, _ = jax.lax.scan(layer, carry, (params["blocks"], jnp.arange(self.stack.layers)))
        else:
            for number, p in enumerate(params["blocks"]):
                carry, _ = layer(carry, (p, number))
        x, keys, values = carry
        return x[:, -1:], {"keys": keys, "values": values}

    def _next(self, params: Tree, x: jax.Array) -> jax.Array:
        return jnp.argmax(self.logits(params, x)[:, 0], axis=-1).astype(jnp.int32)


@dataclass(kw_only=True)
class _Stored:
    """Attention in a layer that caches its keys and values. It first writes them to the cache.

    seen: the positions to attend to in the layer's whole cache. If it is None, the cache is not read.
    """

    attend: Attend
    keys: jax.Array
    values: jax.Array
    layer: Tree
    start: Tree
    seen: jax.Array | None

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
        self.keys, self.values = self._written(self.keys, k), self._written(self.values, v)
        if self.seen is None:
            return self.attend(q, k, v, causal=causal)
        k, v = (jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (self.keys, self.values))
        return self.attend(q, k, v, causal=False, mask=self.seen)

    def _written(self, stack: jax.Array, new: jax.Array) -> jax.Array:
        at = (self.layer, 0, 0 if self.start is None else self.start, 0, 0)
        return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), at)


def language_model(
    decoder: Decoder, params: Tree, task: str, *, batch: int, seq: int, context: int, vocab: int, tokens: int
) -> Built:
    """The model of a task. For other tasks than training, parameters are stored in the dtype in which they are used."""
    prompt = {"tokens": integers(batch, seq, below=vocab)}
    if task == "train":
        labels = integers(batch, seq, below=vocab)
        return Built(loss_fn=decoder.loss, params=params, batch=prompt | {"labels": labels})
    if seq + (tokens if task == "generate" else 0) > context and task != "decode":
        more = f" and {tokens} more" if task == "generate" else ""
        raise PaseError(
            f"a prompt of {seq} tokens{more} does not fit in a cache of {context} positions",
            where="context",
            fix="give a larger context= or a smaller seq=",
        )
    made = partial(Built, params=params, task=task, stored=decoder.stack.dtype)
    if task == "decode":
        shape = decoder.cache_shape(batch, context)
        cache = {n: normal(*shape, std=1.0) for n in ("keys", "values")}
        cache |= {"filled": full(value=context - 1)}
        return made(loss_fn=decoder.decode, batch=integers(batch, below=vocab), cache=cache)
    prefill = partial(decoder.prefill, context=context)
    return made(loss_fn=prefill, batch=prompt, decode=decoder.decode if task == "generate" else None)
