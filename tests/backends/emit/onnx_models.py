"""A small ONNX model for the tests of its annotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.frontends.onnx.cases import model_of

onnx = pytest.importorskip("onnx")


def small() -> Any:
    """Two layers with a fused bias, sizes divisible by 8 devices, and a symbolic batch."""
    node = onnx.helper.make_node
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"], name="first"),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "v"], ["y"], name="second"),
        node("Softmax", ["y"], ["p"], axis=-1),
    ]
    rng = np.random.default_rng(0)
    shapes = {"w": (512, 4096), "b": (4096,), "v": (4096, 1024)}
    weights = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    return model_of(nodes, {"x": ("batch", 512)}, {"p": ("batch", 1024)}, weights=weights)
