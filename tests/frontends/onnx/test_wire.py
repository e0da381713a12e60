"""The wire format of ONNX files: the skeleton of a file, and files that are cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import numpy_helper  # noqa: E402

from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.frontends.onnx.wire import skeleton  # noqa: E402
from tests.frontends.onnx.cases import node, small  # noqa: E402


def test_truncated_anywhere(tmp_path: Path) -> None:
    data = small(node("Relu", ["y"], ["z"])).SerializeToString()
    path = tmp_path / "cut.onnx"
    for n in range(1, len(data)):
        path.write_bytes(data[:n])
        try:
            from_onnx.trace(path)
        except PaseError as e:
            assert e.where.startswith(str(path))


def test_weights_are_not_read(tmp_path: Path) -> None:
    """The skeleton of a file is small for any weights. Small tensors keep their contents."""
    data = small(weights={"w": (8, 16), "big": (1024, 1024), "few": np.arange(3)}).SerializeToString()
    short = skeleton(data)
    assert len(data) > 2**22 and len(short) < 2000
    kept = {t.name: t for t in onnx.ModelProto.FromString(short).graph.initializer}
    assert list(kept["big"].dims) == [1024, 1024] and not kept["big"].raw_data
    assert numpy_helper.to_array(kept["few"]).tolist() == [0, 1, 2]
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert from_onnx.trace(path).graph == from_onnx.trace(onnx.load(path), name=str(path)).graph
