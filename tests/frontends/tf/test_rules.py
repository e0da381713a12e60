"""Every rule gives the shapes and dtypes that TensorFlow gives, op by op, and allows the right splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from pase.frontends.tf import frontend as from_tf
from pase.frontends.tf.frontend import TracedTf, trace
from pase.frontends.tf.rules import RULES
from pase.ir import Place, simplify, verify
from tests.frontends.tf.cases import CASES, IDS, IMAGES, W, X, nodes_of


def traced(name: str) -> TracedTf:
    spec, f = CASES[name]

    @tf.function(autograph=False)
    def loss(x: Any) -> Any:
        ys = f(x * (1.0 if x.dtype.is_floating else 1))
        return tf.add_n([tf.reduce_sum(tf.cast(y, "float32")) for y in ys]) + tf.reduce_sum(W)

    return trace(loss, spec)


@pytest.mark.parametrize("name", sorted(CASES))
def test_shapes_and_dtypes(name: str) -> None:
    """Every result of every node has the shape that TensorFlow infers, and the graph is sound."""
    t = traced(name)
    compared = 0
    for node in t.program.main.nodes:
        if node.op in ("Placeholder", "ReadVariableOp", "While") or node.op.startswith("TensorList"):
            continue
        for k, made in enumerate(t.results[Place(node.name)]):
            wanted = node.hint(k)
            if made and wanted is not None and None not in wanted:
                assert t.graph.tensors[made].shape == wanted, (node.name, node.op)
                compared += 1
    assert compared > 2
    verify(simplify(t.graph))


def test_what_may_be_split() -> None:
    def kinds(f: Callable[[Any], Any], spec: tf.TensorSpec, op: str) -> list[str]:
        node = next(n for n in nodes_of(f, spec) if n.ops[0].name == op)
        return [d.kind for d in node.space]

    assert kinds(lambda x: tf.cumsum(x, 1), X, "Cumsum") == ["parallel", "replicated", "parallel"]
    assert kinds(lambda x: tf.nn.softmax(x), X, "reduce_max") == ["parallel", "parallel", "reduction"]
    assert kinds(lambda x: tf.argmax(x, -1), X, "ArgMax") == ["parallel", "parallel", "replicated"]
    assert kinds(lambda x: tf.gather(W, x), IDS, "gather")[-1] == "reduction"  # the table's rows
    assert "replicated" not in kinds(lambda x: tf.one_hot(x, 5), IDS, "OneHot")
    assert kinds(lambda x: tf.image.resize(x, (4, 4)), IMAGES, "ResizeBilinear").count("replicated") == 4


def test_coverage_lists_every_rule() -> None:
    listed = {op for ops in from_tf.coverage().values() for op in ops}
    assert set(RULES) <= listed
