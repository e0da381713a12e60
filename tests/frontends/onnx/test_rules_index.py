"""Lookups and sorts: shapes as ONNX's reference implementation has them, bounds on sizes that depend on the data."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from tests.frontends.onnx.cases import model_of, node  # noqa: E402

X = (3, 4, 5)


def traced(n: Any, ids: tuple[int, ...] = (2, 2)) -> tuple[Any, Any]:
    """A model of the node, which may read x, integer indices and a mask; and its trace."""
    inputs = {"x": X, "i": (TensorProto.INT64, ids), "m": (TensorProto.BOOL, (4,))}
    model = model_of(
        [n],
        {k: v for k, v in inputs.items() if k in n.input},
        list(n.output),
        {"k": np.array(2 if n.op_type == "CumSum" else [2])},
    )
    return model, from_onnx.trace(model)


@pytest.mark.parametrize(
    ("n", "ids"),
    [
        (node("Gather", ["x", "i"], ["y"], axis=1), (2, 6)),
        (node("Gather", ["x", "i"], ["y"], axis=-1), ()),
        (node("GatherElements", ["x", "i"], ["y"], axis=1), (3, 2, 5)),
        (node("GatherND", ["x", "i"], ["y"]), (7, 2)),
        (node("GatherND", ["x", "i"], ["y"], batch_dims=1), (3, 1)),
        (node("TopK", ["x", "k"], ["y", "at"], axis=1), ()),
        (node("CumSum", ["x", "k"], ["y"]), ()),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_a_shape_is_that_of_the_reference(n: Any, ids: tuple[int, ...]) -> None:
    model, found = traced(n, ids)
    given = {"x": np.zeros(X, np.float32), "i": np.zeros(ids, np.int64)}
    wanted = ReferenceEvaluator(model).run(None, {k: v for k, v in given.items() if k in n.input})
    assert [found.values[o][1] for o in n.output] == [w.shape for w in wanted]


@pytest.mark.parametrize(
    ("n", "most"),
    [
        (node("NonZero", ["x"], ["y"]), (3, 60)),
        (node("Compress", ["x", "m"], ["y"], axis=1), (3, 4, 5)),
        (node("Compress", ["x", "m"], ["y"]), (4,)),
        (node("Unique", ["x"], ["y"]), (60,)),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_a_size_that_depends_on_the_data_is_the_largest_one(n: Any, most: tuple[int, ...]) -> None:
    """The data are such that every element counts: the reference then gives exactly this size."""
    model, found = traced(n)
    assert found.values["y"][1] == most
    values = {"x": np.arange(1, 61, dtype=np.float32).reshape(X), "m": np.ones(4, bool)}
    (whole, *_) = ReferenceEvaluator(model).run(None, {k: v for k, v in values.items() if k in n.input})
    assert whole.shape == most


@pytest.mark.parametrize(
    ("n", "ids", "why"),
    [
        (node("GatherND", ["x", "i"], ["y"]), (7, 4), r"0 batch dims do not fit .* \[7, 4\]"),
        (node("GatherND", ["x", "i"], ["y"], batch_dims=1), (2, 1), "batch dims of its indices"),
        (node("Gather", ["x", "i"], ["y"], axis=3), (2,), "axis 3 is out of range"),
        (node("TopK", ["x", "k"], ["y", "at"], axis=4), (), "axis 4 is out of range"),
    ],
    ids=lambda x: getattr(x, "op_type", ""),
)
def test_indices_that_do_not_fit_are_refused(n: Any, ids: tuple[int, ...], why: str) -> None:
    with pytest.raises(PaseError, match=why) as e:
        traced(n, ids)
    assert f"{n.op_type} '0'" in e.value.where


BY_INDICES = {
    "Gather": (node("Gather", ["x", "k"], ["y"], axis=1), (-1,), ()),
    "GatherElements": (node("GatherElements", ["x", "k"], ["y"], axis=1), (X[0], -1, X[2]), ()),
    "GatherND": (node("GatherND", ["x", "k"], ["y"], batch_dims=1), (X[0], -1, 1), ()),
    "ScatterElements": (node("ScatterElements", ["x", "k", "u"], ["y"], axis=1), (1, -1, 1), (1, -1, 1)),
    "ScatterND": (node("ScatterND", ["x", "k", "u"], ["y"]), (-1, 2), (-1, X[2])),
}


@pytest.mark.parametrize(("ids", "taken"), [([0, 4], False), ([4], False), ([-5], False), ([0, -4, 3], True)])
@pytest.mark.parametrize("op", BY_INDICES)
def test_an_index_outside_of_its_dim_is_refused(op: str, ids: list[int], taken: bool) -> None:
    """The reference implementation is the oracle. A single index was taken modulo the dim's size."""
    n, shape, written = BY_INDICES[op]
    k = np.array(ids).reshape(-1, 1) if op in ("GatherND", "ScatterND") else np.array(ids)
    k = np.tile(k, (X[0], 1, 1)) if op == "GatherND" else np.insert(k, 0, 0, 1) if op == "ScatterND" else k
    k = np.tile(k[:, None], (X[0], 1, X[2])) if op == "GatherElements" else k
    stored = {"k": k.reshape(shape)}
    if written:
        stored["u"] = np.zeros([len(ids) if s < 0 else s for s in written], np.float32)
    model = model_of([n], {"x": X}, ["y"], stored)
    if op != "GatherElements":  # of which the reference takes any index; the standard calls it an error
        with contextlib.nullcontext() if taken else pytest.raises(IndexError):
            ReferenceEvaluator(model).run(None, {"x": np.zeros(X, np.float32)})
    if taken:
        assert from_onnx.trace(model).graph.nodes
    else:
        with pytest.raises(PaseError, match="is not in a dim of 4 elements"):
            from_onnx.trace(model)
