"""Ops that move data in TensorFlow."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace
from tests.frontends.tf.cases import W, X


def test_operands_that_must_be_known_are_refused() -> None:
    by_data = tf.function(
        lambda x: tf.reduce_sum(tf.reshape(x, tf.cast(x[0, 0, :2], "int32")) @ W), autograph=False
    )
    with pytest.raises(PaseError, match="computed from data") as e:
        trace(by_data, X)
    assert "'Reshape' at Reshape" in e.value.where and "shape" in e.value.what and "constant" in e.value.fix
    ragged = tf.function(
        lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0)) + tf.reduce_sum(W), autograph=False
    )
    with pytest.raises(PaseError, match="'Where' at"):
        trace(ragged, X)
