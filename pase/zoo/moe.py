"""Mixture of experts by einsum, after GShard (Lepikhin et al. 2020): route, dispatch, expert, combine.

Every step is dense and has a fixed shape, so that a split over the batch or over the experts is an annotation, and the
exchange of tokens between the two is one all-to-all before and one after the experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.zoo.layers import Weights, silu, weight

__all__ = ["expert_leaves", "experts_forward", "route", "slots"]


def expert_leaves(d: int, ff: int, experts: int) -> Weights:
    """A router, and SwiGLU weights with a leading expert dim."""
    return {
        "router": weight(d, experts, fan_in=d),
        "gate": weight(experts, d, ff, fan_in=d),
        "up": weight(experts, d, ff, fan_in=d),
        "down": weight(experts, ff, d, fan_in=ff),
    }


def slots(seq: int, experts: int, chosen: int, capacity_percent: int) -> int:
    """The number of tokens that one expert takes per batch row: the even share times the capacity, rounded up.

    >>> slots(4096, 8, 2, 125)
    1280
    """
    return -(-seq * chosen * capacity_percent // (experts * 100))


def route(logits: jax.Array, *, chosen: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """(dispatch weights (0 or 1), combine weights (gates)), both [b, s, e, c], from router logits [b, s, e].

    A token's gates are the softmax over its ``chosen`` largest logits. Within a batch row, an expert takes tokens in
    order and drops those beyond its capacity. (GShard takes all first choices first. A later token can then push out an
    earlier one, so a causal model would see its future.)
    """
    experts = logits.shape[-1]
    mask = jnp.zeros_like(logits)
    for _ in range(chosen):
        # One argmax after another, as in GShard. For a top-k, XLA would gather a batch that is split.
        best = jnp.argmax(jnp.where(mask > 0, -jnp.inf, logits), axis=-1)
        mask = mask + jax.nn.one_hot(best, experts, dtype=logits.dtype)
    gates = jax.nn.softmax(jnp.where(mask > 0, logits, -1e30), axis=-1)
    slot = (jnp.cumsum(mask, axis=1) - mask).astype(jnp.int32)
    # A slot beyond the capacity has no column in the one-hot: the token is dropped.
    dispatch = mask[..., None] * jax.nn.one_hot(slot, capacity, dtype=jnp.float32)
    return dispatch, gates[..., None] * dispatch


def experts_forward(x: jax.Array, p: Weights, *, chosen: int, capacity_percent: int) -> jax.Array:
    """Send each token of x [b, s, d] to its experts, and add up their results weighted by its gates.

    Letters: e expert, c slot, f hidden. A dropped token gets zeros from that expert.
    """
    seq, experts = x.shape[1], p["router"].shape[-1]
    logits = jnp.einsum("bsd,de->bse", x.astype(jnp.float32), p["router"])
    dispatch, combine = route(logits, chosen=chosen, capacity=slots(seq, experts, chosen, capacity_percent))
    inputs = jnp.einsum("bsec,bsd->ebcd", dispatch.astype(x.dtype), x)
    gate = jnp.einsum("ebcd,edf->ebcf", inputs, p["gate"].astype(x.dtype))
    up = jnp.einsum("ebcd,edf->ebcf", inputs, p["up"].astype(x.dtype))
    outputs = jnp.einsum("ebcf,efd->ebcd", silu(gate) * up, p["down"].astype(x.dtype))
    return jnp.einsum("bsec,ebcd->bsd", combine.astype(x.dtype), outputs)
