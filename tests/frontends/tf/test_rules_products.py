"""Products in TensorFlow."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from tests.frontends.tf.cases import W, X, nodes_of


def test_flattened_products_keep_their_dims() -> None:
    """Keras flattens batch and sequence before a matrix product. The loop nest has both dims."""
    nodes = nodes_of(lambda x: tf.tensordot(x, W, 1), X)
    (product,) = [n for n in nodes if n.kind == "matmul"]
    assert product.ops[0].einsum == "m0 m1 k0, k0 n1 -> m0 m1 n1"
    assert not [n for n in nodes if n.kind == "view"]
