"""Small GraphDefs for the tests of the TensorFlow frontend: frozen Keras models, and graphs built node by node."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace

__all__ = ["convnet", "frozen", "graph", "lstm", "refused", "transformer"]


def lstm(vocabulary: int = 50, width: int = 8, steps: int = 6) -> Any:
    """An LSTM language model: the loop is a While over TensorLists."""
    tokens = keras.Input((steps,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    x = keras.layers.LSTM(width, return_sequences=True)(x)
    x = keras.layers.LSTM(width)(x)
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(x), name="lstm")


def transformer(
    vocabulary: int = 64, width: int = 16, heads: int = 4, steps: int = 8, dropout: float = 0.1
) -> Any:
    tokens = keras.Input((steps,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(
        y, y, use_causal_mask=True
    )
    y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
    x = x + keras.layers.Dropout(dropout)(keras.layers.Dense(width)(y))
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(x), name="transformer")


def convnet() -> Any:
    images = keras.Input((16, 16, 3), name="images")
    x = keras.layers.Conv2D(8, 3, padding="same")(images)
    x = keras.layers.ReLU(6.0)(keras.layers.BatchNormalization()(x))
    y = keras.layers.DepthwiseConv2D(3, strides=2, padding="same")(x)
    z = keras.layers.AveragePooling2D(2)(keras.layers.ZeroPadding2D(1)(x))[:, 1:, 1:]
    x = keras.layers.Concatenate()([y, z])
    x = keras.layers.UpSampling2D(interpolation="bilinear")(x)
    x = keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.MaxPooling2D()(x))
    return keras.Model(images, keras.layers.Dense(10, activation="softmax")(x), name="convnet")


@cache
def frozen(name: str) -> Any:
    """A GraphDef with constants for variables: "lstm", "lstm v1" (loops as cycles), "transformer", "convnet"."""
    makers: dict[str, Any] = {"lstm": lstm, "transformer": transformer, "convnet": convnet}
    model = makers[name.partition(" ")[0]]()
    (x,) = model.inputs
    concrete = tf.function(lambda a: model(a, training=False)).get_concrete_function(
        tf.TensorSpec(x.shape, x.dtype)
    )
    made = convert_variables_to_constants_v2(concrete, lower_control_flow=name.endswith("v1"))
    return made.graph.as_graph_def()


def graph(*nodes: tuple[str, str, list[str], dict[str, Any]], shape: tuple[int, ...] = (4, 4)) -> Any:
    """A GraphDef of a placeholder "x" [4, 4], a weight "w" [4, 4], and these nodes: (name, op, inputs, attributes).

    An attribute is a number, a text, a flag, a list of numbers, or a DType.
    """
    out = tf.compat.v1.GraphDef()
    x = out.node.add(name="x", op="Placeholder")
    x.attr["dtype"].type = 1
    x.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    w = out.node.add(name="w", op="Const")
    w.attr["dtype"].type = 1
    w.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0.5, "float32", (4, 4)))
    for name, op, inputs, attrs in nodes:
        n = out.node.add(name=name, op=op, input=inputs)
        for key, value in attrs.items():
            if isinstance(value, bool):
                n.attr[key].b = value
            elif isinstance(value, int):
                n.attr[key].i = value
            elif isinstance(value, str):
                n.attr[key].s = value.encode()
            elif isinstance(value, list):
                n.attr[key].list.i.extend(value)
            elif isinstance(value, tf.DType):
                n.attr[key].type = value.as_datatype_enum
            else:
                n.attr[key].CopyFrom(value)
    return out


def refused(graph_def: Any, *words: str, **options: Any) -> None:
    """Assert that a graph is refused, by a message with these words."""
    with pytest.raises(PaseError) as e:
        trace(graph_def, **options)
    for word in words:
        assert word in str(e.value), str(e.value)
