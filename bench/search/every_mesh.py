"""What a proof over every mesh finds and takes, compared with the default.

    python -m bench search.every_mesh [--only "gpt2, 32"]

CPU seconds of one process, without a memory limit and without baselines. Writes bench/results/every_mesh.json.
"""

from __future__ import annotations

import time

import pase
from bench.runner import Benchmark

ROWS = (
    ("mlp", 32),
    ("gpt2", 24),
    ("gpt2", 32),
    ("llama3_8b", 32),
    ("mlp", 64),
    ("gpt2", 64),
    ("llama3_8b", 64),
)


def measured(model: str, devices: int) -> dict[str, object]:
    """Returns a row: the default search compared with the search over all meshes."""
    began = time.process_time()
    few = pase.compile(f"zoo:{model}", devices=devices, overlap="none", baselines=False, memory_limit="none")
    between = time.process_time()
    every = pase.compile(
        f"zoo:{model}", devices=devices, overlap="none", baselines=False, memory_limit="none", meshes="all"
    )
    return {
        "searched": len(few.tried),
        "proven": every.provenance["meshes"],
        "cheaper": 1 - every.cost / few.cost,
        "mesh": list(every.mesh.sizes),
        "bound_over_cost": every.bound / every.cost,
        "cpu_s": round(between - began, 1),
        "all_cpu_s": round(time.process_time() - between, 1),
    }


BENCH = Benchmark(
    "every_mesh",
    {f"{model}, {devices}": (model, devices) for model, devices in ROWS},
    measured,
    named="{model}, {devices}",
    prepare=lambda: pase.compile("zoo:mlp", devices=8),  # imports and kernels
)
