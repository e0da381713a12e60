"""Products in TensorFlow."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from pase.frontends.tf.rules_products import merged
from tests.frontends.common.site import OneOp
from tests.frontends.tf.cases import W, X, nodes_of


def test_flattened_products_keep_their_dims() -> None:
    """Keras flattens batch and sequence before a matrix product. The loop nest has both dims."""
    nodes = nodes_of(lambda x: tf.tensordot(x, W, 1), X)
    (product,) = [n for n in nodes if n.kind == "matmul"]
    assert product.ops[0].einsum == "m0 m1 k0, k0 n1 -> m0 m1 n1"
    assert not [n for n in nodes if n.kind == "view"]


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((24,), [(0, 1, 2)]),
        ((6, 4), [(0, 1), (2,)]),
        ((2, 12), [(0,), (1, 2)]),
        ((4, 6), None),
        ((2, 3, 2, 2), None),
    ],
)
def test_a_reshape_is_the_dims_that_it_merges_or_made(shape: tuple[int, ...], dims: Any) -> None:
    c = OneOp()
    assert merged(c.reshape(c.input(2, 3, 4), shape)) == dims
