"""Partitions of configs by their costs."""

from __future__ import annotations

import numpy as np
import pytest

from pase.search.elimination.factors import Pool


@pytest.mark.parametrize("spread", [1, 1000])
def test_partitions_are_numbered_by_first_config(spread: int) -> None:
    """Equal partitions are one view, whatever the numbers of their classes are, sparse or not."""
    rng, pool = np.random.default_rng(spread), Pool()
    cls = rng.integers(0, 9, 40).astype(np.int64)
    number = {c: i for i, c in enumerate(dict.fromkeys(cls.tolist()))}
    view = pool.view(cls * spread)
    assert view.cls.tolist() == [number[c] for c in cls.tolist()] and view.cls.dtype == np.int32
    assert view.rep.tolist() == [cls.tolist().index(c) for c in number] and view.n == len(number)
    assert pool.view(rng.permutation(9)[cls]) is view
