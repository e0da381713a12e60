"""Ops that move data: shapes as ONNX's reference implementation has them, and the dims that may be split."""

from __future__ import annotations

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from tests.frontends.onnx.cases import model_of, node  # noqa: E402


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("n", "weights"),
    [
        (
            node("Slice", ["x", "s", "e", "a", "t"], ["y"]),
            {"s": ints(7), "e": ints(-99), "a": ints(1), "t": ints(-4)},
        ),
        (node("Slice", ["x", "s", "e"], ["y"]), {"s": ints(1, -3), "e": ints(3, 99)}),
        (node("Pad", ["x", "p", "", "a"], ["y"]), {"p": ints(2, 1), "a": ints(-1)}),
        (node("Flatten", ["x"], ["y"], axis=-1), {}),
        (node("Flatten", ["x"], ["y"], axis=0), {}),
        (node("SpaceToDepth", ["x"], ["y"], blocksize=2), {}),
        (node("DepthToSpace", ["x"], ["y"], blocksize=2, mode="CRD"), {}),
        (node("Tile", ["x", "r"], ["y"]), {"r": ints(1, 2, 1, 3)}),
        (node("Expand", ["x", "s"], ["y"]), {"s": ints(2, 1, 8, 1, 1)}),
        (node("Unsqueeze", ["x", "a"], ["y"]), {"a": ints(0, -1)}),
        (node("Transpose", ["x"], ["y"]), {}),
        (node("CenterCropPad", ["x", "s"], ["y"], axes=[2, 3]), {"s": ints(3, 9)}),
        (
            node("Resize", ["x", "", "s"], ["y"], mode="nearest"),
            {"s": np.array([1, 1, 1.5, 0.5], np.float32)},
        ),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_a_shape_is_that_of_the_reference(n: Any, weights: dict[str, np.ndarray]) -> None:
    model = model_of([n, node("Relu", ["y"], ["z"])], {"x": (4, 8, 4, 6)}, ["z"], weights)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": np.zeros((4, 8, 4, 6), np.float32)})
    assert from_onnx.trace(model).values["z"][1] == wanted.shape


def test_the_parts_of_a_split_are_those_of_the_reference() -> None:
    n = node("Split", ["x", "s"], ["a", "b", "c"], axis=1)
    model = model_of([n], {"x": (4, 8)}, ["a", "b", "c"], {"s": ints(5, 1, 2)})
    wanted = ReferenceEvaluator(model).run(None, {"x": np.zeros((4, 8), np.float32)})
    traced = from_onnx.trace(model)
    assert [traced.values[k][1] for k in "abc"] == [a.shape for a in wanted]


@pytest.mark.parametrize(
    ("n", "weights"),
    [
        (node("Slice", ["x", "s", "e", "a"], ["y"]), {"s": ints(1), "e": ints(4), "a": ints(1)}),
        (node("Pad", ["x", "p"], ["y"]), {"p": ints(0, 1, 0, 0, 1, 0)}),
        (node("Tile", ["x", "r"], ["y"]), {"r": ints(1, 2, 1)}),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_the_dim_along_which_data_moves_is_not_split(n: Any, weights: dict[str, np.ndarray]) -> None:
    graph = from_onnx.trace(model_of([n, node("Relu", ["y"], ["z"])], {"x": (4, 6, 8)}, ["z"], weights)).graph
    (moved,) = [m for m in graph.nodes if m.main.name == n.op_type.lower()]
    (read,) = [a for a in moved.main.reads if len(a.map.walks) == 3]
    assert [{moved.space[d].kind for d in w.dims} == {"parallel"} for w in read.map.walks] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("n", "weights", "why"),
    [
        (node("Transpose", ["x"], ["y"], perm=[0, 2]), {}, r"\[0, 2\]"),
        (node("DepthToSpace", ["x"], ["y"], blocksize=3), {}, "3"),
        (node("Tile", ["x", "r"], ["y"]), {"r": ints(2, 2)}, "2 repeats for 4 dims"),
        (node("Expand", ["x", "s"], ["y"]), {"s": ints(5, 1, 1, 1)}, "do not broadcast"),
        (node("Squeeze", ["x", "a"], ["y"]), {"a": ints(0)}, "Squeeze"),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_what_fits_no_shape_is_refused_with_its_node(
    n: Any, weights: dict[str, np.ndarray], why: str
) -> None:
    with pytest.raises(PaseError, match=why) as e:
        from_onnx.trace(model_of([n], {"x": (4, 8, 4, 6)}, ["y"], weights))
    assert f"{n.op_type} '0'" in e.value.where
