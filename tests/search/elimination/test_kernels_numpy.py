"""The reference kernels against their definitions, written as loops."""

from __future__ import annotations

import numpy as np
import pytest

from pase.search.elimination import kernels_numpy
from pase.search.elimination.kernels_numpy import min_plus, row_classes, segment_min


@pytest.mark.parametrize("block", [1, 1 << 18])
def test_min_plus_is_a_minimum_over_sums(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_numpy, "_BLOCK", block)
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 99, (3, 2, 4)).astype(float), rng.integers(0, 99, (3, 2, 5)).astype(float)
    out = min_plus(left, right)
    for x, p, q in np.ndindex(2, 4, 5):
        assert out[x, p, q] == min(left[c, x, p] + right[c, x, q] for c in range(3))


def test_segment_min_is_a_minimum_over_the_members_of_each_segment() -> None:
    rng = np.random.default_rng(1)
    base, segment = rng.integers(0, 99, 6).astype(float), np.array([2, 0, 1, 2, 0, 2], np.int32)
    parts = [
        (rng.integers(0, rows, 6).astype(np.int32), rng.integers(0, 99, (rows, 3)).astype(float))
        for rows in (2, 4)
    ]
    out = segment_min(base, segment, 3, parts)
    for s, q in np.ndindex(3, 3):
        members = np.flatnonzero(segment == s)
        assert out[s, q] == min(base[k] + sum(t[r[k], q] for r, t in parts) for k in members)


def test_equal_rows_are_one_class() -> None:
    matrix = np.array([[1.0, 2.0], [0.0, np.inf], [1.0, 2.0], [0.0, np.inf], [2.0, 1.0]])
    cls, first = row_classes(matrix)
    assert cls.tolist() == [0, 1, 0, 1, 2] and first.tolist() == [0, 1, 4]
