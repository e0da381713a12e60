"""Whole models: all files of the onnx package, exports from PyTorch and Keras, and the same models from JAX."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")


import pase  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.ir import verify  # noqa: E402
from tests.frontends.onnx import exports  # noqa: E402
from tests.frontends.onnx.cases import graph_of, light, stored_models  # noqa: E402
from tests.ir.graphs import flops  # noqa: E402


def products_by_onnx(path: Path) -> float:
    """FLOPs of the convolutions and Gemms, from the shapes found by ONNX's own shape inference."""
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True).graph
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    total = 0
    for n in inferred.node:
        if n.op_type == "Conv":
            total += 2 * math.prod(shapes[n.output[0]]) * math.prod(shapes[n.input[1]][1:])
        elif n.op_type == "Gemm":
            inner = math.prod(shapes[n.input[1]]) // shapes[n.output[0]][1]
            total += 2 * math.prod(shapes[n.output[0]]) * inner
    return total


@pytest.mark.some(5)
@pytest.mark.parametrize("path", light(), ids=lambda p: p.stem)
def test_light_models(path: Path) -> None:
    found = graph_of(path)
    assert flops(found, "conv", "matmul") == products_by_onnx(path) > 1e8
    model = onnx.load(path).graph
    made = {n.output[0] for n in model.node if n.op_type == "ConstantOfShape"} | {
        t.name for t in model.initializer
    }
    assert {t.path for t in found.parameters} <= made
    assert all(t.needs_grad for t in found.parameters)
    assert sum(math.prod(t.shape) for t in found.parameters) > 1e6  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["light_bvlc_alexnet", "light_squeezenet", "light_vgg19"])
def test_light_models_compile(name: str) -> None:
    path = next(p for p in light() if p.stem == name)
    plan = pase.compile(str(path), devices=8, mesh="2x4")
    alone = pase.compile(str(path), devices=1)
    assert plan.optimal and 0 < plan.cost <= alone.cost
    assert plan.provenance["frontend"] == "onnx"


def test_every_file_of_the_package() -> None:
    """Every file is read, unless its shapes depend on data, it computes on text, or it has nothing to compute."""
    read, refused = 0, []
    for path in stored_models():
        try:
            verify(from_onnx.trace(path).graph)
            read += 1
        except PaseError as e:
            refused.append(f"{path.parent.name}: {e}")
    assert read > len(refused), "\n".join(refused)
    assert all(
        any(why in r for why in ("computed from the model's data", "text", "symbolic", "Gradient"))
        or "nothing to compute" in r
        for r in refused
    ), "\n".join(refused)


@pytest.mark.some(1)
@pytest.mark.torch
@pytest.mark.parametrize("name", ["mlp", "alexnet", "transformer"])
def test_the_same_model_from_jax(name: str) -> None:
    """The same nodes, cost and strategy as from JAX."""
    model, fn, params, batch = exports.pair(name)
    # On some cards, a strategy and its mirror image cost the same.
    settings: Any = {"devices": 8, "mesh": "2x4", "machine": "mi300x8", "baselines": False}
    ours = pase.compile(model, **settings)
    jax = pase.compile(fn, params, batch, **settings)
    assert len(ours.nodes) == len(jax.nodes)
    # Labels and tokens are 64-bit integers here and 32-bit there.
    assert ours.cost == pytest.approx(jax.cost, rel=1e-4)

    def matrices(
        plan: Any,
    ) -> list[Any]:  # layouts of biases and norms may differ, because they cost the same
        stored = [zip(t.shape, map(len, t.storage), strict=True) for t in plan.parameters.values()]
        return sorted(s for s in map(sorted, stored) if len(s) > 1)

    assert matrices(ours) == matrices(jax)


@pytest.mark.torch
def test_resnet() -> None:
    model = exports.resnet()
    with pytest.raises(PaseError, match="input 'x'") as e:
        from_onnx.trace(model)
    assert "batch" in e.value.what and "--dim 'batch=64'" in e.value.fix
    found = graph_of(model, dims={"batch": 16})
    assert [t.shape for t in found.inputs] == [(16, 3, 32, 32)]
    assert flops(graph_of(model, dims={"batch": 32}), "conv") == 2 * flops(found, "conv")
    with pytest.raises(PaseError, match="'seq'"):
        from_onnx.trace(model, dims={"batch": 2, "seq": 3})


KERAS = """
import sys

import keras
import numpy as np
from keras import layers

model = keras.Sequential([
    layers.Input((32, 32, 3)), layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
    layers.BatchNormalization(), layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10),
])
model(np.zeros((2, 32, 32, 3), "float32"))
model.export(sys.argv[1], format="onnx", verbose=False)
"""


@pytest.mark.torch
def test_keras(tmp_path: Path) -> None:
    """A model from Keras's own exporter on its PyTorch backend, with channels last and transposes for convolution."""
    path = tmp_path / "keras.onnx"
    environment = os.environ | {"KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", KERAS, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = graph_of(path, dims={"batch": 8})
    assert flops(found, "conv") == 2 * 8 * 32 * 32 * 16 * 27
    assert flops(found, "matmul") == 2 * 8 * (16 * 16 * 16 * 64 + 64 * 10)
    assert all(t.needs_grad for t in found.parameters) and [t.shape for t in found.inputs] == [(8, 32, 32, 3)]


@pytest.mark.torch
def test_gpt2() -> None:
    """A transformer from a library has few nodes per layer, as from JAX, and one parameter for the tied embedding."""
    found = graph_of(exports.gpt2(layers=2))
    inner = [n for n in found.nodes if n.kind not in ("parameter", "input", "output")]
    assert len(inner) <= 2 * 14 + 6
    assert sum(t.shape == (512, 64) for t in found.parameters) == 1
    batch = [
        n for n in found.nodes if n.kind == "matmul" and any(d.name == "b" and d.size == 2 for d in n.space)
    ]
    assert len(batch) == sum(n.kind == "matmul" for n in found.nodes)  # no product has merged dims
