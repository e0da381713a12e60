"""Real models through the TensorFlow frontend.

Shapes are compared with TensorFlow's, FLOPs with its profiler and with published figures, and models with their JAX
versions.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import pase
from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.tf.frontend import TracedTf, trace
from pase.ir import Place, simplify, verify
from tests.frontends.tf.graphs import convnet, lstm, transformer
from tests.frontends.tf.twins import TWINS, twin
from tests.ir.graphs import flops

BATCH = {"batch": 4}


def profiled(model: Any, batch: int) -> float:
    """The FLOPs of products and convolutions in a forward pass, counted by TensorFlow's profiler."""
    (x,) = model.inputs
    concrete = tf.function(lambda a: model(a, training=False)).get_concrete_function(
        tf.TensorSpec((batch, *x.shape[1:]), x.dtype)
    )
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    found = tf.compat.v1.profiler.profile(concrete.graph, cmd="op", options=options)
    heavy = ("MatMul", "BatchMatMulV2", "Conv2D", "DepthwiseConv2dNative", "Conv2DBackpropInput")
    return float(
        sum(
            child.total_float_ops - sum(c.total_float_ops for c in child.children)
            for child in _ops(found)
            if child.name in heavy
        )
    )


def _ops(node: Any) -> Any:
    yield node
    for child in node.children:
        yield from _ops(child)


def shapes_agree(traced: TracedTf) -> int:
    """Assert that every result has the shape that TensorFlow infers. Returns the number of results compared."""
    compared = 0
    for node in traced.program.main.nodes:
        for k, name in enumerate(traced.results[Place(node.name)]):
            wanted = node.hint(k)
            if name and node.op != "Placeholder" and wanted is not None and None not in wanted:
                assert traced.graph.tensors[name].shape == wanted, (node.name, node.op)
                compared += 1
    return compared


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "gmacs", "parameters"),
    [  # published multiply-adds per image: Simonyan & Zisserman 2015 (19.6); Sandler et al. 2018 (0.300). All 40 models
        # of keras.applications: bench/audit/tf_applications.py
        ("VGG19", 19.63, 143_667_240),
        ("MobileNetV2", 0.301, 3_538_984),
    ],
)
def test_applications(name: str, gmacs: float, parameters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """keras.applications: published multiply-adds, and every parameter in the graph by its path."""
    for kind in (
        keras.initializers.VarianceScaling,
        keras.initializers.RandomNormal,
    ):  # the weights are not used
        monkeypatch.setattr(
            kind, "__call__", lambda self, shape, dtype=None, **_: keras.ops.zeros(shape, dtype)
        )
    model = getattr(keras.applications, name)(weights=None)
    traced = trace(model, dims={"batch": 2})
    assert flops(traced.graph, "matmul", "conv") / 2 / 2 / 1e9 == pytest.approx(gmacs, rel=5e-3)
    trainable = {v.path: tuple(v.shape) for v in model.trainable_variables}
    assert {t.path: t.shape for t in traced.graph.parameters} == trainable
    assert set(traced.param_paths) == set(trainable)
    assert model.count_params() == parameters
    assert shapes_agree(traced) > 100
    keras.backend.clear_session()


@pytest.mark.parametrize("make", [convnet, transformer], ids=["convnet", "transformer"])
def test_products_are_those_of_tensorflows_profiler(make: Any) -> None:
    model = make()
    ours = flops(trace(model, dims=BATCH).graph, "matmul", "conv")
    assert ours == profiled(model, 4)


def test_graphs_are_sound() -> None:
    for model in (convnet(), transformer(), lstm()):
        traced = trace(model, dims=BATCH)
        verify(simplify(traced.graph))
        assert traced.frontend == "tensorflow" and traced.input_paths[-1] in ("images", "tokens")


@pytest.mark.some(3)
@pytest.mark.parametrize("model", sorted(TWINS))
def test_same_architecture_as_through_jax(model: str) -> None:
    """The zoo's models, rewritten in TensorFlow, have the same nodes, strategy and cost."""
    full = f"{model}?dtype=float32" + ("&scan=0&remat=0&attention=plain" if model == "gpt2" else "")
    step, specs, m = twin(full)
    ours, theirs = registry.trace(step, *specs), registry.trace(m.loss_fn, m.params, m.batch)
    kinds = [sorted(n.kind for n in simplify(t.graph).nodes) for t in (ours, theirs)]
    assert kinds[0] == kinds[1]
    assert flops(ours.graph, "matmul", "conv") == flops(theirs.graph, "matmul", "conv")
    a = pase.compile(step, *specs, devices=8, baselines=False, max_axes=2)
    b = pase.compile(m.loss_fn, m.params, m.batch, devices=8, baselines=False, max_axes=2)
    assert a.cost == pytest.approx(b.cost, rel=1e-3)
    assert a.mesh.sizes == b.mesh.sizes
    assert {k: v.storage for k, v in a.parameters.items()} == {k: v.storage for k, v in b.parameters.items()}


def test_compile_takes_a_keras_model() -> None:
    plan = pase.compile(transformer(), devices=4, dims=BATCH, max_axes=2)
    assert plan.optimal and plan.cost <= min(plan.baselines.values()) * (1 + 1e-9)
    with pytest.raises(PaseError, match="tensorflow frontend"):
        _ = plan.jax
