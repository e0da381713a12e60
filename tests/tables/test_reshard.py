"""Reshards of many pairs at once agree with one pair at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from pase.machine import COLLECTIVES, Mesh
from pase.tables.axis_layout import PARTIAL
from pase.tables.reshard import compare, reshard
from pase.tables.reshard_path import reshard_steps
from tests.tables.strategies import Rows, cases


def states(rows: Rows) -> np.ndarray:
    return np.array([row.states for row in rows])


@given(cases())
@settings(max_examples=200, deadline=None)
def test_many_pairs_are_what_each_pair_is(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    n = len(mesh.sizes)
    (plans,) = compare([(states(src), states(dst))], mesh)
    for i, s in enumerate(src):
        for j, d in enumerate(dst):
            got = [c - 1 for c in plans.codes[plans.index[i, j]].tolist() if c]
            want = [m for m in reshard_steps(s, d, mesh.sizes) if m.kind != "slice"]
            assert got == [(COLLECTIVES.index(m.kind) << n | m.axes) << n | m.split for m in want]


@given(cases())
@settings(max_examples=50, deadline=None)
def test_steps_hold_every_move_in_order(case: tuple[Mesh, Rows, Rows]) -> None:
    mesh, src, dst = case
    steps = reshard(states(src), states(dst), mesh)
    got = [(step.kind, int(step.axes[0, 0]), float(step.fraction[0, 0])) for step in steps if step.axes[0, 0]]
    assert got == [
        (m.kind, m.axes, 1 / mesh.ways(m.split))
        for m in reshard_steps(src[0], dst[0], mesh.sizes)
        if m.kind != "slice"
    ]


def test_equal_layouts_cost_nothing_either_way() -> None:
    mesh = Mesh(names=("a", "b"), sizes=(2, 4))
    rows = np.array([[-1, 2], [2, -1]])
    (plans,) = compare([(rows, rows)], mesh)
    assert not plans.codes[np.diag(plans.index)].any()
    assert PARTIAL not in rows
