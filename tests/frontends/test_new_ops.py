"""A new op of each framework touches one place: its rule, here in a test, which is then traced, listed and priced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from pase.frontends import jax_rules, registry
from pase.ir import from_text, to_text
from pase.ir.functions import FUNCTIONS, Function

SWISH = Function(name="test_swish", flops=11.0)
SHAPE = (8, 16)


@pytest.fixture
def swish() -> Iterator[Function]:
    """A function that the table lacks: one line."""
    yield FUNCTIONS.add(SWISH.name, SWISH)
    FUNCTIONS.remove(SWISH.name)


def check(traced: registry.Traced, framework: str, op: str) -> None:
    """The op is there with its function and its FLOPs, survives the text form, and ``pase ops`` lists it."""
    found = [o for n in traced.graph.nodes for o in n.ops if o.function is SWISH]
    assert [o.flops_per_point for o in found] == [11.0]
    assert from_text(to_text(traced.graph)) == traced.graph
    assert op in registry.FRONTENDS[framework].coverage()["elementwise"]


def test_jax(swish: Function) -> None:
    primitive = Primitive("test_swish")
    primitive.def_abstract_eval(lambda x: x)
    jax_rules.RULES.add("test_swish", jax_rules.Elementwise(swish))
    try:
        spec = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        check(registry.trace(lambda p, x: jnp.sum(primitive.bind(x * p)), spec, spec), "jax", "test_swish")
    finally:
        jax_rules.RULES.remove("test_swish")


def test_tensorflow(swish: Function) -> None:
    tf = pytest.importorskip("tensorflow")
    from pase.frontends import tf_rules

    # An op of TensorFlow's, whose own rule is taken out for the while.
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
    from pase.frontends import onnx_rules

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
