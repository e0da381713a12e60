"""Compile time by the number of layers that are written out one by one.

    python -m bench search.depth [--only "8 layers"]

CPU seconds of one process with warm kernels: of the search alone, with the seconds of its parts as the plan states
them; and of a default compilation, which also prices the baselines and keeps to the machine's memory. Writes
bench/results/depth.json.
"""

from __future__ import annotations

import time

import pase
from bench.runner import Benchmark

LAYERS = (2, 8, 32, 128)


def measured(layers: int) -> dict[str, object]:
    """Returns a row: the time to compile a decoder with this many layers, in total and by part."""
    model = f"zoo:llama3_8b?scan=0&batch=64&layers={layers}"
    began = time.process_time()
    plan = pase.compile(model, devices=64, memory_limit="none", baselines=False, overlap="none")
    searched = time.process_time()
    whole = pase.compile(model, devices=64, overlap="none")
    return {
        "nodes": len(plan.nodes),
        "step_s": plan.cost,
        "optimal": plan.optimal,
        "cpu_s": round(searched - began, 2),
        "methods": len(whole.baselines),
        "default_cpu_s": round(time.process_time() - searched, 2),
        "seconds": {k: round(v, 3) for k, v in plan.seconds.items()},
    }


BENCH = Benchmark(
    "depth",
    {f"{n} layers": n for n in LAYERS},
    measured,
    named="{layers} layers",
    prepare=lambda: pase.compile("zoo:mlp", devices=8),  # imports and kernels
)
