"""Control flow of version 1."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from pase.frontends.tf.frontend import trace
from tests.frontends.tf.graphs import graph


def test_a_version_1_conditional_has_both_branches() -> None:
    choice = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(True))
    t = trace(
        graph(
            ("p", "Const", [], {"value": choice}),
            ("s", "Switch", ["x", "p"], {}),
            ("a", "MatMul", ["s:1", "w"], {"T": tf.float32}),
            ("b", "Exp", ["s:0"], {"T": tf.float32}),
            ("m", "Merge", ["b", "a"], {"T": tf.float32}),
        )
    )
    names = [n.ops[0].name for n in t.graph.nodes]
    assert {"MatMul", "Exp", "Merge"} <= set(names)
    assert t.graph.tensors[t.graph.outputs[0]].shape == (4, 4)
