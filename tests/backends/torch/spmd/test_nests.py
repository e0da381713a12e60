"""Loop nests run one by one: results are numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pase.backends.torch.spmd.nests import run_nest
from pase.backends.torch.spmd.values import NotOnParts
from pase.ir import functions
from pase.local.functions import COMPUTED, NUMPY
from pase.ops import GraphBuilder, nests
from tests.local.test_functions import OPERANDS

pytestmark = pytest.mark.torch
X = np.random.default_rng(0).standard_normal((2, 3, 4))
W = np.random.default_rng(1).standard_normal((4, 5))


def ran(make: Any, shape: tuple[int, ...], *arrays: np.ndarray) -> np.ndarray:
    """What the last op that a function of a builder and its inputs makes gives on these arrays."""
    import torch

    b = GraphBuilder("g")
    made = make(b, *(b.input(f"x{i}", a.shape, "float64") for i, a in enumerate(arrays)))
    assert (made[0] if isinstance(made, tuple) else made).shape == shape
    op = b.nodes[-1].ops[-1]
    known = {n.ops[0].writes[0].tensor: a for n, a in zip(b.nodes, arrays, strict=False)}
    given = [torch.from_numpy(known[a.tensor]) for a in op.reads]
    return run_nest(op, None, given, shape, None).numpy()  # type: ignore[arg-type]


def test_functions_are_numpys() -> None:
    import torch

    for name, computed in COMPUTED.items():
        operands = OPERANDS.get(name, lambda: [np.linspace(0.5, 2, 9)])()
        given = [torch.as_tensor(np.asarray(x)) for x in operands]
        np.testing.assert_allclose(computed(torch, *given), computed(NUMPY, *operands), rtol=1e-14)


@pytest.mark.parametrize(
    ("function", "operands", "numpy"),
    [
        (functions.SUB, lambda x: [x, 0.5], lambda x: x - 0.5),
        (functions.SUB, lambda x: [0.5, x], lambda x: 0.5 - x),
        (functions.MAX, lambda x: [x, 0.0], lambda x: np.maximum(x, 0)),
        (functions.CLAMP, lambda x: [-0.5, x, 0.5], lambda x: np.clip(x, -0.5, 0.5)),
        (functions.INTEGER_POW, lambda x: [x, 3], lambda x: x**3),
        (functions.RECIPROCAL, lambda x: [2.0, x], lambda x: 2 / x),
        (functions.ADD_SCALED, lambda x: [x, x, -2.5], lambda x: -1.5 * x),
        (functions.MUL, lambda x: [x, x, 2.0], lambda x: 2 * x * x),
        (functions.WHERE, lambda x: [x, 1.0, x], lambda x: np.where(x != 0, 1.0, x)),
        (functions.SELECT, lambda x: [x, 1.0, x], lambda x: np.where(x != 0, x, 1.0)),
    ],
)
def test_numbers_among_the_operands_are_in_the_graph(function: Any, operands: Any, numpy: Any) -> None:
    made = ran(lambda b, x: nests.elementwise(b, function, operands(x), ["float64"]), X.shape, X)
    np.testing.assert_allclose(made, numpy(X), rtol=1e-14)


def test_a_number_that_the_graph_does_not_have_is_refused() -> None:
    with pytest.raises(NotOnParts, match="number that 'sub' in it needs is unknown"):
        ran(lambda b, x: nests.elementwise(b, functions.SUB, [x, None], ["float64"]), X.shape, X)


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
