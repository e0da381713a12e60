"""Padding is added, cut off and filled, and no gradient flows out of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.jax.padding.walk import PaddedValue, PaddedWalk

WALK = PaddedWalk(sizes={3: 4, 5: 8})
AVAL = jax.ShapeDtypeStruct((3, 5, 7), jnp.float32)
X = np.arange(3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7)


def padded() -> PaddedValue:
    return WALK.widened(PaddedValue(jnp.asarray(X)), AVAL)


def test_missing_padding_is_zero() -> None:
    wide = padded()
    assert WALK.wide(AVAL) == wide.array.shape == (4, 8, 7)
    np.testing.assert_array_equal(wide.array, np.pad(X, [(0, 1), (0, 3), (0, 0)]))
    assert wide.zero == {0, 1} == WALK.padded_dims(wide, AVAL)
    assert WALK.widened(wide, AVAL) is wide
    np.testing.assert_array_equal(WALK.widened(PaddedValue(X), AVAL).array, wide.array)  # type: ignore[arg-type]


def test_padding_of_some_dims_is_cut_off() -> None:
    cut = WALK.cut(padded(), AVAL, [1, 2])
    np.testing.assert_array_equal(cut.array, np.pad(X, [(0, 1), (0, 0), (0, 0)]))
    assert cut.zero == {0} and WALK.cut(cut, AVAL, [1]) is cut


def test_padding_is_filled_in_the_dims_that_are_named() -> None:
    filled = WALK.masked(padded(), AVAL, [1], -9.0)
    wanted = np.pad(X, [(0, 1), (0, 3), (0, 0)])
    wanted[:, 5:] = -9
    np.testing.assert_array_equal(filled.array, wanted)
    assert not filled.zero and WALK.masked(filled, AVAL, [0, 1], 0).zero == {0, 1}


def test_no_gradient_flows_out_of_the_padding() -> None:
    wide = padded().array

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(WALK.masked(PaddedValue(x), AVAL, [0, 1], 1.0).array)

    grads = np.asarray(jax.grad(loss)(wide))
    assert grads[:3, :5].min() == 1 and grads.sum() == X.size


def test_random_keys_are_not_padded() -> None:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    assert WALK.wide(keys) == (3,)


def test_a_value_of_neither_size_is_a_bug() -> None:
    with pytest.raises(PaseError, match="this is a bug"):
        WALK.widened(PaddedValue(jnp.ones((2, 5, 7))), AVAL)
