"""The inputs of a graph: their names and shapes."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from pase.frontends.tf.frontend import trace
from tests.frontends.tf.graphs import graph, refused

PRODUCT = ("y", "MatMul", ["x", "w"], {"T": tf.float32})


def test_the_graph_itself_is_read() -> None:
    t = trace(graph(PRODUCT))
    assert (t.param_paths, t.input_paths, t.frontend) == (("w",), ("x",), "tensorflow")


def test_shapes() -> None:
    refused(graph(PRODUCT, shape=(4, 5)), "'MatMul' at y", "(4, 5)", "cannot be multiplied")
    refused(graph(PRODUCT, shape=(0, 4)), "'x'", "0 elements")
    unknown = graph(PRODUCT)
    unknown.node[0].attr["shape"].shape.dim[0].size = -1
    refused(unknown, "--dim batch=64", "'x'")
    assert trace(unknown, dims={"batch": 6}).graph.inputs[0].shape == (6, 4)
    assert trace(unknown, dims={"x.0": 6}).graph.inputs[0].shape == (6, 4)
    refused(unknown, "no dim 'rows'", "batch, x.0", dims={"rows": 3, "batch": 2})
    refused(unknown, "positive whole number", dims={"batch": 0})
