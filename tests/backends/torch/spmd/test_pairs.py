"""The ops of a node are divided into views of its inputs, its work, and views of its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pase.backends.torch.spmd.pairs import OpPair, made_by, partitioned
from pase.backends.torch.spmd.values import ReorderStep
from pase.ir import Tensor, functions
from pase.ops import GraphBuilder, nests


def pairs(make: Any) -> list[OpPair]:
    """The ops that a function of a builder and an input [2, 3, 4] makes, without their local forms."""
    b = GraphBuilder("g")
    make(b, b.input("x", (2, 3, 4), "float32"))
    return [
        OpPair(op, None)  # type: ignore[arg-type]
        for n in b.finish().nodes
        for op in n.ops
        if op.kind not in ("input", "output")
    ]


def exp(b: GraphBuilder, x: Tensor) -> Tensor:
    return nests.elementwise(b, functions.EXP, [x], ["float32"])[0]


def names(found: list[OpPair]) -> list[str]:
    return [p.op.name for p in found]


def test_views_before_and_after_the_work_are_apart() -> None:
    def make(b: GraphBuilder, x: Tensor) -> None:
        y = exp(b, nests.transpose(b, nests.reshape(b, x, (6, 4)), (1, 0)))
        nests.reshape(b, exp(b, nests.reshape(b, y, (4, 2, 3))), (24,))

    before, work, after = partitioned(pairs(make))
    assert (names(before), names(work), names(after)) == (
        ["reshape", "transpose"],
        ["exp", "reshape", "exp"],
        ["reshape"],
    )
    assert len(made_by([*before, *work, *after])) == 6


def test_a_view_that_the_work_reads_is_work() -> None:
    """Whatever reads the views' results decides, not their order."""

    def make(b: GraphBuilder, x: Tensor) -> None:
        y = exp(b, x)
        z = nests.reshape(b, y, (6, 4))
        nests.transpose(b, y, (2, 0, 1))
        exp(b, z)

    before, work, after = partitioned(pairs(make))
    assert (names(before), names(work), names(after)) == ([], ["exp", "reshape", "exp"], ["transpose"])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_a_transpose_is_its_order(order: tuple[int, ...]) -> None:
    (pair,) = pairs(lambda b, x: nests.transpose(b, x, order))
    (step,) = pair.as_steps
    assert pair.is_view and isinstance(step, ReorderStep)
    assert np.zeros((2, 3, 4)).transpose(step.order).shape == np.zeros((2, 3, 4)).transpose(order).shape
