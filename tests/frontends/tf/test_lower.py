"""Graphs as they are lowered: unknown ops, and dims so large that nothing may be allocated."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from pase.frontends.registry import UnknownOp
from pase.frontends.tf.frontend import trace
from pase.ir import simplify
from tests.frontends.tf.graphs import graph, refused

PRODUCT = ("y", "MatMul", ["x", "w"], {"T": tf.float32})


def test_huge_dims_cost_no_memory() -> None:
    huge = 2**40
    t = trace(graph(PRODUCT, shape=(huge, 4)))
    assert t.graph.inputs[0].shape == (huge, 4)
    dims = tf.make_tensor_proto([huge, huge], "int64")
    const: Any = ("d", "Const", [], {"value": tf.compat.v1.AttrValue(tensor=dims)})
    zero: Any = ("z", "Const", [], {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(0.0))})
    t = trace(
        graph(
            const,
            zero,
            ("f", "Fill", ["d", "z"], {}),
            ("s", "Max", ["f", "a"], {}),
            ("a", "Range", ["i0", "i2", "i1"], {}),
            *(
                (f"i{k}", "Const", [], {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(k))})
                for k in range(3)
            ),
            PRODUCT,
            ("o", "Add", ["y", "s"], {}),
        )
    )
    assert t.graph.outputs


def test_unknown_ops() -> None:
    g = graph(("y", "MyCustomOp", ["x", "w"], {}))
    with pytest.raises(UnknownOp) as e:
        trace(g)
    assert "'MyCustomOp' at y" in e.value.where and "unknown='replicate'" in e.value.fix
    refused(g, "'MyCustomOp' at y", "static shape", unknown="replicate")
    g.node[2].attr["_output_shapes"].list.shape.add().CopyFrom(tf.TensorShape((4, 4)).as_proto())
    traced = trace(g, unknown="replicate")
    assert [(r.kind, "MyCustomOp" in r.what) for r in traced.graph.remarks] == [("unknown", True)]
    (node,) = [n for n in simplify(traced.graph).nodes if n.main.name == "MyCustomOp"]
    assert {d.kind for d in node.space} == {"replicated"}
