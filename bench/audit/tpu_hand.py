"""ZeRO-3 for the zoo's GPT as an expert writes it: a baseline of bench/audit/tpu.py.

Parameters, gradients and optimizer state are sharded over all devices. A weight is cast to bfloat16 and gathered where
the block uses it. Activations are split over the batch at the block's entry and after the embedding. The arithmetic is
that of the zoo (pase/zoo/transformers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pase.zoo.attention import attend
from pase.zoo.layers import cross_entropy, layer_norm, run_layers


def lower(model: Any, mesh: Mesh, optimizer: Any) -> Any:
    """Returns the train step of a zoo GPT (``zoo.get``) on a mesh of one axis, lowered on shapes."""
    (axis,) = mesh.axis_names
    ways = mesh.devices.size
    whole = NamedSharding(mesh, P())
    stored = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, ways, axis)), model.params
    )
    params = jax.tree.map(_struct, model.params, stored)
    state = jax.eval_shape(optimizer.init, model.params)
    state_stored = optax.tree_map_params(
        optimizer, lambda _, s: s, state, stored, transform_non_params=lambda _: whole
    )
    batch = jax.tree.map(lambda leaf: _struct(leaf, NamedSharding(mesh, P(axis))), model.batch)
    loss = _loss(mesh, axis, scan=model.settings["scan"], remat=model.settings["remat"])

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, stored)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    jitted = jax.jit(step, out_shardings=(stored, state_stored, whole), donate_argnums=(0, 1))
    return jitted.lower(params, jax.tree.map(_struct, state, state_stored), batch)


def _struct(leaf: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _spec(path: Any, shape: tuple[int, ...], ways: int, axis: str) -> P:
    """Returns the spec: matrices are split over all devices along their longest divisible dim (not that of the layers),
    vectors are replicated."""
    first = 1 if any(getattr(k, "key", None) == "blocks" for k in path) else 0
    dims = [i for i in range(first, len(shape)) if shape[i] % ways == 0]
    if len(shape) - first < 2 or not dims:
        return P()
    longest = max(dims, key=lambda i: shape[i])
    return P(*[axis if i == longest else None for i in range(len(shape))])


def _loss(mesh: Mesh, axis: str, *, scan: int, remat: int) -> Callable[[Any, Any], Any]:
    dtype = jnp.bfloat16

    def use(w: Any) -> Any:
        return jax.lax.with_sharding_constraint(w.astype(dtype), NamedSharding(mesh, P()))

    def split(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(axis)))

    def attention(x: Any, p: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, use(p[f"w{c}"])) + p[f"b{c}"].astype(dtype) for c in "qkv")
        return jnp.einsum("bshk,hkd->bsd", attend(q, k, v, causal=True), use(p["wo"])) + p["bo"].astype(dtype)

    def feed_forward(x: Any, p: Any) -> Any:
        h = jax.nn.gelu(jnp.einsum("bsd,df->bsf", x, use(p["w1"])) + p["b1"].astype(dtype))
        return jnp.einsum("bsf,fd->bsd", h, use(p["w2"])) + p["b2"].astype(dtype)

    def block(x: Any, p: Any) -> Any:
        x = split(x)
        x = x + attention(layer_norm(x, p["norm1"]), p["attention"])
        return x + feed_forward(layer_norm(x, p["norm2"]), p["ff"])

    def loss(params: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        table = use(params["wte"])
        x = jnp.take(table, tokens, axis=0, mode="clip") + use(params["wpe"])[: tokens.shape[1]]
        x = run_layers(block, split(x), params["blocks"], scan=scan, remat=remat)
        x = layer_norm(split(x), params["norm"])
        logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)
        return cross_entropy(logits, batch["labels"])

    return loss
