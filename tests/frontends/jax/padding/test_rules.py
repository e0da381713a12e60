"""Programs on padded arrays give the numbers of the program as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import GatherDimensionNumbers, GatherScatterMode

from tests.frontends.jax.padding.cases import agrees

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(300, 4)), jnp.float32)


@pytest.mark.parametrize("fn", [jnp.argmax, jnp.argmin, jnp.max, jnp.min, jnp.all, jnp.any])
@pytest.mark.parametrize("at", [-9.0, 0.0, 9.0])
def test_reductions_of_booleans(fn, at):
    """Reductions of values that are all true, partly true, and all false."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 61)), jnp.float32)
    agrees(lambda p, y: fn(p > y, axis=1), x, jnp.full((3, 61), at), sizes={61: 64})


@pytest.mark.parametrize("mode", ["CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS"])
@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_lookups_out_of_bounds(mode, dtype):
    """Indices in the padding, behind it, and before the first element; and of a dtype that cannot hold the last row."""
    ids = [-400, -3, 0, 126, 127, 299, 300, 303, 304, 9999]
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    ids = jnp.asarray([i for i in ids if least <= i <= most], dtype)
    d = GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def rows(table, i):
        return jax.lax.gather(table, i[:, None], d, (1, 4), mode=GatherScatterMode[mode])

    agrees(rows, TABLE, ids, sizes={300: 304})


def test_indexing_is_clamped_where_jax_clamps_it():
    agrees(lambda w, i: w[i], TABLE, jnp.asarray([-301, -1, 0, 299, 300, 303, 999]), sizes={300: 304})


def test_reshapes_without_elements():
    agrees(lambda w, x: (w + x)[:0].reshape(61, 0), jnp.ones((3, 61)), jnp.ones((3, 61)), sizes={61: 64})
