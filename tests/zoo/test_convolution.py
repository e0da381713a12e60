"""Pools and convolutions against those of Flax."""

from __future__ import annotations

import flax.linen
import pytest

from pase.zoo.convolution import average_pool, conv, max_pool
from tests.zoo.helpers import close, draw


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (3, 1)])
def test_pools_and_convolutions_are_flaxs(window: int, stride: int, padding: str) -> None:
    x, w = draw(2, 9, 9, 4), draw(window, window, 4, 6)
    sizes, steps = (window, window), (stride, stride)
    close(
        average_pool(x, window=window, stride=stride, padding=padding),
        flax.linen.avg_pool(x, sizes, steps, padding),
    )
    close(
        max_pool(x, window=window, stride=stride, padding=padding),
        flax.linen.max_pool(x, sizes, steps, padding),
    )
    layer = flax.linen.Conv(6, sizes, steps, padding, use_bias=False)
    expected = layer.apply({"params": {"kernel": w}}, x)
    close(conv(x, w, stride=stride, padding=padding), expected, 1e-4)
