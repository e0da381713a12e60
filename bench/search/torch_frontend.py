"""Seconds to read and split Llama-3 8B from PyTorch, and autoparallel's.

    python -m bench search.torch_frontend [--only "all meshes"]

64 devices, the model of transformers, forward and loss traced on meta tensors. ``one mesh`` is what autoparallel
solves: the mesh is given. ``decomposed`` is the same with PyTorch's decomposition of the whole graph, which pase leaves
out if the graph is already functional. Published: meta-pytorch/autoparallel#438 (15 s to build, 36.5 s to solve, wall
seconds, the mesh given). Imports are not counted. Writes bench/results/torch_speed.json.
"""

from __future__ import annotations

import itertools
import time
from unittest.mock import patch

from bench.runner import Benchmark

DEVICES = 64
MODEL = (
    "hf:LlamaForCausalLM?hidden_size=4096&intermediate_size=14336&num_hidden_layers=32&num_attention_heads=32"
    "&num_key_value_heads=8&vocab_size=128256&max_position_embeddings=8192&batch=64&sequence=2048&dtype=bfloat16"
)
PUBLISHED = {"tool": "autoparallel", "build_s": 15.0, "solve_s": 36.5}
ROWS = {"one mesh": ("8x8", False), "all meshes": (None, False), "decomposed, one mesh": ("8x8", True)}
"""The given mesh of each row, and whether the whole graph is decomposed."""


def measured(shape: str | None, decomposed: bool) -> dict[str, object]:
    """Returns a row: the CPU seconds of each part."""
    from pase import machine
    from pase.compiler.meshes.search import search_meshes
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends import registry
    from pase.frontends.torch.export import module as torch_export

    laps = [time.process_time()]
    with patch.object(
        torch_export, "is_functional", (lambda *_: False) if decomposed else torch_export.is_functional
    ):
        traced = registry.trace(MODEL)
    laps.append(time.process_time())
    problem = SplitProblem.of(traced.graph, DEVICES, machine.load("h100x8"), "analytic", "adam")
    over = problem.meshes(shape, 3)
    laps.append(time.process_time())
    found = search_meshes(problem, over)
    laps.append(time.process_time())
    trace_s, simplify_s, search_s = (round(b - a, 2) for a, b in itertools.pairwise(laps))
    return {
        "meshes": len(over),
        "mesh": list(found.mesh.sizes),
        "nodes": len(problem.graph.nodes),
        "step_s": found.solution.cost,
        "proven": bool(found.solution.optimal),
        "trace_cpu_s": trace_s,
        "simplify_cpu_s": simplify_s,
        "tables_and_search_cpu_s": search_s,
        "cpu_s": round(laps[-1] - laps[0], 2),
    }


def prepare() -> None:
    """Imports, and compiles the kernels."""
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import pase

    pase.compile("zoo:mlp", devices=8)
    pase.compile("hf:LlamaForCausalLM?num_hidden_layers=1&batch=8", devices=8)


BENCH = Benchmark(
    "torch_speed", ROWS, measured, named="{row}", head={"published": PUBLISHED}, prepare=prepare
)
