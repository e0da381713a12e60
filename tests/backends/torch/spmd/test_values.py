"""Layouts through views. The oracle marks, element by element, which rank holds what."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from pase.backends.torch.spmd.values import (
    NotOnParts,
    ReorderStep,
    ReshapeStep,
    apply_views,
    inverse,
    layout_through,
    through_reshape,
)
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout

MESH = Mesh(names=("x", "y"), sizes=(2, 3))
STEPS = (ReshapeStep((12, 6), (2, 6, 6)), ReorderStep((2, 0, 1)), ReshapeStep((6, 2, 6), (6, 12)))


def owners(shape: Sequence[int], layout: AxisLayout) -> np.ndarray:
    """Which rank holds which elements, by the definition of a digit: bool [ranks, *shape]."""
    out = np.ones((MESH.devices, *shape), bool)
    for rank, at in enumerate(itertools.product(*map(range, MESH.sizes))):
        for axis, state in enumerate(layout):
            if isinstance(state, tuple):
                dim, blocks = state
                index = np.arange(shape[dim]) * blocks // shape[dim] % MESH.sizes[axis]
                out[rank] &= (index == at[axis]).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return out


def layouts(shape: Sequence[int]) -> list[AxisLayout]:
    states = [
        [
            None,
            *((d, b) for d, n in enumerate(shape) for b in range(1, n + 1) if n % b == 0 and b % size == 0),
        ]
        for size in MESH.sizes
    ]
    return [AxisLayout((a, b)) for a in states[0] for b in states[1]]


@pytest.mark.parametrize(
    ("shape", "new"),
    [((12, 6), (72,)), ((72,), (12, 6)), ((4, 3, 6), (12, 6)), ((2, 6, 6), (6, 12))],
)
def test_a_reshape_moves_no_element(shape: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Every layout of the shape either has the same owners after the reshape, or is refused."""
    moved = refused = 0
    for layout in layouts(shape):
        try:
            after = through_reshape(layout, shape, new, MESH)
        except NotOnParts:
            refused += 1
            continue
        wanted = owners(shape, layout).reshape(MESH.devices, *new)
        assert np.array_equal(owners(new, after), wanted), (layout, after)
        moved += 1
    assert moved > refused or moved > 10


def test_the_inverse_of_views_gives_the_layout_back() -> None:
    for layout in layouts((12, 6)):
        try:
            there = layout_through(layout, STEPS, MESH)
        except NotOnParts:
            continue
        seen = owners((12, 6), layout).reshape(-1, 2, 6, 6).transpose(0, 3, 1, 2).reshape(-1, 6, 12)
        assert np.array_equal(owners((6, 12), there), seen)
        back = layout_through(there, inverse(STEPS), MESH)
        assert np.array_equal(owners((12, 6), back), owners((12, 6), layout))


@pytest.mark.torch
def test_a_ranks_part_of_a_view_is_the_view_of_its_part() -> None:
    import torch

    whole = torch.arange(72).reshape(12, 6)
    wanted = whole.reshape(2, 6, 6).permute(2, 0, 1).reshape(6, 12)
    layout = AxisLayout([(0, 2), (1, 3)])
    mine, after = owners((12, 6), layout), owners((6, 12), layout_through(layout, STEPS, MESH))
    for rank in range(MESH.devices):
        part = whole[torch.from_numpy(mine[rank])].reshape(6, 2)
        made = apply_views(part, layout, STEPS, MESH)
        assert made.flatten().tolist() == wanted[torch.from_numpy(after[rank])].tolist()
