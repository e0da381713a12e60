"""Many pairs at once against one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.machine import COLLECTIVES, Mesh
from pase.tables.layouts import PARTIAL
from pase.tables.reshard import compare, reshard
from pase.tables.reshard_path import moves
from tests.tables.strategies import layouts, meshes

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
            want = [m for m in moves(s, d, mesh.sizes) if m.kind != "slice"]
            assert got == [(COLLECTIVES.index(m.kind) << n | m.axes) << n | m.split for m in want]


@given(cases())
@settings(max_examples=50, deadline=None)
def test_steps_hold_every_move_in_order(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    steps = reshard(np.array(src), np.array(dst), mesh)
    got = [(step.kind, int(step.axes[0, 0]), float(step.fraction[0, 0])) for step in steps if step.axes[0, 0]]
    assert got == [
        (m.kind, m.axes, 1 / mesh.ways(m.split))
        for m in moves(src[0], dst[0], mesh.sizes)
        if m.kind != "slice"
    ]


def test_equal_layouts_cost_nothing_either_way() -> None:
    mesh = Mesh(names=("a", "b"), sizes=(2, 4))
    rows = np.array([[-1, 2], [2, -1]])
    (plans,) = compare([(rows, rows)], mesh)
    assert not plans.codes[np.diag(plans.index)].any()
    assert PARTIAL not in rows
