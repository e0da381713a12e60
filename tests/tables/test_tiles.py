"""Padding of tiled memory, against arrays laid out in every order of dims."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.tables.tiles import padding
from tests.tables.graphs import TILE


def laid_out(shape: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements that the array occupies in the smallest order of dims, found by trying every order."""
    best = math.inf
    for order in itertools.permutations(shape):
        *outer, rows, lanes = order
        step = tile[0]
        while step // 2 >= rows:
            step //= 2
        whole = math.ceil(rows / step) * step * math.ceil(lanes / tile[1]) * tile[1]
        best = min(best, math.prod(outer) * whole)
    return int(best)


@given(shape=st.lists(st.integers(1, 300), min_size=2, max_size=4))
def test_padding_is_that_of_the_best_order(shape: list[int]) -> None:
    got = padding([np.array([float(s)]) for s in shape], TILE)
    assert got[0] * math.prod(shape) == pytest.approx(laid_out(tuple(shape), TILE), rel=1e-9)


def test_an_array_of_one_dim_lies_densely() -> None:
    assert padding([np.array([197.0])], TILE).tolist() == [1.0]
