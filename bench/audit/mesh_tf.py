"""Compares our layouts with those of mesh_tensorflow.auto_mtf.

    python -m bench audit.mesh_tf [mlp]

A Keras model is read, and a Mesh-TensorFlow program is written for a plan that splits nothing: each dim has one name,
and auto_mtf chooses the layout of the dims. Its choice is then priced as a strategy on our graph (the search fills in
what it leaves open). Our choice is rated by its estimate, which is peak memory in elements. The counters of Mesh-TF say
how many bytes each lowered step sends. auto_mtf minimizes memory and pase minimizes time, so their aims differ. Writes
bench/results/mesh_tf.json.
"""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.runner import Benchmark

MESH = "4x2"
DEVICES = 8
RUNS = 3


def models() -> dict[str, tuple[Any, list[Any]]]:
    """Returns the loss function and its specs for each model; they are built but never run."""
    import keras
    import tensorflow as tf

    layers = keras.layers

    def of(
        model: Any, shape: tuple[int, ...], words: bool = False, labels: tuple[int, ...] = ()
    ) -> tuple[Any, list[Any]]:
        model.build(shape)

        @tf.function
        def loss(x: Any, y: Any) -> Any:
            logits = model(x, training=False)
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

        x = tf.TensorSpec(shape, tf.int32 if words else tf.float32, name="x")
        return loss, [x, tf.TensorSpec(labels or shape[:1], tf.int32, name="y")]

    tokens = keras.Input((128,), dtype="int32")
    h = layers.Embedding(8192, 512)(tokens)
    for _ in range(2):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(8, 64)(h, h, use_causal_mask=True))
        h = layers.LayerNormalization()(h + layers.Dense(512)(layers.Dense(2048, activation="relu")(h)))
    transformer = keras.Model(tokens, layers.Dense(8192)(h))
    relu = {"activation": "relu"}
    return {
        "mlp": of(
            keras.Sequential([layers.Dense(4096, **relu), layers.Dense(4096, **relu), layers.Dense(1024)]),
            (256, 1024),
        ),
        "alexnet": of(
            keras.Sequential(
                [
                    layers.Conv2D(96, 11, 4, **relu),
                    layers.MaxPool2D(3, 2),
                    layers.Conv2D(256, 5, padding="same", **relu),
                    layers.MaxPool2D(3, 2),
                    layers.Conv2D(384, 3, padding="same", **relu),
                    layers.Conv2D(384, 3, padding="same", **relu),
                    layers.Conv2D(256, 3, padding="same", **relu),
                    layers.MaxPool2D(3, 2),
                    layers.Flatten(),
                    layers.Dense(4096, **relu),
                    layers.Dense(4096, **relu),
                    layers.Dense(1000),
                ]
            ),
            (128, 227, 227, 3),
        ),
        "transformer": of(transformer, (64, 128), True, (64, 128)),
        "lstm": of(
            keras.Sequential(
                [layers.Embedding(8192, 512), layers.LSTM(512, return_sequences=True), layers.Dense(8192)]
            ),
            (64, 8),
            True,
            (64, 8),
        ),
    }


def module(text: str) -> Any:
    """Returns the generated program as a module."""
    program = types.ModuleType("generated")
    exec(compile(text, "generated_mtf.py", "exec"), program.__dict__)
    return program


def built(program: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Builds a program's training step; returns (tf.Graph, Mesh-TF's graph, its mesh, loss and gradients)."""
    from pase.backends.mesh_tf.runtime_ops import descend
    from pase.backends.mesh_tf.shim import mesh_tensorflow

    mtf, tf = mesh_tensorflow()
    graph = tf.Graph()
    with graph.as_default():
        mtf_graph = mtf.Graph()
        mesh = mtf.Mesh(mtf_graph, "mesh")
        inputs = {k: tf.placeholder(dtype, shape, k) for k, (shape, dtype) in program.INPUTS.items()}
        loss, parameters = program.model(mesh, inputs, None)
        loss, gradients, _ = descend(loss, parameters, 0.1)
    return graph, mtf_graph, mesh, [loss, *gradients]


def moved_bytes(program: Any, mesh_shape: str, rules: str) -> dict[str, float] | str:
    """Returns the bytes of a device's buffers (4-byte elements) by kind, summed over the collectives of a lowered step.

    If Mesh-TF cannot lower the program under these rules, returns its message.
    """
    from pase.backends.mesh_tf.shim import mesh_tensorflow

    mtf, _ = mesh_tensorflow()
    graph, mtf_graph, mesh, _ = built(program)
    with graph.as_default():
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mesh_shape, rules, [f"/cpu:{i}" for i in range(DEVICES)]
        )
        try:
            lowering = mtf.Lowering(mtf_graph, {mesh: impl})
        except (ValueError, NotImplementedError) as e:
            return f"cannot be lowered: {e}"[:300]
    out: dict[str, float] = {}
    for key, elements in lowering._counters:
        kind = key.partition("/")[0]
        if kind in ("allreduce", "allconcat", "alltoall"):
            out[kind] = out.get(kind, 0.0) + 4.0 * float(elements) / DEVICES
    return out


def as_strategy(names: Any, space: Any, rules: Mapping[str, str], axes: list[str]) -> dict[str, np.ndarray]:
    """Returns the configs that a layout by dims' names gives our nodes; nodes without such a config are left out."""
    pinned = {}
    for node, configs in zip(space.graph.nodes, space.configs, strict=True):
        row = np.full(len(axes), -1, dtype=np.int8)
        for i, d in enumerate(node.space):
            if d.kind in ("pending", "state"):
                continue
            (factor,) = names.factors(node, d.name)
            axis = rules.get(names.name(factor))
            if axis is not None and row[axes.index(axis)] < 0:
                row[axes.index(axis)] = i
        if (configs == row).all(axis=1).any():
            pinned[node.name] = row
    return pinned


def compare(name: str, loss: Any, specs: list[Any]) -> dict[str, Any]:
    """Returns a row: bytes, seconds and numbers of our layout and of auto_mtf's."""
    from pase.backends.emit import mesh_tf
    from pase.backends.mesh_tf.legality import parse_pairs
    from pase.backends.mesh_tf.names import Names
    from pase.backends.mesh_tf.shim import mesh_tensorflow
    from pase.compiler.meshes.baselines import complete, price_baselines
    from pase.compiler.meshes.plans import plan_of
    from pase.compiler.meshes.search import search_meshes
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends.tf import frontend as from_tf

    mtf, _ = mesh_tensorflow()
    from mesh_tensorflow.auto_mtf import layout_optimizer, memory_estimator

    traced = from_tf.trace(loss, *specs)
    problem = SplitProblem.of(traced.graph, DEVICES, None, "analytic", "sgd")
    (mesh,) = problem.meshes(MESH, 3)
    space = problem.tables(mesh)[1]
    axes = list(mesh.names)
    mesh_shape = ";".join(f"{a}:{n}" for a, n in zip(mesh.names, mesh.sizes, strict=True))

    searched = []
    for _ in range(RUNS):
        again = SplitProblem.of(traced.graph, DEVICES, None, "analytic", "sgd")
        began = time.perf_counter()
        found = search_meshes(again, [mesh])
        searched.append(time.perf_counter() - began)
    ours = plan_of(problem, found.configs, mesh, name, traced)  # type: ignore[arg-type]
    our_text, our_layout = mesh_tf.program(ours)

    first = {n.name: c[0] for n, c in zip(space.graph.nodes, space.configs, strict=True)}
    whole = plan_of(problem, first, mesh, name, traced)  # type: ignore[arg-type]
    text, _ = mesh_tf.program(whole)
    _, mtf_graph, _, outputs = built(module(text))
    solved = []
    for _ in range(RUNS):
        began = time.perf_counter()
        estimator = memory_estimator.MemoryEstimator(mtf_graph, mtf.convert_to_shape(mesh_shape), outputs)
        optimizer = layout_optimizer.LayoutOptimizer(estimator)
        rules = optimizer.solve()
        solved.append(time.perf_counter() - began)
    their_memory = optimizer.evaluate_layout(rules)
    whole_memory = optimizer.evaluate_layout("")

    layout = dict(parse_pairs(rules, "auto_mtf's layout"))
    pinned = as_strategy(Names(space.graph, mesh, whole.strategy), space, layout, axes)
    theirs = plan_of(problem, complete(problem, pinned, mesh), mesh, name, traced)  # type: ignore[arg-type]
    data = price_baselines(problem)[0]

    our_module = module(our_text)
    _, our_graph, _, our_outputs = built(our_module)
    estimator = memory_estimator.MemoryEstimator(
        our_graph, mtf.convert_to_shape(our_layout.mesh_shape), our_outputs
    )
    our_memory = layout_optimizer.LayoutOptimizer(estimator).evaluate_layout(our_layout.layout_rules)
    planned: dict[str, float] = {}
    for c in ours.collectives:
        planned[c.kind] = planned.get(c.kind, 0.0) + float(c.nbytes * c.times)
    return {
        "nodes": {
            "tensorflow": len(traced.operands),
            "ours": len(space.graph.nodes),
            "mesh_tf": len(mtf_graph.operations),
        },
        "mesh": mesh_shape,
        "ours": {
            "cost_s": ours.cost,
            "search_s": statistics.median(searched),
            "layout_rules": our_layout.layout_rules,
            "estimated_by_auto_mtf": our_memory,
            "planned_bytes": planned,
            "lowered_bytes": moved_bytes(our_module, our_layout.mesh_shape, our_layout.layout_rules),
        },
        "auto_mtf": {
            "cost_s": theirs.cost,
            "search_s": statistics.median(solved),
            "layout_rules": rules,
            "estimated_by_auto_mtf": their_memory,
            "pinned_nodes": len(pinned),
            "lowered_bytes": moved_bytes(module(text), mesh_shape, rules),
        },
        "replicated": {"cost_s": whole.cost, "estimated_by_auto_mtf": whole_memory},
        "baselines_s": {b.name: b.cost for b in data if b.mesh.sizes == mesh.sizes},
        "ratio": theirs.cost / ours.cost,
    }


BENCH = Benchmark(
    "mesh_tf",
    lambda: {name: (name, *model) for name, model in models().items()},
    compare,
    at="models",
    head={"devices": DEVICES, "mesh": MESH, "runs": RUNS},
)
