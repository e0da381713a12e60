"""Every sequence of collectives between two layouts, executed element by element."""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, AxisState, Digit
from pase.tables.reshard_path import path, reshard_steps
from tests.tables.holdings import check, held, larger
from tests.tables.strategies import layouts, meshes, nested, random_layout

SHAPES = st.sampled_from([(8,), (24, 4), (8, 8), (12, 12), (4, 4, 4), (16, 6)])


@st.composite
def pairs(draw: st.DrawFn, contiguous: bool = False) -> tuple[Mesh, tuple[int, ...], AxisLayout, AxisLayout]:
    mesh, shape = draw(meshes()), draw(SHAPES)
    src, dst = (draw(layouts(mesh, shape, partial, contiguous)) for partial in (True, False))
    return mesh, shape, src, dst


def overlap(x: AxisState, y: AxisState, ways: int) -> bool:
    """Whether two digits of an axis select from the same part of the same tensor dim."""
    if not isinstance(x, Digit) or not isinstance(y, Digit) or x.dim != y.dim:
        return False
    return x.blocks < y.blocks * ways and y.blocks < x.blocks * ways


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_every_collective_is_possible_and_ends_where_it_should(case: Any) -> None:
    mesh, shape, src, dst = case
    sums = src.partial
    row, now = src, held(src, shape, mesh, sums)
    for m in reshard_steps(src, dst, mesh.sizes):
        after = held(m.after, shape, mesh, sums)
        shifted = any(x != y and overlap(x, y, n) for x, y, n in zip(row, m.after, mesh.sizes, strict=True))
        even = nested(mesh, row, m.after) and not shifted
        check(m.kind, mesh, m.axes, now, after, even)
        assert not even or larger(m.kind, now, after) * mesh.ways(m.split) == np.prod(shape)
        row, now = m.after, after
    assert (now == held(dst, shape, mesh, sums)).all()


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (4, 2)], ids=str)
def test_devices_hold_equal_parts_on_the_way(sizes: tuple[int, ...]) -> None:
    """For all pairs of layouts of a dim of 24: if both ends are even, so is every layout between them."""
    mesh = Mesh(names=("x", "y"), sizes=sizes)

    def even(row: AxisLayout) -> bool:
        parts = held(row, (24,), mesh).reshape(mesh.devices, -1).sum(1)
        return bool((parts == parts[0]).all())

    def nests(row: tuple[int, ...]) -> bool:
        low, high = sorted((24 // b, 24 // b * n) for b, n in zip(row, sizes, strict=True))
        return high[0] % low[1] == 0

    digits = [[-1, *(b for b in (2, 3, 4, 6, 8, 12, 24) if b % n == 0)] for n in sizes]
    rows = [AxisLayout.of(row) for row in product(*digits) if -1 in row or nests(row)]
    assert all(map(even, rows))
    for src, dst in product(rows, rows):
        assert all(even(m.after) for m in reshard_steps(src, dst, sizes)), (src, dst)


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_nothing_moves_where_every_device_has_what_it_needs(case: Any) -> None:
    mesh, shape, src, dst = case
    if src.partial:
        return
    has = (held(dst, shape, mesh) <= held(src, shape, mesh)).all()
    assert has == all(m.kind == "slice" for m in reshard_steps(src, dst, mesh.sizes))


@given(pairs(contiguous=True))
@settings(max_examples=300, deadline=None)
def test_a_path_is_made_of_single_collectives(case: Any) -> None:
    """Each leg of a path, resharded separately, is the same single collective as in the whole path."""
    mesh, _, src, dst = case
    whole = reshard_steps(src, dst, mesh.sizes)
    rows = path(src, dst, mesh)
    assert rows[0] == src and rows[-1] == dst
    legs = [reshard_steps(a, b, mesh.sizes) for a, b in pairwise(rows)]
    assert [(m.kind, m.axes, m.split) for leg in legs for m in leg] == [
        (m.kind, m.axes, m.split) for m in whole
    ]


def at(dim: int, stride: int) -> Digit:
    """A digit of a tensor dim of 8."""
    return Digit(dim, 8 // stride)


def kinds(src: list[AxisState], dst: list[AxisState], *sizes: int) -> list[tuple[str, int]]:
    return [(m.kind, m.axes) for m in reshard_steps(AxisLayout(src), AxisLayout(dst), sizes)]


def test_axes_that_move_together_are_one_all_to_all() -> None:
    assert kinds([at(0, 4), at(0, 2)], [at(1, 4), at(1, 2)], 2, 2) == [("all_to_all", 3)]


def test_axes_that_part_are_two() -> None:
    assert kinds([at(0, 4), at(0, 2)], [at(1, 4), at(2, 4)], 2, 2) == [("all_to_all", 2), ("all_to_all", 1)]


def test_a_new_major_axis_is_a_slice_and_a_permute() -> None:
    """P('b') -> P(('a', 'b')). A gather would make a full-size buffer."""
    assert kinds([None, at(0, 2)], [at(0, 4), at(0, 1)], 2, 4) == [("slice", 1), ("permute", 3)]


def test_a_major_axis_that_leaves_is_a_permute_and_a_gather() -> None:
    assert kinds([at(0, 4), at(0, 2)], [None, at(0, 4)], 2, 2) == [("permute", 3), ("all_gather", 1)]


def test_a_sum_is_scattered_before_it_is_handed_over() -> None:
    assert kinds(["partial", at(0, 4)], [at(0, 4), at(1, 4)], 2, 2) == [("reduce_scatter", 1), ("permute", 3)]


def test_shards_stay_contiguous_on_the_way() -> None:
    """P('a', 'b') -> P(None, ('a', 'b')): 'b' does not move down in its dim; it swaps with 'a'."""
    assert kinds([at(0, 4), at(1, 4)], [at(1, 4), at(1, 2)], 2, 2) == [("all_to_all", 1), ("permute", 3)]
    assert kinds([at(0, 4), at(0, 1)], [at(1, 4), at(0, 2)], 2, 4) == [("permute", 3), ("all_to_all", 1)]


def test_tensor_dims_are_gathered_one_by_one() -> None:
    assert kinds([at(0, 4), at(1, 4)], [None] * 2, 2, 2) == [("all_gather", 2), ("all_gather", 1)]
    assert kinds([at(0, 4), at(0, 2)], [None] * 2, 2, 2) == [("all_gather", 3)]


def test_legs_of_random_pairs_are_single_collectives() -> None:
    """Many more pairs than hypothesis draws, with up to six axes and remaining partial sums.

    In earlier versions, paths whose axes leave a dim one by one, that move axes in two cycles, or that reduce in two
    steps gave other collectives leg by leg than in the whole path.
    """
    rng = random.Random(0)

    for _ in range(1500):
        sizes = tuple(rng.choice((2, 2, 2, 3, 4)) for _ in range(rng.randint(3, 6)))
        mesh, dims = Mesh(names=tuple("abcdef"[: len(sizes)]), sizes=sizes), rng.randint(1, 4)
        src, dst = (random_layout(rng, sizes, dims, p) for p in (0.2, rng.choice((0.0, 0.2))))
        whole = [(m.kind, m.axes, m.split) for m in reshard_steps(src, dst, sizes)]
        rows = path(src, dst, mesh)
        legs = [[(m.kind, m.axes, m.split) for m in reshard_steps(*leg, sizes)] for leg in pairwise(rows)]
        assert [m for leg in legs for m in leg] == whole, (sizes, src, dst)
