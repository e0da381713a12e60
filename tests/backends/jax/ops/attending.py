"""Shared by the tests of attention: a layer, its plans, and their difference from the definition."""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cases.plans import Case, case_of
from pase.api import Plan
from pase.compiler.meshes.plans import plan_of
from pase.machine import mesh_from
from pase.tables.layouts import NOT_SPLIT
from pase.zoo.attention import fused_attend

B, S, D, H, G, K = 4, 24, 8, 2, 4, 4
EXACT = 1e-12


def written_out(
    q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None = None, **_: Any
) -> jax.Array:
    """Attention by its definition, in the operands' own precision (JAX computes every softmax in float32)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * scale
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1), v)


def model(causal: bool, implementation: Any) -> Any:
    """A layer with attention, a residual connection and a loss. implementation: as JAX names it; fused: as the zoo's
    models request it; None: written out."""
    attend = written_out
    if implementation == "fused":
        attend = lambda q, k, v, is_causal: fused_attend(q, k, v, causal=is_causal)  # noqa: E731
    elif implementation is not None:
        attend = partial(jax.nn.dot_product_attention, implementation=implementation)

    def loss(params: Any, x: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[n]) for n in "qkv")
        y = attend(q, k, v, is_causal=causal)
        return jnp.mean((x + jnp.einsum("bshk,hkd->bsd", y, params["o"])) ** 2)

    return loss


def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (D, H * G, K), "k": (D, H, K), "v": (D, H, K), "o": (H * G, K, D)}
    params = {n: jnp.asarray(rng.normal(size=s)) for n, s in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(B, S, D)))


@cache
def case(causal: bool, implementation: str) -> Case:
    return case_of(model(causal, implementation), *arrays())


def planned(case: Case, split: dict[str, str], mesh: str) -> Plan:
    """The plan that splits only the attention. split: dim (b, q, h, g; r for queries and keys) -> its mesh axes."""
    p = case.problem
    m = mesh_from(mesh, p.devices)
    (node,) = (n for n in p.graph.nodes if n.kind == "attention")
    q, k = node.main.reads[0].map.walks, node.main.reads[1].map.walks
    (heads,) = k[2].dims
    (group,) = set(q[2].dims) - {heads}
    *ring, queries = q[1].dims
    dims = {"b": q[0].dims[0], "q": queries, "r": "".join(ring), "h": heads, "g": group}
    place = {a: i for i, a in enumerate(m.names)}
    index = {d.name: i for i, d in enumerate(node.space)}
    chosen = {n.name: np.full(len(m.sizes), NOT_SPLIT, np.int8) for n in p.graph.nodes}
    for dim, axes in split.items():
        for a in axes:
            chosen[node.name][place[a]] = index[dims[dim]]
    return Plan.of(plan_of(p, chosen, m, "model", case.traced))


def difference(plan: Plan, loss: Any) -> float:
    """The largest difference of the plan's loss and gradients from those of ``loss`` on one device, relative to the
    largest gradient."""
    params, x = arrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = jax.jit(plan.jax.value_and_grad(), in_shardings=plan.jax.in_shardings())
        got = step(*plan.jax.device_put(params, x))
    want = jax.value_and_grad(loss)(params, x)
    most = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want[1]))
    off = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), got, want)
    return max(jax.tree.leaves(off)) / most
