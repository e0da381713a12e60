"""Attention against JAX's own."""

from __future__ import annotations

from functools import partial

import jax
import pytest

from pase.zoo.attention import attend
from tests.zoo.helpers import close, draw


@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_dot_product_attention(causal: bool) -> None:
    q, k, v = draw(2, 6, 4, 8), draw(2, 6, 4, 8), draw(2, 6, 4, 8)
    reference = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))
    close(jax.jit(partial(attend, causal=causal))(q, k, v), reference(q, k, v))
