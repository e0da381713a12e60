"""Reshards of many pairs at once agree with one pair at a time."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.machine import COLLECTIVES, Mesh
from pase.tables import walks
from pase.tables.distinct import hashed, in_order
from pase.tables.layouts import _DIM, PARTIAL
from pase.tables.reshard import _canonical, compare, reshard
from pase.tables.reshard_path import reshard_steps
from tests.tables.strategies import layouts, meshes, random_layout

SHAPES = st.sampled_from([(8,), (24, 4), (8, 8), (12, 12), (4, 4, 4), (16, 6)])
Rows = list[tuple[int, ...]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, Rows, Rows]:
    mesh, shape = draw(meshes()), draw(SHAPES)
    src, dst = (draw(st.lists(layouts(mesh, shape, True), min_size=1, max_size=6)) for _ in range(2))
    return mesh, src, dst


@given(cases())
@settings(max_examples=200, deadline=None)
def test_many_pairs_are_what_each_pair_is(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    n = len(mesh.sizes)
    (plans,) = compare([(np.array(src), np.array(dst))], mesh)
    for i, s in enumerate(src):
        for j, d in enumerate(dst):
            got = [c - 1 for c in plans.codes[plans.index[i, j]].tolist() if c]
            want = [m for m in reshard_steps(s, d, mesh.sizes) if m.kind != "slice"]
            assert got == [(COLLECTIVES.index(m.kind) << n | m.axes) << n | m.split for m in want]


@given(cases())
@settings(max_examples=50, deadline=None)
def test_steps_hold_every_move_in_order(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    steps = reshard(np.array(src), np.array(dst), mesh)
    got = [(step.kind, int(step.axes[0, 0]), float(step.fraction[0, 0])) for step in steps if step.axes[0, 0]]
    assert got == [
        (m.kind, m.axes, 1 / mesh.ways(m.split))
        for m in reshard_steps(src[0], dst[0], mesh.sizes)
        if m.kind != "slice"
    ]


@given(cases())
@settings(max_examples=300, deadline=None)
def test_compiled_walks_are_those_of_the_definition(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    many = max(len(src), len(dst))
    rows = (np.resize(np.array(x), (many, len(mesh.sizes))) for x in (src, dst))
    found, _ = _canonical(*rows, np.array(mesh.sizes))
    np.testing.assert_array_equal(walks.compiled(found), walks.one_by_one(found))


def test_compiled_walks_of_six_axes_are_those_of_the_definition() -> None:
    rng, sizes = random.Random(0), (2, 3, 2, 4, 2, 3)
    for dims in (1, 2, 3, 4):
        rows = [np.array([random_layout(rng, sizes, dims, p) for _ in range(2000)]) for p in (0.2, 0.1)]
        found, _ = _canonical(*rows, np.array(sizes))
        np.testing.assert_array_equal(walks.compiled(found), walks.one_by_one(found))


def test_walks_of_many_moves_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation of six dims, in which each axis is blocked by the next."""
    case = np.array([[[2] * 6, [k * _DIM + 2 for k in range(6)], [(k + 1) % 6 * _DIM + 2 for k in range(6)]]])
    want = walks.one_by_one(case)
    monkeypatch.setattr(walks, "_ROOM", 0)
    np.testing.assert_array_equal(walks.compiled(case), want)
    assert want.shape[2] > 0


def test_python_walks_until_the_kernel_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    case = np.array([[[2, 2], [_DIM + 2, -1], [-1, _DIM + 2]]])
    monkeypatch.delitem(sys.modules, "pase.tables.kernels_walk", raising=False)
    monkeypatch.setattr(walks._Walked, "cases", 0)
    monkeypatch.setattr(walks, "_IMPORT_CASES", 2)
    first = walks.walked(case)
    assert "pase.tables.kernels_walk" not in sys.modules
    np.testing.assert_array_equal(walks.walked(case), first)
    assert "pase.tables.kernels_walk" in sys.modules


def test_python_walks_nothing_where_many_meshes_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    case = np.array([[[2, 2], [_DIM + 2, -1], [-1, _DIM + 2]]])
    monkeypatch.delitem(sys.modules, "pase.tables.kernels_walk", raising=False)
    monkeypatch.setattr(walks._Walked, "cases", 0)
    monkeypatch.setattr(walks, "_IMPORT_CASES", 10)
    walks.expect_alike(8)
    walks.walked(case)
    assert "pase.tables.kernels_walk" not in sys.modules and walks._Walked.cases == 1
    walks.expect_alike(9)
    found = walks.walked(case)
    walks.expect_alike(0)
    assert "pase.tables.kernels_walk" in sys.modules and walks._Walked.cases == 1
    np.testing.assert_array_equal(found, walks.one_by_one(case))


def test_equal_layouts_cost_nothing_either_way() -> None:
    mesh = Mesh(names=("a", "b"), sizes=(2, 4))
    rows = np.array([[-1, 2], [2, -1]])
    (plans,) = compare([(rows, rows)], mesh)
    assert not plans.codes[np.diag(plans.index)].any()
    assert PARTIAL not in rows


@given(st.lists(st.integers(0, (1 << 62) - 1) | st.integers(0, 5), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_hash_table_finds_the_same_keys_equal(keys: list[int]) -> None:
    array = np.array(keys, np.int64)
    for number in (hashed, in_order):
        first, index = number(array)
        assert array[first][index].tolist() == keys
        assert sorted(array[first].tolist()) == sorted(set(keys))
        assert all(keys.index(keys[i]) == i for i in first.tolist())
