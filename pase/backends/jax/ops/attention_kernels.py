"""Attention kernels for one device: cuDNN's, Pallas' flash attention, and the definition itself for any device.

Each kernel is a pair of functions. Forward returns the result and the logarithm of each query's sum of exponentials
(the logsumexp). Backward takes both as inputs, so attention over many blocks of keys can be assembled from kernels
(``attention``, ``pase.local.ring``). Queries and results are [b, q, kv heads, group, d], keys and values
[b, s, kv heads, d], the logarithms [b, q, kv heads, group].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pase.frontends.jax import versions
from pase.local.ring import Attended

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes

__all__ = ["CuDNN", "Flash", "Reference"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Two matmuls and a softmax, with the scores in memory, compiled by XLA for any device."""

    def _scores(self, q: Array, k: Array, *, causal: bool, scale: float) -> Array:
        import jax.numpy as jnp

        wide = jnp.promote_types(q.dtype, jnp.float32)
        scores = jnp.einsum("bqhgd,bshd->bqhgs", q, k, preferred_element_type=wide) * scale
        if causal:
            seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))[:, None, None, :]
            scores = jnp.where(seen, scores, -jnp.inf)
        return scores

    def forward(self, q: Array, k: Array, v: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
        import jax.numpy as jnp
        from jax.scipy.special import logsumexp

        scores = self._scores(q, k, causal=causal, scale=scale)
        sums = logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - sums[..., None]).astype(v.dtype)
        return jnp.einsum("bqhgs,bshe->bqhge", weights, v), sums

    def backward(
        self, done: Attended[Array], gradient: Array, *, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        q, k, v, result, sums = done
        wide = sums.dtype
        weights = jnp.exp(self._scores(q, k, causal=causal, scale=scale) - sums[..., None])
        of_weights = jnp.einsum("bqhge,bshe->bqhgs", gradient, v, preferred_element_type=wide)
        each = jnp.sum(gradient.astype(wide) * result.astype(wide), axis=-1)
        of_scores = (weights * (of_weights - each[..., None]) * scale).astype(q.dtype)
        return (
            jnp.einsum("bqhgs,bshd->bqhgd", of_scores, k),
            jnp.einsum("bqhgs,bqhgd->bshd", of_scores, q),
            jnp.einsum("bqhgs,bqhge->bshe", weights.astype(v.dtype), gradient),
        )


@dataclass(frozen=True, kw_only=True)
class CuDNN:
    """cuDNN's fused attention, for bfloat16 and float16 on NVIDIA GPUs."""

    def forward(self, q: Array, k: Array, v: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
        b, t, h, g, _ = q.shape
        result, sums = versions.cudnn_attention(_heads(q), k, v, causal=causal, scale=scale)
        return result.reshape(b, t, h, g, -1), sums.transpose(0, 2, 1).reshape(b, t, h, g)

    def backward(
        self, done: Attended[Array], gradient: Array, *, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        q, k, v, result, sums = done
        b, t = q.shape[:2]
        dq, dk, dv = versions.cudnn_attention_backward(
            _heads(q),
            k,
            v,
            _heads(result),
            sums.reshape(b, t, -1).transpose(0, 2, 1),
            _heads(gradient),
            causal=causal,
            scale=scale,
        )
        return dq.reshape(q.shape), dk, dv


@dataclass(frozen=True, kw_only=True)
class Flash:
    """Pallas' flash attention for TPUs. blocks: block sizes for whole arrays; parts limit them to their own sizes."""

    blocks: BlockSizes

    def _blocks(self, batch: int, queries: int, keys: int) -> BlockSizes:
        most = {"block_b": batch, "block_q": queries, "block_k": keys}

        def least(name: str, size: int | None) -> int | None:
            return None if size is None else min(size, *(n for b, n in most.items() if name.startswith(b)))

        fields: dict[str, Any] = {
            f.name: least(f.name, getattr(self.blocks, f.name)) for f in dataclasses.fields(self.blocks)
        }
        return dataclasses.replace(self.blocks, **fields)

    def forward(self, q: Array, k: Array, v: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
        b, t, h, g, _ = q.shape
        blocks = self._blocks(b, t, k.shape[1])
        result, sums = versions.flash_attention(
            *(_heads_first(x) for x in (q, k, v)), causal=causal, scale=scale, blocks=blocks
        )
        return result.transpose(0, 2, 1, 3).reshape(b, t, h, g, -1), sums.transpose(0, 2, 1).reshape(
            b, t, h, g
        )

    def backward(
        self, done: Attended[Array], gradient: Array, *, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        q, k, v, result, sums = done
        b, t = q.shape[:2]
        q_, k_, v_, result, gradient = (_heads_first(x) for x in (q, k, v, result, gradient))
        dq, dk, dv = versions.flash_attention_backward(
            (q_, k_, v_),
            result,
            sums.reshape(b, t, -1).transpose(0, 2, 1),
            gradient,
            causal=causal,
            scale=scale,
            blocks=self._blocks(b, t, k.shape[1]),
        )
        return dq.transpose(0, 2, 1, 3).reshape(q.shape), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def _heads(x: Array) -> Array:
    """The array with its dims (kv heads, group) merged to query heads."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _heads_first(x: Array) -> Array:
    return _heads(x).transpose(0, 2, 1, 3)
