"""Recurrent layers become loops over time."""

from __future__ import annotations

import math

import pytest

onnx = pytest.importorskip("onnx")


from tests.frontends.onnx import exports  # noqa: E402
from tests.frontends.onnx.cases import graph_of  # noqa: E402


@pytest.mark.some(2)
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent(kind: str) -> None:
    """One loop per layer and direction, with the model's weights in ONNX's order."""
    model, shapes = exports.recurrent(kind)
    found = graph_of(model)
    loops = {op.scope for n in found.nodes for op in n.ops if op.scope}
    assert len(loops) == {"LSTM": 2, "GRU": 4}[kind]
    assert {op.times for n in found.nodes for op in n.ops if op.scope} == {10}
    elements = sum(t.elements for t in found.parameters if len(t.shape) > 1)  # type: ignore[misc]
    tables = 100 * 32 + 100 * {"LSTM": 48, "GRU": 96}[kind]
    biases = {"LSTM": 2 * 8 * 48, "GRU": 4 * 6 * 48}[kind]
    assert elements in (sum(map(math.prod, shapes)) + tables + extra for extra in (0, biases))
    split = next(n for n in found.nodes if n.kind == "matmul" and n.times == 10)
    assert all(d.kind in ("parallel", "reduction") for d in split.space if d.size > 4)
