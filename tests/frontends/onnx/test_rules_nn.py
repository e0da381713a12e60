"""Transforms of signals: the dims that cannot be split."""

from __future__ import annotations

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import helper  # noqa: E402

from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from tests.frontends.onnx.cases import model_of  # noqa: E402


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("opset", [17, 20])
def test_the_transformed_dim_of_a_fourier_transform_is_not_split(axis: int, opset: int) -> None:
    if opset == 17:
        node, weights = helper.make_node("DFT", ["x"], ["y"], axis=axis), {}
    else:
        node, weights = helper.make_node("DFT", ["x", "", "axis"], ["y"]), {"axis": np.array(axis, np.int64)}
    model = model_of([node], {"x": [4, 4, 4, 2]}, {"y": [4, 4, 4, 2]}, weights, opset)
    (dft,) = [n for n in from_onnx.trace(model).graph.nodes if n.main.name == "dft"]
    walks = [[dft.space[d].kind for d in w.dims] for w in dft.main.reads[0].map.walks]
    assert walks == [["parallel"] if i < axis else ["replicated"] for i in range(4)]


def test_a_window_is_read_whole() -> None:
    """The window of an STFT is not split, even if it has as many elements as there are signals."""
    nodes = [
        helper.make_node("Exp", ["w"], ["window"]),
        helper.make_node("STFT", ["x", "step", "window"], ["y"]),
    ]
    weights = {"w": np.ones(8, np.float32), "step": np.array(4, np.int64)}
    model = model_of(nodes, {"x": [8, 32, 1]}, {"y": [8, 7, 5, 2]}, weights)
    (stft,) = [n for n in from_onnx.trace(model).graph.nodes if n.main.name == "stft"]
    signals, window = stft.main.reads
    assert [stft.space[d].kind for w in signals.map.walks for d in w.dims] == ["parallel", "replicated"]
    assert [stft.space[d].kind for w in window.map.walks for d in w.dims] == ["replicated"]
