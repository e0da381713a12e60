"""A model is read by what it is: a graph, a file, a Keras model, a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

from pase.errors import PaseError
from pase.frontends.tf.read import read_source
from tests.frontends.tf.graphs import graph

PRODUCT = ("y", "MatMul", ["x", "w"], {"T": tf.float32})


def inputs(source: Any) -> dict[str, tuple[int, ...]]:
    return {spec.name: tuple(spec.shape) for spec in source.inputs.values()}


def test_each_form_of_one_model_has_the_same_inputs(tmp_path: Path) -> None:
    whole = graph(PRODUCT)
    file = tmp_path / "model.pb"
    file.write_bytes(whole.SerializeToString())
    image = keras.Input((4,), name="x")
    layer = keras.Model(image, keras.layers.Dense(4)(image))
    w = tf.Variable(tf.ones((4, 4)))
    function = tf.function(lambda x: x @ w)
    forms: list[tuple[Any, tuple[Any, ...], dict[str, int]]] = [
        (whole, (), {}),
        (file, (), {}),
        (str(file), (), {}),
        (layer, (), {"batch": 4}),
        (function, (tf.TensorSpec((4, 4), name="x"),), {}),
    ]
    for model, args, dims in forms:
        assert inputs(read_source(model, args, None, dims)) == {"x": (4, 4)}, model


def test_a_file_takes_no_example_arguments(tmp_path: Path) -> None:
    with pytest.raises(PaseError, match="takes no example arguments") as e:
        read_source(tmp_path / "m.pb", (1,), None, {})
    assert e.value.where == str(tmp_path / "m.pb")
