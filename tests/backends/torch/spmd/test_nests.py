"""Loop nests run one by one: results are numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pase.backends.torch.spmd.nests import run_nest
from pase.backends.torch.spmd.values import NotOnParts
from pase.ir import Tensor, functions
from pase.ops import GraphBuilder, nests

pytestmark = pytest.mark.torch
X = np.random.default_rng(0).standard_normal((2, 3, 4))
W = np.random.default_rng(1).standard_normal((4, 5))


def ran(
    make: Any, shape: tuple[int, ...], *arrays: np.ndarray, numbers: tuple[float, ...] = ()
) -> np.ndarray:
    """What the last op that a function of a builder and its inputs makes gives on these arrays."""
    import torch

    b = GraphBuilder("g")
    made = make(b, *(b.input(f"x{i}", a.shape, "float64") for i, a in enumerate(arrays)))
    assert (made[0] if isinstance(made, tuple) else made).shape == shape
    op = b.nodes[-1].ops[-1]
    given = [torch.from_numpy(a) for a in arrays]
    return run_nest(op, None, given, shape, iter(numbers), None).numpy()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "numpy"), [(functions.EXP, np.exp), (functions.NEG, np.negative), (functions.TANH, np.tanh)]
)
def test_an_elementwise_op(function: Any, numpy: Any) -> None:
    made = ran(lambda b, x: nests.elementwise(b, function, [x], ["float64"]), X.shape, X)
    np.testing.assert_allclose(made, numpy(X), rtol=1e-14)


def test_a_number_among_the_operands_is_the_next_of_the_node() -> None:
    def less(b: GraphBuilder, x: Tensor) -> Any:
        return nests.elementwise(b, functions.SUB, [x], ["float64"])

    np.testing.assert_allclose(ran(less, X.shape, X, numbers=(0.5, 9.0)), X - 0.5)
    with pytest.raises(NotOnParts, match="number that 'sub' in it needs is unknown"):
        ran(less, X.shape, X)


@pytest.mark.parametrize(("function", "numpy"), [(functions.SUM, np.sum), (functions.REDUCE_MAX, np.max)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 2)])
def test_a_reduction(function: Any, numpy: Any, axes: tuple[int, ...], keep: bool) -> None:
    wanted = numpy(X, axis=axes, keepdims=keep)
    made = ran(lambda b, x: nests.reduce(b, function, [x], axes, ["float64"], keepdims=keep), wanted.shape, X)
    np.testing.assert_allclose(made, wanted, rtol=1e-12)


def test_views() -> None:
    moved = ran(lambda b, x: nests.transpose(b, x, (2, 0, 1)), (4, 2, 3), X)
    assert np.array_equal(moved, X.transpose(2, 0, 1))
    flat = ran(lambda b, x: nests.reshape(b, x, (6, 4)), (6, 4), X)
    assert np.array_equal(flat, X.reshape(6, 4))
