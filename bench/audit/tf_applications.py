"""Reads every model of keras.applications by the TensorFlow frontend.

    python -m bench audit.tf_applications          # all 40; 20 minutes on two cores
    python -m bench audit.tf_applications VGG19    # these again

A row has the multiply-adds, parameters, nodes and seconds of a model. The shapes of all results are compared with
TensorFlow's own inference. Writes bench/results/tf_applications.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import gc
import math
import time
from typing import Any

import keras

from bench.runner import Benchmark
from pase.errors import PaseError
from pase.frontends.tf.frontend import trace
from pase.ir import Place, simplify

BATCH = 2


def names() -> list[str]:
    """Returns the names of the models of keras.applications."""
    return [n for n in dir(keras.applications) if n[0].isupper() and callable(getattr(keras.applications, n))]


def _unweighted() -> None:
    """Initializes weights with zeros: nothing here reads them, and drawing 350 million takes minutes."""
    base = (
        keras.initializers.VarianceScaling,
        keras.initializers.RandomNormal,
        keras.initializers.TruncatedNormal,
    )
    for kind in base:
        kind.__call__ = lambda self, shape, dtype=None, **_: keras.ops.zeros(shape, dtype)


def measured(name: str) -> dict[str, Any]:
    """Returns a model's row: multiply-adds, parameters, nodes, seconds."""
    t0 = time.perf_counter()
    model = getattr(keras.applications, name)(weights=None)
    built = time.perf_counter() - t0
    dims = {"batch": BATCH}
    (x,) = model.inputs
    dims |= {f"{x.name}.{i}": 224 for i in (1, 2) if x.shape[i] is None}
    t0 = time.perf_counter()
    traced = trace(model, dims=dims)
    seconds = time.perf_counter() - t0
    compared = wrong = 0
    for node in traced.program.main.nodes:
        for k, made in enumerate(traced.results[Place(node.name)]):
            wanted = node.hint(k)
            if made and node.op != "Placeholder" and wanted is not None and None not in wanted:
                compared += 1
                wrong += traced.graph.tensors[made].shape != wanted
    products = sum(
        op.flops_per_point * math.prod(n.space[d].size for d in op.worked)
        for n in traced.graph.nodes
        for op in n.ops
        if op.kind in ("matmul", "conv")
    )
    out = {
        "gmacs_an_image": round(products / 2 / BATCH / 1e9, 4),
        "parameters": int(sum(math.prod(t.shape) for t in traced.graph.parameters)),
        "trainable_in_keras": int(sum(math.prod(v.shape) for v in model.trainable_variables)),
        "equations": len(traced.graph.nodes),
        "nodes": len(simplify(traced.graph).nodes),
        "shapes_compared": compared,
        "shapes_that_differ": wrong,
        "seconds": {"keras_builds": round(built, 2), "pase_traces": round(seconds, 2)},
    }
    keras.backend.clear_session()
    return out


def row(name: str) -> dict[str, Any]:
    """Returns a model's row, or the error that says why it is not read."""
    gc.collect()
    try:
        return measured(name)
    except PaseError as e:
        return {"error": str(e)}


BENCH = Benchmark(
    "tf_applications",
    names(),
    row,
    at="models",
    head={"keras": keras.__version__, "batch": BATCH},
    prepare=_unweighted,
)
