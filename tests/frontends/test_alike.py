"""A model costs the same in every framework: FLOPs, bytes kept for backward, and the cost of data parallelism, of
Megatron's strategy and of random strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("tensorflow")
pytest.importorskip("onnx")
import onnx
import tensorflow as tf
from onnx import TensorProto, helper

from pase.baselines import Baseline, baselines
from pase.compiler.problem.problem import SplitProblem
from pase.frontends import registry
from pase.frontends.registry import Traced
from pase.ir import Graph, Node
from pase.machine import Mesh, load
from pase.memory.residuals import kept
from pase.search.check import cost_of
from pase.tables.layouts import NOT_SPLIT

# Sizes of different meanings differ, so that a dim is identified by its size in every framework.
B, S, T, D, H, K, F, N = 16, 24, 36, 48, 8, 12, 96, 40
IMAGE, CHANNELS, FILTERS = 20, 4, 28
MODELS = ("mlp", "convolutions", "attention", "lstm")
FRAMEWORKS = ("jax", "tensorflow", "onnx")

Shapes = Mapping[str, tuple[int, ...]]

SHAPES: dict[str, tuple[Shapes, Shapes]] = {
    "mlp": ({"w1": (D, F), "b1": (F,), "w2": (F, N), "b2": (N,)}, {"x": (B, D)}),
    "convolutions": (
        {"w": (3, 3, CHANNELS, FILTERS), "scale": (FILTERS,), "bias": (FILTERS,), "out": (FILTERS, N)},
        {"x": (B, CHANNELS, IMAGE, IMAGE)},
    ),
    "attention": (
        {"q": (D, H, K), "k": (D, H, K), "v": (D, H, K), "o": (H, K, D), "scale": (D,), "bias": (D,)},
        {"x": (B, S, D), "memory": (B, T, D)},
    ),
    "lstm": ({"w": (4, F, D), "r": (4, F, F), "out": (F, N)}, {"x": (S, B, D)}),
}
"""Model -> the shapes of its parameters and of its inputs."""


# --- JAX


def _jax_mlp(p: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])


def _jax_convolutions(p: Any, x: Any) -> Any:
    y = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW"))
    y = y - jnp.mean(y, (0, 2, 3), keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), (0, 2, 3), keepdims=True) + 1e-5)
    y = jax.nn.relu(y * p["scale"][:, None, None] + p["bias"][:, None, None])
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return jnp.mean(jnp.mean(y, (2, 3)) @ p["out"])


def _jax_norm(x: Any, p: Any) -> Any:
    y = x - jnp.mean(x, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return y * p["scale"] + p["bias"]


def _jax_attention(p: Any, x: Any, memory: Any) -> Any:
    q = jnp.einsum("bqd,dhk->bqhk", _jax_norm(x, p), p["q"])
    k, v = (jnp.einsum("bsd,dhk->bshk", memory, p[n]) for n in "kv")
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * 0.5
    e = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    weights = e / jnp.sum(e, -1, keepdims=True)
    y = jnp.einsum("bhqs,bshk->bqhk", weights, v)
    return jnp.mean(x + jnp.einsum("bqhk,hkd->bqd", y, p["o"]))


def _jax_lstm(p: Any, x: Any) -> Any:
    entering = jnp.einsum("sbd,gfd->sbgf", x, p["w"])

    def step(state: Any, gates: Any) -> Any:
        h, c = state
        gates = gates + jnp.einsum("bf,gnf->bgn", h, p["r"])
        enter, leave, forget, new = (gates[:, i] for i in range(4))
        kept_part = jax.nn.sigmoid(forget) * c
        c = kept_part + jax.nn.sigmoid(enter) * jnp.tanh(new)
        h = jax.nn.sigmoid(leave) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[1], p["r"].shape[-1]))
    return jnp.mean(lax.scan(step, (zero, zero), entering)[1] @ p["out"])


# --- TensorFlow


def _tf_mlp(p: Any, x: Any) -> Any:
    return tf.reduce_mean(tf.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])


def _tf_convolutions(p: Any, x: Any) -> Any:
    y = tf.nn.conv2d(x, p["w"], 1, "SAME", data_format="NCHW")
    y, _, _ = tf.compat.v1.nn.fused_batch_norm(y, p["scale"], p["bias"], is_training=True, data_format="NCHW")
    y = tf.nn.max_pool2d(tf.nn.relu(y), 2, 2, "VALID", data_format="NCHW")
    return tf.reduce_mean(tf.reduce_mean(y, (2, 3)) @ p["out"])


def _tf_attention(p: Any, x: Any, memory: Any) -> Any:
    y = x - tf.reduce_mean(x, -1, keepdims=True)
    y = y * tf.math.rsqrt(tf.reduce_mean(tf.square(y), -1, keepdims=True) + 1e-5)
    y = y * p["scale"] + p["bias"]
    q = tf.einsum("bqd,dhk->bqhk", y, p["q"])
    k, v = (tf.einsum("bsd,dhk->bshk", memory, p[n]) for n in "kv")
    weights = tf.nn.softmax(tf.einsum("bqhk,bshk->bhqs", q, k) * 0.5)
    y = tf.einsum("bhqs,bshk->bqhk", weights, v)
    return tf.reduce_mean(x + tf.einsum("bqhk,hkd->bqd", y, p["o"]))


def _tf_lstm(p: Any, x: Any) -> Any:
    entering = tf.einsum("sbd,gfd->sbgf", x, p["w"])
    recurrent = tf.convert_to_tensor(p["r"])

    def step(state: Any, gates: Any) -> Any:
        h, c = state
        gates = gates + tf.einsum("bf,gnf->bgn", h, recurrent)
        enter, leave, forget, new = (gates[:, i] for i in range(4))
        c = tf.sigmoid(forget) * c + tf.sigmoid(enter) * tf.tanh(new)
        return tf.sigmoid(leave) * tf.tanh(c), c

    zero = tf.zeros((B, F))
    return tf.reduce_mean(tf.einsum("sbf,fn->sbn", tf.scan(step, entering, (zero, zero))[0], p["out"]))


# --- ONNX


class _Onnx:
    """A graph under construction. ``op`` adds a node and returns the name of its first output."""

    def __init__(self, shapes: Shapes, inputs: Shapes) -> None:
        self.nodes: list[Any] = []
        self.weights = [self.tensor(k, np.zeros(s, np.float32)) for k, s in shapes.items()]
        self.inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in inputs.items()]

    @staticmethod
    def tensor(name: str, a: np.ndarray) -> Any:
        return onnx.numpy_helper.from_array(a, name)

    def number(self, value: Any) -> str:
        name = f"number{len(self.weights)}"
        self.weights.append(self.tensor(name, np.asarray(value)))
        return name

    def op(self, kind: str, *ins: str, outs: int = 1, **attributes: Any) -> str:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outs)]
        self.nodes.append(helper.make_node(kind, ins, names, **attributes))
        return names[0]

    def mean(self, x: str, axes: tuple[int, ...], keep: int = 0) -> str:
        return self.op("ReduceMean", x, self.number(np.array(axes)), keepdims=keep)

    def model(self, name: str, out: str) -> Any:
        y = helper.make_tensor_value_info(out, TensorProto.FLOAT, ())
        graph = helper.make_graph(self.nodes, name, self.inputs, [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def _onnx_mlp(g: _Onnx) -> str:
    y = g.op("Relu", g.op("Add", g.op("MatMul", "x", "w1"), "b1"))
    return g.mean(g.op("Add", g.op("MatMul", y, "w2"), "b2"), (0, 1))


def _onnx_convolutions(g: _Onnx) -> str:
    """Reorders a filter to ONNX's [out in h w]."""
    y = g.op("Conv", "x", g.op("Transpose", "w", perm=[3, 2, 0, 1]), pads=[1, 1, 1, 1])
    mean, variance = (g.number(np.zeros(FILTERS, np.float32)) for _ in range(2))
    y = g.op("BatchNormalization", y, "scale", "bias", mean, variance, outs=3, training_mode=1)
    y = g.op("MaxPool", g.op("Relu", y), kernel_shape=[2, 2], strides=[2, 2])
    return g.mean(g.op("MatMul", g.mean(y, (2, 3)), "out"), (0, 1))


def _onnx_attention(g: _Onnx) -> str:
    y = g.op("LayerNormalization", "x", "scale", "bias", axis=-1)
    q = g.op("Einsum", y, "q", equation="bqd,dhk->bqhk")
    k, v = (g.op("Einsum", "memory", n, equation="bsd,dhk->bshk") for n in "kv")
    scores = g.op("Mul", g.op("Einsum", q, k, equation="bqhk,bshk->bhqs"), g.number(np.float32(0.5)))
    y = g.op("Einsum", g.op("Softmax", scores, axis=-1), v, equation="bhqs,bshk->bqhk")
    return g.mean(g.op("Add", "x", g.op("Einsum", y, "o", equation="bqhk,hkd->bqd")), (0, 1, 2))


def _onnx_lstm(g: _Onnx) -> str:
    w = g.op("Reshape", "w", g.number(np.array([1, 4 * F, D])))
    r = g.op("Reshape", "r", g.number(np.array([1, 4 * F, F])))
    y = g.op("LSTM", "x", w, r, hidden_size=F)
    y = g.op("Squeeze", y, g.number(np.array([1])))
    return g.mean(g.op("MatMul", y, "out"), (0, 1, 2))


# --- comparison


@cache
def traced(model: str, framework: str) -> Traced:
    shapes, inputs = SHAPES[model]
    if framework == "jax":
        made = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        batch = [jax.ShapeDtypeStruct(s, jnp.float32) for s in inputs.values()]
        return registry.trace(globals()[f"_jax_{model}"], made, *batch)
    if framework == "tensorflow":
        variables = {k: tf.Variable(tf.zeros(s), name=k) for k, s in shapes.items()}
        f: Callable[..., Any] = globals()[f"_tf_{model}"]
        specs = [tf.TensorSpec(s, name=k) for k, s in inputs.items()]
        return registry.trace(tf.function(lambda *xs: f(variables, *xs), autograph=False), *specs)
    g = _Onnx(shapes, inputs)
    return registry.trace(g.model(model, globals()[f"_onnx_{model}"](g)))


@cache
def problem(model: str, framework: str) -> SplitProblem:
    """On a card whose products do not depend on how rows are aligned in memory: frameworks store heads differently."""
    return SplitProblem.of(traced(model, framework).graph, 4, load("v100x8"), "analytic", "adam")


def flops(graph: Graph) -> float:
    total = 0.0
    for n in graph.nodes:
        for op in n.ops:
            points = np.prod([float(n.space[d].size) for d in op.worked])
            total += float(op.times) * op.flops_per_point * points
    return total


def kept_bytes(graph: Graph) -> float:
    return sum(float(graph.tensors[k.tensor].nbytes) * float(k.times) for k in kept(graph).values())


def by_method(p: SplitProblem) -> dict[str, float]:
    """The cost of data parallelism, and of Megatron's strategy at every degree at which it applies."""
    made = baselines(p.graph, p.devices, p.machine, p.model, tables_of=p.tables)
    return {b.name: b.cost for b in made if isinstance(b, Baseline) and b.name.startswith(("data", "mega"))}


def drawn(n: Node, configs: np.ndarray, sizes: tuple[int, ...]) -> int:
    """The config that splits, over each axis, the dim whose size was drawn for it, or else the config that splits
    nothing."""
    split = [
        next(
            (i for i, d in enumerate(n.space) if d.size == s and d.kind in ("parallel", "reduction")),
            NOT_SPLIT,
        )
        for s in sizes
    ]
    for row in (split, [NOT_SPLIT] * len(sizes)):
        hit = np.flatnonzero((configs == np.array(row, np.int8)).all(1))
        if hit.size:
            return int(hit[0])
    raise AssertionError(f"{n.name} has no config that splits nothing")


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("model", MODELS)
def test_flops_and_kept_bytes(model: str, framework: str) -> None:
    ours, theirs = (problem(model, f).graph for f in (framework, "jax"))
    assert flops(ours) == flops(theirs)
    assert kept_bytes(ours) == kept_bytes(theirs)


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("model", MODELS)
def test_cost_of_what_people_do(model: str, framework: str) -> None:
    ours, theirs = (by_method(problem(model, f)) for f in (framework, "jax"))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert "data_parallel" in ours and (model != "attention" or len(ours) > 1)


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("model", MODELS)
def test_cost_of_random_strategies(model: str, framework: str) -> None:
    mesh = Mesh(names=("a", "b"), sizes=(2, 2))
    rng = np.random.default_rng(0)
    sizes = sorted(
        {int(s) for t in traced(model, "jax").graph.tensors.values() for s in t.shape if int(s) % 2 == 0}
    )
    for _ in range(12):
        wanted = (int(rng.choice(sizes)), int(rng.choice(sizes)))
        costs = []
        for f in ("jax", framework):
            tables, space = problem(model, f).tables(mesh)
            pairs = zip(space.graph.nodes, space.configs, strict=True)
            choice = np.array([drawn(n, cfg, wanted) for n, cfg in pairs])
            costs.append(cost_of(tables, choice))
        assert costs[1] == pytest.approx(costs[0], rel=1e-12), wanted
