"""The next prices are those at which the lowest known plane is highest, against a grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from pase.search.bounded.bundle import Bundle, next_prices
from tests.search.random_instances import seeds


@settings(max_examples=30)
@given(seeds)
def test_no_price_in_reach_promises_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bundle, best = Bundle(reach=2.0), np.array([1.0, 5.0, 0.0])
    active = np.array([0, 2])
    for _ in range(5):
        bundle.add(float(rng.uniform(-10, 10)), rng.uniform(-3, 3, 3))
    found = next_prices(bundle, best, active)
    assert found is not None
    price, promised = found
    values, slopes = np.array(bundle.values), np.array(bundle.slopes)[:, active]
    assert price[1] == 0.0 and (price[active] >= 0).all()
    assert (price[active] <= best[active] + 2 + 1e-9).all()
    assert promised == pytest.approx((values + slopes @ price[active]).min(), rel=1e-6, abs=1e-6)
    grid = np.stack(np.meshgrid(np.linspace(0, 3, 31), np.linspace(0, 2, 21)), axis=-1).reshape(-1, 2)
    assert (values + grid @ slopes.T).min(axis=1).max() <= promised + 1e-6


def test_the_oldest_plane_is_dropped() -> None:
    bundle = Bundle()
    for i in range(85):
        bundle.add(float(i), np.array([float(i)]))
    assert bundle.values[0] == 5.0 and len(bundle.values) == len(bundle.slopes) == 80
