"""Time and memory to lower an ONNX file, by its nodes and its weights.

    python -m bench search.onnx_size

The files are chains of transformer blocks as exporters write them (with sizes computed by Shape, Gather, Concat and
Reshape), up to 50,000 nodes, and one file with 600 MB of weights and the same graph without any. Each measurement is a
process of its own: its time is the CPU time of ``pase.frontends.onnx.frontend.trace`` (reading included; one thread),
its memory the growth of the peak resident set. Writes bench/results/onnx_size.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.runner import ROOT, Benchmark

CHILD = """
import json, resource, sys, time
import onnx, numpy, sympy
from pase.frontends.onnx import frontend as from_onnx
from pase.ir import named, simplify
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
start = time.process_time()
traced = from_onnx.trace(sys.argv[1], dims={"batch": 64})
seconds, grown = time.process_time() - start, peak() - before
start = time.process_time()
nodes = len(named(simplify(traced.graph)).nodes) if sys.argv[2] == "simplify" else None
print(json.dumps({"lower_cpu_s": seconds, "memory_mb": grown, "raw_nodes": len(traced.graph.nodes),
                  "simplify_cpu_s": time.process_time() - start if nodes else None, "nodes": nodes}))
"""


def blocks(count: int, d: int, weights: bool) -> Any:
    """Returns a ModelProto of ``count`` transformer blocks over [batch, 32, d], 45 nodes each."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    tensors: list[Any] = []
    n = 0

    def op(kind: str, *ins: str, **attributes: Any) -> str:
        nonlocal n
        n += 1
        nodes.append(helper.make_node(kind, list(ins), [f"v{n}"], **attributes))
        return f"v{n}"

    def weight(name: str, *shape: int) -> str:
        t = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        if weights:
            t.raw_data = b"\0" * (4 * int(np.prod(shape)))
        tensors.append(t)
        return name

    for name, value in (("zero", 0), ("one", 1), ("heads", [4]), ("width", [d // 4]), ("all", [d])):
        tensors.append(numpy_helper.from_array(np.array(value, np.int64), name))
    x = "x"
    for i in range(count):
        y = op("LayerNormalization", x, weight(f"{i}.n1", d), weight(f"{i}.b1", d), axis=-1)
        shape = op("Shape", y)
        axes = ["zero", "one"]
        b, s = (op("Unsqueeze", op("Gather", shape, a, axis=0), "zero") for a in axes)
        split = op("Concat", b, s, "heads", "width", axis=0)
        merged = op("Concat", b, s, "all", axis=0)
        q, k, v = (
            op(
                "Transpose",
                op(
                    "Reshape",
                    op("Add", op("MatMul", y, weight(f"{i}.{p}", d, d)), weight(f"{i}.{p}b", d)),
                    split,
                ),
                perm=[0, 2, 1, 3],
            )
            for p in "qkv"
        )
        scores = op("Mul", op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2])), "scale")
        out = op("MatMul", op("Softmax", scores, axis=-1), v)
        out = op("Reshape", op("Transpose", out, perm=[0, 2, 1, 3]), merged)
        x = op("Add", x, op("Add", op("MatMul", out, weight(f"{i}.o", d, d)), weight(f"{i}.ob", d)))
        y = op("LayerNormalization", x, weight(f"{i}.n2", d), weight(f"{i}.b2", d), axis=-1)
        h = op("Add", op("MatMul", y, weight(f"{i}.u", d, 4 * d)), weight(f"{i}.ub", 4 * d))
        cube = op("Mul", op("Mul", h, h), h)
        g = op("Tanh", op("Mul", op("Add", h, op("Mul", cube, "scale")), "scale"))
        h = op("Mul", op("Mul", h, "scale"), op("Add", g, "scale"))
        x = op("Add", x, op("Add", op("MatMul", h, weight(f"{i}.d", 4 * d, d)), weight(f"{i}.db", d)))
    tensors.append(numpy_helper.from_array(np.array(0.5, np.float32), "scale"))
    graph = helper.make_graph(
        nodes,
        "blocks",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 32, d])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def measured(path: Path, simplify: bool, repeats: int) -> dict[str, Any]:
    """Returns medians over new processes: the seconds to lower the file, and the growth of memory."""
    runs = []
    for _ in range(repeats):
        out = subprocess.run(
            [sys.executable, "-c", CHILD, str(path), "simplify" if simplify else "no"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        runs.append(json.loads(out.stdout))
    return {k: None if runs[0][k] is None else median(r[k] for r in runs) for k in runs[0]}


def file_measured(what: str, nodes: int, d: int, weights: bool) -> dict[str, Any]:
    """Returns the row of one file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        model = blocks(nodes // 45, d, weights)
        path.write_bytes(model.SerializeToString())
        row = {"varies": what, "nodes_in_file": len(model.graph.node), "file_mb": path.stat().st_size / 2**20}
        del model
        return row | measured(path, nodes <= 6_000, 3)


CASES = {
    f"{what} {45 * count}": [(what, 45 * count, d, w) for w in weights]
    for what, count, d, weights in (
        *(("nodes", count, 256, [False]) for count in (24, 120, 477, 1191)),
        ("weights", 2, 2048, [False, True]),
    )
}
BENCH = Benchmark(
    "onnx_size",
    CASES,
    lambda files: (file_measured(*file) for file in files),
    named="{varies} {nodes_in_file}",
)
