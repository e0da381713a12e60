"""dPRO's measured peak memory under TensorFlow, predicted.

    python -m bench published.dpro_memory

Tables 3 and 4 of dPRO: BERT-base, ResNet50, InceptionV3 and VGG16, one device's share of data parallelism with 32
samples, and BERT with 64 samples: plain, with recomputation, or with two micro-batches. float32; Adam for BERT,
momentum for the others; images of 224 (InceptionV3: 299). The paper does not give BERT's sequence length; 128 is that
of phase one of pre-training.

There are two accounts. pase's own is of what a compiler keeps for backward. TensorFlow 1 does not fuse, so the other
account keeps the operands that the derivative of each op needs. BERT's dropout (0.1 on attention, on both outputs of a
layer and on the embedding; the zoo's model has none) then keeps its scaled input and its mask, both float32
(tf.nn.dropout). Writes bench/results/dpro_memory.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.runner import Benchmark
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.ir.recompute import needs
from pase.machine import Mesh
from pase.memory.account import Memory, memory
from pase.tables.layouts import concrete_size
from pase.tables.work import OPTIMIZERS
from pase.zoo.cnn import resnet, vgg
from pase.zoo.cnn_branched import inception
from pase.zoo.layers import Built, shapes
from pase.zoo.transformers import bert

RESNET50 = dict(stem=64, stages=((3, 64), (4, 128), (6, 256), (3, 512)), expansion=4)
VGG16 = dict(stages=((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), hidden=4096)
BERT = dict(seq=128, layers=12, vocab=30522, dtype="float32", scan=0, d=768, heads=12, context=512)


def models() -> list[tuple[str, Callable[[], Built], str, float, float]]:
    """Returns (name, model, optimizer, measured GB, dPRO's estimate in GB) of each row."""
    image: dict[str, Any] = dict(batch=32, classes=1000, dtype="float32")
    return [
        ("BERT, 32", partial(bert, batch=32, remat=0, attention="plain", **BERT), "adam", 9.96, 10.25),
        ("ResNet50, 32", partial(resnet, image=224, **image, **RESNET50), "momentum", 5.41, 5.71),
        (
            "InceptionV3, 32",
            partial(inception, image=299, narrow=1, blocks=(3, 4, 2), **image),
            "momentum",
            3.91,
            4.05,
        ),
        ("VGG16, 32", partial(vgg, image=224, **image, **VGG16), "momentum", 5.91, 5.83),
        ("BERT, 64", partial(bert, batch=64, remat=0, attention="plain", **BERT), "adam", 16.42, 16.97),
        (
            "BERT, 64, recomputation",
            partial(bert, batch=64, remat=1, attention="plain", **BERT),
            "adam",
            7.43,
            7.20,
        ),
    ]  # type: ignore[arg-type]


def predict(built: Built, optimizer: str) -> Memory:
    """Returns the bytes on one device that holds the whole model."""
    graph = named(simplify(trace(built.loss_fn, shapes(built.params), shapes(built.batch)).graph))
    mesh = Mesh(names=("data",), sizes=(1,))
    configs = {n.name: np.full(1, -1, np.int8) for n in graph.nodes}
    return memory(graph, mesh, configs, optimizer)


def unfused_bytes(built: Built, optimizer: str) -> float:
    """Returns the bytes of parameters, gradients, optimizer state, and the operands that the derivative of each op
    needs, without recomputation."""
    graph = named(simplify(trace(built.loss_fn, shapes(built.params), shapes(built.batch)).graph))
    stored = {a.tensor for n in graph.nodes if n.kind == "parameter" for op in n.ops for a in op.writes}
    wanted: set[str] = set()
    for n in graph.nodes:
        for op in n.ops:
            if any(graph.tensors[a.tensor].needs_grad for a in op.writes):
                wanted.update(needs(op, graph.tensors))
    kept = sum(concrete_size(graph.tensors[t].nbytes, t) for t in wanted - stored)
    parameters = sum(concrete_size(t.nbytes, t.name) for t in graph.parameters)
    return float(kept + parameters * (2 + OPTIMIZERS[optimizer]))


def dropout_bytes(batch: int) -> float:
    """Returns the bytes that BERT's unfused dropouts keep: their scaled input and their mask, in float32."""
    seq, layers, d, heads = (int(str(BERT[k])) for k in ("seq", "layers", "d", "heads"))
    return 2.0 * 4 * batch * (layers * (heads * seq**2 + 2 * seq * d) + seq * d)


def measured(
    name: str, built: Callable[[], Built], optimizer: str, measured_gb: float, theirs_gb: float
) -> dict[str, Any]:
    """Returns a row: predicted peak memory by both accounts, and the measured one."""
    model = built()
    m = predict(model, optimizer)
    # With recomputation, backward keeps other tensors: the second account does not cover that.
    apart = None if "recomputation" in name else unfused_bytes(model, optimizer) / 1e9
    if apart is not None and name.startswith("BERT"):
        apart += dropout_bytes(int(name.split(", ")[1])) / 1e9
    return {
        "measured_gb": measured_gb,
        "dpro_gb": theirs_gb,
        "dpro_error": theirs_gb / measured_gb - 1,
        "predicted_gb": m.total / 1e9,
        "error": m.total / 1e9 / measured_gb - 1,
        "parts_gb": {k: round(v / 1e9, 3) for k, v in vars(m).items()},
        "unfused_gb": apart,
        "unfused_error": apart and apart / measured_gb - 1,
    }


BENCH = Benchmark("dpro_memory", {model[0]: model for model in models()}, measured, named="{model}")
