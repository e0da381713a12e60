"""Ops that move data in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: tf.gather(W, [1, 8]), "8 is not in a dim of 8"),
        (lambda: tf.gather(W, [[1], [-1]], axis=1), "-1 is not"),
        (lambda: tf.gather_nd(W, [[0, 9]]), "9 is not"),
        (lambda: tf.tensor_scatter_nd_update(W, [[8]], W[:1]), "8 is not"),
    ],
)
def test_known_indices_outside_of_their_dim_are_refused(read: Callable[[], tf.Tensor], said: str) -> None:
    """TensorFlow raises an error on CPUs; on GPUs it reads zeros, and drops what is written."""
    step = tf.function(lambda x: tf.reduce_sum(read()) + tf.reduce_sum(x @ W), autograph=False)
    with pytest.raises(PaseError, match=said) as e:
        trace(step, X)
    assert "Gather" in e.value.where or "Scatter" in e.value.where
