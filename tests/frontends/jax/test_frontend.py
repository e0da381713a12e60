"""Programs that users write are traced, simplified and verified, with the expected remarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.jax.frontend import UnknownOp, trace
from pase.ir import simplify, verify
from tests.frontends.jax.cases import CASES, W, X, graphs
from tests.ir.graphs import flops
from tests.ir.test_simplify import check

ROWS = 8 * 16


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


SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
MYSTERY = jax.extend.core.Primitive("mystery")
MYSTERY.def_abstract_eval(lambda a: a)


def by_hand(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(MYSTERY.bind(x) @ w)


def test_unknown_primitive_names_op_and_line() -> None:
    with pytest.raises(UnknownOp) as e:
        trace(by_hand, SQUARE, SQUARE)
    line = by_hand.__code__.co_firstlineno + 1
    assert "'mystery'" in e.value.what
    assert f"{Path(__file__).name}:{line}" in e.value.where and "(by_hand)" in e.value.where
    assert "unknown='replicate'" in e.value.fix and "frontends/jax/rules.py" in e.value.fix


def test_unknown_may_be_replicated() -> None:
    graph = simplify(trace(by_hand, SQUARE, SQUARE, unknown="replicate").graph)
    (remark,) = graph.remarks
    assert remark.kind == "unknown" and "test_frontend.py" in remark.where
    (node,) = [n for n in verify(graph).nodes if n.main.name == "mystery"]
    assert {d.kind for d in node.space} == {"replicated"}


def total(p: Any, *batch: Any) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((p, batch)))


@pytest.mark.parametrize(
    ("fn", "params", "message"),
    [
        (lambda p: 1.0, SQUARE, "loss does not depend on any parameter"),
        (lambda p: jnp.sum(jax.lax.stop_gradient(p)), SQUARE, "loss does not depend on any parameter"),
        (total, {"a.b": SQUARE, "a": {"b": SQUARE}}, "two parameters have the path 'a.b'"),
    ],
)
def test_bad_input(fn: Callable[..., Any], params: Any, message: str) -> None:
    with pytest.raises(PaseError) as e:
        trace(fn, params)
    assert message in str(e.value)
    assert "\n" not in str(e.value).partition("on these shapes")[0]
