"""Runs a program on padded arrays and compares its result with the program as written."""

import jax.numpy as jnp
import numpy as np

from pase.frontends.blocks import as_padded
from pase.frontends.jax.frontend import trace


def agrees(fn, *args, sizes):
    """Compares the padded program's result, without padding, with the result of the program as written."""
    made = as_padded(trace(fn, *args, mode="forward"), sizes)
    wide = [jnp.pad(x, [(0, sizes.get(n, n) - n) for n in x.shape]) for x in args]
    assert [x.shape for x in wide] == [a.shape for a in made.jaxpr.in_avals]
    want = np.asarray(fn(*args))
    np.testing.assert_array_equal(np.asarray(made.fn(*wide))[tuple(map(slice, want.shape))], want)
