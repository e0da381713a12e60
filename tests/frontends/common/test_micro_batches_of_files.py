"""ONNX files and TensorFlow functions: their graphs on two sizes of batch say how micro-batches combine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pase.frontends.common.micro_batches import micro_sums
from pase.frontends.registry import NotInParts, Traced, trace
from pase.ir import named, simplify

pytest.importorskip("onnx")
pytest.importorskip("tensorflow")

B = 16


def shares(of_batch: Any) -> list[int]:
    """The power of each result's share in the whole batch, from the graphs of 16 and of 4 examples: 1 for a mean, 0
    for a sum."""
    whole, part = of_batch(B), of_batch(4)
    graph = named(simplify(part.graph))
    return list(micro_sums(whole, part, graph, 4, of_batch, state_of_whole=True).outputs.values())


def onnx_loss(*lines: str) -> Any:
    """A file with the batch's size as a symbol: a loss of y = x @ w, with x [B 8] and w [8 8]."""
    from onnx import numpy_helper, parser

    text = f"""<ir_version: 8, opset_import: ["": 18]>
        loss (float[B,8] x) => (float loss) {{ y = MatMul(x, w) {" ".join(lines)} }}"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8), np.float32), "w"))

    def of_batch(examples: int) -> Traced:
        return trace(model, dims={"B": examples})

    return of_batch


_SIZE = (
    "s = Shape(x)",
    "zero = Constant<value_int = 0>()",
    "one = Constant<value_int = 1>()",
    "b = Gather(s, zero)",
)
_PLACES = ("ones = Constant<value_ints = [1]>()", "i = Range(zero, b, one)", "f = Cast<to = 1>(i)")
_BY_PLACE = (*_SIZE, *_PLACES, "r = ReduceSum<keepdims = 0>(y, ones)", "z = Mul(r, f)")
_MEAN, _SUM = (f"loss = Reduce{how}<keepdims = 0>(z)" for how in ("Mean", "Sum"))


def test_onnx() -> None:
    by_size = ("c = Cast<to = 1>(b)", "t = ReduceSum<keepdims = 0>(y)", "loss = Div(t, c)")
    assert shares(onnx_loss("z = Mul(y, y)", _MEAN)) == shares(onnx_loss(*_SIZE, *by_size)) == [1]
    assert shares(onnx_loss("z = Mul(y, y)", _SUM)) == [0]
    for loss in (("z = Softmax<axis = 0>(y)", _MEAN), (*_BY_PLACE, _MEAN)):
        with pytest.raises(NotInParts, match="meet in"):
            shares(onnx_loss(*loss))


def tf_loss(of: Any) -> Any:
    import tensorflow as tf

    w = tf.Variable(tf.ones((8, 8)), name="w")

    def of_batch(examples: int) -> Traced:
        function = tf.function(lambda x: of(tf, x @ w, examples))
        return trace(function.get_concrete_function(tf.TensorSpec((examples, 8), tf.float32, name="x")))

    return of_batch


def test_tensorflow() -> None:
    assert shares(tf_loss(lambda tf, y, n: tf.reduce_mean(y * y))) == [1]
    assert shares(tf_loss(lambda tf, y, n: tf.reduce_sum(y * y) / n)) == [1]
    assert shares(tf_loss(lambda tf, y, n: tf.reduce_sum(y * y))) == [0]
    for loss in (
        lambda tf, y, n: tf.reduce_mean(tf.nn.softmax(y, 0) * y),
        lambda tf, y, n: tf.reduce_mean(y * tf.range(n, dtype=tf.float32)[:, None]),
        lambda tf, y, n: tf.reduce_mean(tf.roll(y, n // 4, 1)[:, :3]),
        lambda tf, y, n: tf.reduce_mean(y * y if n > 4 else y),
    ):
        with pytest.raises(NotInParts):
            shares(tf_loss(loss))
