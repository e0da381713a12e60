"""Products, reductions and losses: their FLOPs and results' shapes, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from tests.frontends.onnx.cases import graph_of, model_of, node  # noqa: E402
from tests.ir.graphs import flops  # noqa: E402


@pytest.mark.parametrize(
    ("n", "a", "b", "y", "products"),
    [
        (node("MatMul", ["a", "b"], ["y"]), (4, 8), (8, 2), (4, 2), 4 * 8 * 2),
        (node("MatMul", ["a", "b"], ["y"]), (3, 1, 4, 8), (5, 8, 2), (3, 5, 4, 2), 3 * 5 * 4 * 8 * 2),
        (node("MatMul", ["a", "b"], ["y"]), (8,), (8, 2), (2,), 8 * 2),
        (node("Gemm", ["a", "b"], ["y"], transA=1), (8, 4), (8, 2), (4, 2), 4 * 8 * 2),
        (node("Gemm", ["a", "b"], ["y"], transB=1), (4, 8), (2, 8), (4, 2), 4 * 8 * 2),
        (
            node("Einsum", ["a", "b"], ["y"], equation="bij,bkj->kib"),
            (3, 4, 8),
            (3, 2, 8),
            (2, 4, 3),
            3 * 4 * 8 * 2,
        ),
        (node("Einsum", ["a", "b"], ["y"], equation="...i,ij"), (7, 4, 8), (8, 2), (7, 4, 2), 7 * 4 * 8 * 2),
    ],
)
def test_a_product_has_two_flops_for_each_pair_that_is_multiplied(
    n: Any, a: tuple[int, ...], b: tuple[int, ...], y: tuple[int, ...], products: int
) -> None:
    model = model_of([n], {"a": a, "b": b}, ["y"])
    found = from_onnx.trace(model)
    assert found.values["y"][1] == y
    assert flops(graph_of(model), "matmul") == 2 * products


@pytest.mark.parametrize(
    ("n", "y"),
    [
        (node("ReduceSum", ["a"], ["y"]), (1, 1, 1)),
        (node("ReduceSum", ["a"], ["y"], noop_with_empty_axes=1), (3, 4, 8)),
        (node("ReduceMean", ["a"], ["y"], keepdims=0), ()),
        (node("ArgMax", ["a"], ["y"], axis=-2), (3, 1, 8)),
        (node("ArgMin", ["a"], ["y"], axis=1, keepdims=0), (3, 8)),
        (node("LogSoftmax", ["a"], ["y"], axis=0), (3, 4, 8)),
    ],
)
def test_a_reduction_removes_its_dims_or_keeps_them_with_one_element(n: Any, y: tuple[int, ...]) -> None:
    model = model_of(
        [n, node("Identity", ["y"], ["z"]), node("Relu", ["a"], ["r"])], {"a": (3, 4, 8)}, ["z", "r"]
    )
    assert from_onnx.trace(model).values["y"][1] == y


@pytest.mark.parametrize(("opset", "split"), [(11, {4}), (13, {3, 4})])
def test_an_old_softmax_normalizes_over_all_later_dims(opset: int, split: set[int]) -> None:
    """Until opset 12, the axis divides the dims in two. Since then, it is one dim, and the others are parallel."""
    graph = from_onnx.trace(
        model_of([node("Softmax", ["a"], ["y"], axis=1)], {"a": (4, 2, 3)}, ["y"], opset=opset)
    ).graph
    (sums,) = [n for n in graph.nodes if n.main.name == "reduce_sum"]
    assert {d.size for d in sums.space if d.kind == "parallel"} == split
