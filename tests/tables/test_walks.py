"""Compiled walks are those in Python, and are compiled only where that pays."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings

from pase.compiled import BreakEven
from pase.machine import Mesh
from pase.tables import walks
from pase.tables.axis_layout import digit_state
from pase.tables.reshard_path import canonical
from tests.tables.strategies import Rows, cases, random_layout


@given(cases())
@settings(max_examples=300, deadline=None)
def test_compiled_walks_are_those_in_python(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    many = max(len(src), len(dst))
    rows = (np.resize(np.array([row.states for row in x]), (many, len(mesh.sizes))) for x in (src, dst))
    found, _ = canonical(*rows, np.array(mesh.sizes))
    np.testing.assert_array_equal(walks.compiled(found), walks.in_python(found))


def test_compiled_walks_of_six_axes_are_those_in_python() -> None:
    rng, sizes = random.Random(0), (2, 3, 2, 4, 2, 3)
    for dims in (1, 2, 3, 4):
        rows = [np.array([random_layout(rng, sizes, dims, p).states for _ in range(500)]) for p in (0.2, 0.1)]
        found, _ = canonical(*rows, np.array(sizes))
        np.testing.assert_array_equal(walks.compiled(found), walks.in_python(found))


def test_walks_of_many_moves_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation of six dims, in which each axis is blocked by the next."""
    case = np.array(
        [[[2] * 6, [digit_state(k, 2) for k in range(6)], [digit_state((k + 1) % 6, 2) for k in range(6)]]]
    )
    want = walks.in_python(case)
    monkeypatch.setattr(walks, "_ROOM", 0)
    np.testing.assert_array_equal(walks.compiled(case), want)
    np.testing.assert_array_equal(walks.in_python(case), want)
    assert want.shape[2] > 0


def test_python_walks_until_the_kernel_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    case = np.array([[[2, 2], [digit_state(1, 2), -1], [-1, digit_state(1, 2)]]])
    monkeypatch.setattr(walks, "KERNEL", BreakEven(load_s=2 * walks._CASE_S))
    monkeypatch.setattr(walks, "compiled", lambda cases: -walks.in_python(cases))
    first = walks.walked(case)
    assert (first >= 0).all()
    np.testing.assert_array_equal(walks.walked(case), -first)


def test_python_walks_nothing_where_many_meshes_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    case = np.array([[[2, 2], [digit_state(1, 2), -1], [-1, digit_state(1, 2)]]])
    monkeypatch.setattr(walks, "KERNEL", BreakEven(load_s=10.5 * walks._CASE_S))
    monkeypatch.setattr(walks, "compiled", lambda cases: -walks.in_python(cases))
    walks.expect_alike(8)
    first = walks.walked(case)
    walks.expect_alike(9)
    found = walks.walked(case)
    walks.expect_alike(0)
    np.testing.assert_array_equal(found, -first)
