"""A new op of a framework needs changes in one place, its rule. Here a test adds it, and it is traced, listed,
priced, and run by the oracle on parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import pase
from pase import costmodels, machine
from pase.frontends import registry
from pase.frontends.jax import rules as jax_rules
from pase.ir import AccessMap, DimKind, Tensor, from_text, functions, named, simplify, to_text
from pase.ir.functions import FUNCTIONS, Function
from pase.local.functions import COMPUTED, SLOPES
from pase.local.interpret import loss_and_gradients
from pase.local.lower import local_program
from pase.machine import Mesh
from pase.ops import GraphBuilder, nests
from pase.ops.builder import Computes, Read, Write
from pase.tables.itemize import collectives
from pase.tables.layouts import configs

SWISH = Function(name="test_swish", flops=11.0)
SHAPE = (8, 16)


@pytest.fixture
def swish() -> Iterator[Function]:
    """A function that is missing in the tables takes one line in each."""
    COMPUTED[SWISH.name] = lambda xp, x: x * xp.sigmoid(x)
    SLOPES[SWISH.name] = lambda i: lambda x, y: (1 + x - y) / (1 + np.exp(-x))
    yield FUNCTIONS.add(SWISH.name, SWISH)
    FUNCTIONS.remove(SWISH.name)
    del COMPUTED[SWISH.name], SLOPES[SWISH.name]


def check(traced: registry.Traced, framework: str, op: str) -> None:
    """The op has its function and its FLOPs, survives the text form, and is listed by ``pase ops``. On two devices, it
    has the value and the gradient of one."""
    found = [o for n in traced.graph.nodes for o in n.ops if o.function is SWISH]
    assert [o.flops_per_point for o in found] == [11.0]
    assert from_text(to_text(traced.graph)) == traced.graph
    assert op in registry.FRONTENDS[framework].coverage()["elementwise"]
    graph, mesh, rng = named(simplify(traced.graph)), Mesh(names=("a",), sizes=(2,)), np.random.default_rng(0)
    program = local_program(graph, mesh, {n.name: configs(n, mesh)[0] for n in graph.nodes})
    x, w = given = rng.normal(size=(2, *SHAPE))
    leaves = [t.name for t in (*graph.inputs, *graph.parameters)]
    value, gradients = loss_and_gradients(
        program, graph, dict(zip(leaves, given, strict=True)), graph.outputs[0]
    )
    share = 1 / (1 + np.exp(-x * w))
    made = x * w * share
    np.testing.assert_allclose(value, made if value.shape else made.sum(), rtol=1e-12)
    slope = share * (1 + x * w * (1 - share))
    for name, other in zip(leaves, (w, x), strict=True):
        if name in gradients:
            np.testing.assert_allclose(gradients[name], slope * other, rtol=1e-12)


def test_jax(swish: Function) -> None:
    primitive = Primitive("test_swish")
    primitive.def_abstract_eval(lambda x: x)
    jax_rules.RULES.add("test_swish", jax_rules.Elementwise(swish))
    try:
        spec = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        check(registry.trace(lambda p, x: jnp.sum(primitive.bind(x * p)), spec, spec), "jax", "test_swish")
    finally:
        jax_rules.RULES.remove("test_swish")


def _outer_sum(b: GraphBuilder, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """z[i, j] = x[i] + y[j]: a kind of nest that ``pase.ops.nests`` lacks. The rule mentions no gradients and no
    collectives."""
    dims: dict[str, tuple[Any, DimKind]] = {"i": (x.shape[0], "parallel"), "j": (y.shape[0], "parallel")}
    reads = [Read(x, AccessMap.of(("i",))), Read(y, AccessMap.of(("j",)))]
    write = Write((x.shape[0], y.shape[0]), x.dtype, AccessMap.of(("i",), ("j",)))
    return b.nest("outer_sum", "elementwise", reads, [write], dims, Computes(function=functions.ADD))


def test_a_kind_of_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one function it is listed, searched and priced. The all-reduces of both gradients follow from its maps."""
    monkeypatch.setattr(nests, "outer_sum", _outer_sum, raising=False)
    monkeypatch.setattr(nests, "__all__", [*nests.__all__, "outer_sum"])
    primitive = Primitive("test_outer_sum")
    primitive.def_abstract_eval(lambda x, y: x.update(shape=(*x.shape, *y.shape)))

    def loss(params: Any, _: Any) -> Any:
        return jnp.sum(jnp.square(primitive.bind(params["x"], params["y"])))

    @jax_rules.lowers("test_outer_sum")
    def rule(b: GraphBuilder, eqn: Any, inputs: Any) -> Any:
        return nests.outer_sum(b, *inputs)  # type: ignore[attr-defined]

    params = {k: jax.ShapeDtypeStruct((n,), jnp.float32) for k, n in (("x", 64), ("y", 32))}
    batch = jax.ShapeDtypeStruct((4,), jnp.float32)
    try:
        graph = named(simplify(registry.trace(loss, params, batch).graph))
        assert "test_outer_sum" in registry.FRONTENDS["jax"].coverage()["outer_sum"]
        plan = pase.compile(loss, params, batch, devices=4, machine="h100x8")
    finally:
        jax_rules.RULES.remove("test_outer_sum")
    assert plan.cost > 0 and plan.optimal
    (node,) = (n for n in graph.nodes if any(o.name == "outer_sum" for o in n.ops))
    at = [d.name for d in node.space.dims].index(next(w.dims[0] for w in node.ops[0].reads[0].map.walks))
    mesh = Mesh(names=("a",), sizes=(4,))
    every = {n.name: configs(n, mesh) for n in graph.nodes}
    rows = next(k for k, c in enumerate(every[node.name]) if c[0] == at)
    split = {n: c[rows] if n == node.name else c[0] for n, c in every.items()}
    model = costmodels.get("analytic", machine.load("h100x8"))
    found = [
        c for c in collectives(graph, mesh, split, model) if c.kind == "all_reduce" and c.phase != "forward"
    ]
    assert [c.nbytes for c in found] == [
        32 * 4
    ]  # y's gradient is summed over the rows; x's gradient stays where it is


def test_tensorflow(swish: Function) -> None:
    tf = pytest.importorskip("tensorflow")
    from pase.frontends.tf import rules as tf_rules

    # A TensorFlow op whose rule is removed during the test.
    op = "Rint"
    known = tf_rules.RULES[op]
    tf_rules.RULES.remove(op)
    tf_rules.RULES.add(op, partial(tf_rules.pointwise, swish))
    try:
        w = tf.Variable(tf.zeros(SHAPE))
        f = tf.function(lambda x: tf.reduce_sum(tf.math.rint(x * w)), autograph=False)
        check(registry.trace(f, tf.TensorSpec(SHAPE)), "tensorflow", op)
    finally:
        tf_rules.RULES.remove(op)
        tf_rules.RULES.add(op, known)


def test_onnx(swish: Function) -> None:
    onnx = pytest.importorskip("onnx")
    from pase.frontends.onnx import rules as onnx_rules

    key = "my.domain:TestSwish"

    @onnx_rules.lowers(key)
    def rule(c: Any) -> Any:
        return c.elementwise([c.x()], swish)

    try:
        make, info = onnx.helper, onnx.helper.make_tensor_value_info
        weight = onnx.numpy_helper.from_array(np.zeros(SHAPE, np.float32), "w")
        nodes = [
            make.make_node("Mul", ["x", "w"], ["y"]),
            make.make_node("TestSwish", ["y"], ["z"], domain="my.domain"),
        ]
        ends = [[info(n, onnx.TensorProto.FLOAT, SHAPE)] for n in ("x", "z")]
        graph = make.make_graph(nodes, "g", *ends, [weight])
        opsets = [make.make_opsetid("", 20), make.make_opsetid("my.domain", 1)]
        check(registry.trace(make.make_model(graph, opset_imports=opsets)), "onnx", key)
    finally:
        onnx_rules.RULES.remove(key)


@pytest.mark.torch
def test_torch(swish: Function) -> None:
    import torch

    from pase.frontends.torch import rules as torch_rules

    lib = torch.library.Library("pase_new_op", "FRAGMENT")
    lib.define("swish(Tensor x) -> Tensor")
    lib.impl("swish", torch.empty_like, "Meta")

    @torch_rules.lowers("pase_new_op::swish")
    def rule(c: Any) -> Any:
        return c.elementwise([c.x("x")], swish)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(SHAPE, device="meta"))

        def forward(self, x: Any) -> Any:
            return torch.ops.pase_new_op.swish(x * self.weight).sum()

    try:
        check(registry.trace(Model(), torch.zeros(SHAPE, device="meta")), "torch", "pase_new_op::swish")
    finally:
        torch_rules.RULES.remove("pase_new_op::swish")
