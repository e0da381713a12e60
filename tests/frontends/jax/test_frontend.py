"""Programs that users write are traced, simplified and verified, with the expected remarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify, verify
from tests.frontends.jax.cases import CASES, W, X
from tests.ir.graphs import flops
from tests.ir.test_simplify import check

ROWS = 8 * 16


def graphs(name: str, **options: Any) -> tuple[Graph, Graph]:
    loss, params, batch = CASES[name]()
    if name == "no_batch":
        batch = ()
    raw = verify(trace(loss, params, *batch, name=name, **options).graph)
    return raw, verify(named(simplify(raw)))


@pytest.mark.parametrize("name", CASES)
def test_traces(name: str) -> None:
    raw, graph = graphs(name)
    check(raw, simplify(raw))
    assert all(op.source for n in graph.nodes if n.kind not in ("parameter", "input") for op in n.ops)


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("linen_attention", 4 * 2 * ROWS * 32 * 32 + 2 * 2 * 8 * 16 * 16 * 32 + 2 * ROWS * 32 * 64),
        ("linen_scan_remat", 4 * 2 * 2 * ROWS * 32 * 64),
        ("nnx_attention", 4 * 2 * ROWS * 32 * 32 + 2 * 2 * 8 * 16 * 16 * 32),
        ("equinox_mlp", 2 * 8 * (32 * 64 + 64 * 64 + 64 * 10)),
        ("equinox_gru", 2 * 2 * ROWS * 32 * 96),
        ("nested_scan", 4 * (1 + 3) * 2 * ROWS * 32 * 32),
        ("map", 2 * ROWS * 32 * 32),
        ("ragged", 2 * 128 * 32 * 64),
        ("fori", 3 * 2 * ROWS * 32 * 32),
        ("gradient_inside", 2 * 2 * ROWS * 32 * 32),
        (
            "custom_vjp",
            2 * 2 * ROWS * 32 * 32,
        ),  # its rule computes the gradient of the weights with one more product
        ("convolutions", 2 * 8 * 9 * (16 * 16 * 4 * 16 + 6 * 6 * 16 * 8 + 16 * 16 * 16 * 8)),
    ],
)
def test_products(name: str, products: float) -> None:
    assert flops(graphs(name)[1], "matmul", "conv", "attention") == products


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        (
            "linen_attention",
            {"params.MultiHeadDotProductAttention_0.query.kernel:dot", "params.Dense_0.kernel:dot"},
        ),
        ("linen_conv_batchnorm_dropout", {"Conv_0.kernel:conv", "Dense_0.kernel:dot"}),
        ("nnx_model", {"conv.kernel.value:conv", "dense.kernel.value:dot"}),
        ("equinox_mlp", {"layers.0.weight:dot", "layers.2.weight:dot"}),
        ("equinox_gru", {"weight_ih:dot", "weight_hh:dot"}),
        ("attention", {"params:dot", "attention@_attention"}),
    ],
)
def test_names(name: str, nodes: set[str]) -> None:
    assert nodes <= set(graphs(name)[1].node)


def test_batches_of_matrices_may_be_split() -> None:
    raw, _ = graphs("fft")
    (fft,) = [n for n in raw.nodes if n.main.name == "fft"]
    assert [d.kind for d in fft.space][:2] == ["parallel", "parallel"]
    assert {d.kind for d in list(fft.space)[2:]} == {"replicated"}
    (svd,) = [n for n in graphs("linalg")[0].nodes if n.main.name == "svd"]
    assert svd.space.dims[0].kind == "parallel" and svd.space.dims[0].size == 8


def test_printing_is_free() -> None:
    assert not [n for n in graphs("debug_print")[0].nodes if "debug" in n.main.name]


def test_random_keys_are_no_nodes() -> None:
    assert not [n for n in graphs("random")[1].nodes if n.kind == "opaque"]


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, {"dot_general", "tanh"}),
        (jax.checkpoint_policies.dots_saveable, {"tanh"}),
        (jax.checkpoint_policies.everything_saveable, set()),
        (jax.checkpoint_policies.nothing_saveable, {"dot_general", "tanh"}),
    ],
)
def test_remat_policies_are_asked(policy: Any, again: set[str]) -> None:
    body = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)
    graph = trace(lambda p, x: jnp.sum(body(x, p)), W, X).graph
    assert {op.name for n in graph.nodes for op in n.ops if op.remat} == again


def test_sources_are_the_users_lines() -> None:
    def loss(p: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ p)
        return jnp.sum(jax.nn.relu(hidden))

    first = loss.__code__.co_firstlineno
    graph = trace(loss, W, X).graph
    lines = {n.main.name: n.source.place for n in graph.nodes if n.kind not in ("parameter", "input")}
    assert f"test_frontend.py:{first + 1}" in lines["dot_general"]
    assert {n.source.name for n in graph.nodes if n.main.name == "tanh"} == {"loss"}
    assert f"test_frontend.py:{first + 1}" in lines["tanh"]
    assert f"test_frontend.py:{first + 2}" in lines["max"]


def test_unknown_ops_run_replicated_in_a_sharded_step() -> None:
    """End to end: an op without a rule is computed whole on every device, and the numbers equal those of one device."""
    import pase.api

    def loss(p: Any, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((16, 8), jnp.float32)
        halved = jax.pure_callback(lambda a: np.asarray(a) / 2, shape, jax.lax.stop_gradient(x))
        return jnp.mean((jnp.tanh((x + halved) @ p["a"]) @ p["b"]) ** 2)

    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for k in "ab"}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    plan = pase.api.compile(loss, params, x, devices=4, unknown="replicate")
    mesh = plan.jax.mesh(jax.devices()[:4])
    got, grads = jax.jit(plan.jax.value_and_grad(mesh))(*plan.jax.device_put(params, x, mesh=mesh))
    wanted, wanted_grads = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for k in "ab":
        np.testing.assert_allclose(grads[k], wanted_grads[k], rtol=1e-4, atol=1e-6)
