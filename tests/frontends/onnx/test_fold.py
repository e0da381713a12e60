"""Small values that are evaluated while lowering, compared with ONNX's reference implementation and with Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from pase.frontends.common.folding import MOST_KNOWN  # noqa: E402
from pase.frontends.common.values import Value, known  # noqa: E402
from pase.frontends.onnx.fold import fold, slice_bounds  # noqa: E402
from pase.frontends.onnx.values import OnnxCall  # noqa: E402
from tests.frontends.onnx.cases import model_of, node  # noqa: E402


def call(n: Any, ins: list[Value | None]) -> OnnxCall:
    """The call of a node, as its rule sees it. Folding needs no graph."""
    return OnnxCall(low=None, node=n, op=n.op_type, version=21, ins=ins, place="here")  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("n", "arrays"),
    [
        (node("Div", ["a", "b"], ["y"]), [ints(7, -7, 7, -7), ints(2, 2, -2, -2)]),
        (node("Mod", ["a", "b"], ["y"]), [ints(7, -7, 7, -7), ints(3, 3, -3, -3)]),
        (node("Mod", ["a", "b"], ["y"], fmod=1), [ints(7, -7, 7, -7), ints(3, 3, -3, -3)]),
        (node("Gather", ["a", "b"], ["y"]), [ints(5, 6, 7), ints(-1, 0)]),
        (
            node("Slice", ["a", "s", "e", "x", "t"], ["y"]),
            [ints(*range(9)), ints(-2), ints(-99), ints(0), ints(-3)],
        ),
        (node("Concat", ["a", "b"], ["y"], axis=0), [ints(1, 2), ints(3)]),
        (node("Unsqueeze", ["a", "x"], ["y"]), [ints(1, 2), ints(0, 2)]),
        (node("Reshape", ["a", "s"], ["y"]), [ints(*range(12)).reshape(2, 6), ints(0, -1, 3)]),
        (node("Range", ["a", "b", "c"], ["y"]), [np.array(9), np.array(0), np.array(-4)]),
        (node("Tile", ["a", "r"], ["y"]), [ints(1, 2), ints(3)]),
        (node("Expand", ["a", "s"], ["y"]), [ints(1, 2).reshape(2, 1), ints(1, 3)]),
        (node("ReduceProd", ["a", "x"], ["y"], keepdims=0), [ints(1, 2, 3, 4).reshape(2, 2), ints(1)]),
        (node("Where", ["c", "a", "b"], ["y"]), [np.array([True, False]), ints(1, 2), ints(3, 4)]),
        (node("Pow", ["a", "b"], ["y"]), [np.array([2, 3], np.float32), ints(2)]),
        (node("CumSum", ["a", "x"], ["y"]), [ints(1, 2, 3), np.array(0)]),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_a_small_value_is_what_the_reference_computes(n: Any, arrays: list[np.ndarray]) -> None:
    given_inputs = dict(zip(n.input, arrays, strict=True))
    shapes = {
        k: (onnx.helper.np_dtype_to_tensor_dtype(a.dtype), list(a.shape)) for k, a in given_inputs.items()
    }
    (wanted,) = ReferenceEvaluator(model_of([n], shapes, ["y"])).run(None, given_inputs)
    found = fold(call(n, [known(a) for a in arrays]))
    assert found is not None and found[0].known is not None
    assert found[0].known.dtype == wanted.dtype and found[0].known.tolist() == wanted.tolist()


def test_what_is_unknown_too_large_or_wrong_is_left_to_the_rule_of_the_op() -> None:
    add = node("Add", ["a", "b"], ["y"])
    assert fold(call(add, [known(ints(1)), Value(shape=(1,), dtype="int64")])) is None
    assert fold(call(add, [known(ints(1, 2)), known(ints(1, 2, 3))])) is None
    assert fold(call(node("Div", ["a", "b"], ["y"]), [known(ints(1)), known(ints(0))])) is None
    assert fold(call(node("MatMul", ["a", "b"], ["y"]), [known(ints(1)), known(ints(1))])) is None
    tile = node("Tile", ["a", "r"], ["y"])
    for repeats in (MOST_KNOWN, MOST_KNOWN + 1):
        made = fold(call(tile, [known(ints(1)), known(ints(repeats))]))
        assert (made is not None) == (repeats == MOST_KNOWN)


def test_one_sided_infinities_are_left_to_the_rule_of_the_op() -> None:
    both, one = (node("IsInf", ["a"], ["y"], **k) for k in ({}, {"detect_negative": 0}))
    infinite = [known(np.array([-np.inf], np.float32))]
    assert fold(call(both, infinite)) is not None and fold(call(one, infinite)) is None


def test_views_of_weights_stay_weights() -> None:
    weight = known(ints(1, 2))
    weight.weight = True
    assert fold(call(node("Identity", ["a"], ["y"]), [weight])) is None


@given(st.integers(0, 6), st.data())
def test_the_bounds_of_a_slice_select_what_pythons_slice_selects(size: int, data: st.DataObject) -> None:
    start, end = (data.draw(st.integers(-size - 3, size + 3)) for _ in range(2))
    step = data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))
    row = list(range(size))
    # The specification clamps the start to the first element; Python goes before it if the step is negative.
    assert row[slice(*slice_bounds(start, end, step, size))] == row[max(start, -size) : end : step]
