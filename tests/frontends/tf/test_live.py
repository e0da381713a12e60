"""Keras models and functions of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
import keras
import tensorflow as tf

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace
from pase.ir import named, simplify
from tests.frontends.tf.graphs import transformer
from tests.ir.graphs import flops

BATCH = {"batch": 4}


def test_a_compiled_keras_model_brings_its_loss() -> None:
    model = transformer()
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    traced = trace(model, dims=BATCH)
    assert "labels" in traced.input_paths and traced.graph.tensors[traced.graph.outputs[0]].shape == ()


def test_functions_and_control_flow() -> None:
    w = tf.Variable(tf.ones((32, 32)), name="w")
    x = tf.TensorSpec((8, 32), name="x")

    @tf.function
    def counted(a: Any) -> Any:
        for _ in tf.range(10):
            a = tf.tanh(a @ w)
        return tf.reduce_sum(a)

    @tf.function
    def by_data(a: Any) -> Any:
        a = tf.cond(tf.reduce_sum(a) > 0, lambda: tf.tanh(a @ w @ w), lambda: a @ w)
        return tf.reduce_sum(tf.while_loop(lambda b: tf.reduce_sum(b) > 3.0, lambda b: [b @ w], [a])[0])

    @tf.function
    def step(a: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(a @ w))
        w.assign_sub(tape.gradient(loss, w))
        return loss

    product = 2.0 * 8 * 32 * 32
    assert flops(trace(counted, x).graph, "matmul") == 10 * product
    regions = [op for n in trace(by_data, x).graph.nodes for op in n.ops if op.kind == "opaque"]
    assert [op.flops_per_point >= times * product for op, times in zip(regions, (2, 1), strict=True)] == [
        True
    ] * 2
    assert {d.kind for n in trace(by_data, x).graph.nodes if n.kind == "opaque" for d in n.space} == {
        "replicated"
    }
    assert flops(trace(step, x).graph, "matmul") == product  # pase derives backward itself
    graph = named(simplify(trace(step, x).graph))
    assert {"w", "in.x", "w:dot"} <= {n.name for n in graph.nodes}
    assert any(f"{Path(__file__).name}:" in n.source.place for n in graph.nodes)
    with pytest.raises(PaseError, match="example arguments") as e:
        trace(counted)
    assert e.value.where == "counted" and "tf.TensorSpec" in e.value.fix
