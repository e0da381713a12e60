"""The numba kernels against their numpy counterparts."""

from __future__ import annotations

import numpy as np

from pase.search.elimination import kernels_numpy


def test_numba_is_numpy() -> None:
    from pase.search.elimination import kernels_numba

    rng = np.random.default_rng(0)
    for _ in range(200):
        c, x, p, q = (int(i) for i in rng.integers(1, 12, 4))
        left = rng.integers(0, 99, (c, x, p)).astype(float)
        right = rng.integers(0, 99, (c, x, q)).astype(float)
        left[rng.random(left.shape) < 0.2] = np.inf
        want = kernels_numpy.min_plus(left, right)
        np.testing.assert_array_equal(kernels_numba.min_plus(left, right), want)
        k = int(rng.integers(x, 30))
        segment = np.concatenate([np.arange(x), rng.integers(0, x, k - x)]).astype(np.int32)
        base = rng.integers(0, 9, k).astype(float)
        parts = [
            (rng.integers(0, r, k).astype(np.int32), rng.integers(0, 9, (r, q)).astype(float)) for r in (c, p)
        ]
        for some in (parts[:1], parts):
            np.testing.assert_array_equal(
                kernels_numba.segment_min(base, segment, x, some),
                kernels_numpy.segment_min(base, segment, x, some),
            )
        matrix = rng.integers(0, 2, (k, 3)).astype(float)
        for got, expected in zip(
            kernels_numba.row_classes(matrix), kernels_numpy.row_classes(matrix), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_threads_share_the_rows_of_a_large_product() -> None:
    from pase.search.elimination import kernels_numba

    rng = np.random.default_rng(1)
    left, right = (
        rng.integers(0, 999, (130, 2, 201)).astype(float),
        rng.integers(0, 999, (130, 2, 700)).astype(float),
    )
    np.testing.assert_array_equal(kernels_numba.min_plus(left, right, 3), kernels_numpy.min_plus(left, right))
    base, segment = rng.integers(0, 99, 130).astype(float), rng.integers(0, 40, 130).astype(np.int32)
    segment[:40] = np.arange(40)
    tables = [rng.integers(0, 999, (130, 20_007)).astype(float) for _ in range(2)]
    parts = [(rng.permutation(130).astype(np.int32), t) for t in tables]
    for some in (parts[:1], parts):
        np.testing.assert_array_equal(
            kernels_numba.segment_min(base, segment, 40, some, 3),
            kernels_numpy.segment_min(base, segment, 40, some),
        )
