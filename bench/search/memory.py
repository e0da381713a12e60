"""Compilation within the machine's memory: cost, proof and time.

    python -m bench search.memory [--only NAME]

CPU seconds are of this process, with tracing and without the baselines; numba's cache is warm. Writes
bench/results/memory_search.json.
"""

from __future__ import annotations

import resource
import time

import pase
from bench.runner import Benchmark

CASES = {
    "mlp, 8": ("zoo:mlp", 8),
    "llama3_8b, 32": ("zoo:llama3_8b", 32),
    "llama3_405b, 1024": ("zoo:llama3_405b", 1024),
    "llama3_405b, 16384": ("zoo:llama3_405b?batch=2048", 16384),
    "llama3_405b plain, 16384": ("zoo:llama3_405b?batch=2048&attention=plain", 16384),
    "llama3_70b, 64": ("zoo:llama3_70b?batch=64", 64),
    "llama3_70b written out, 64": ("zoo:llama3_70b?scan=0&batch=64", 64),
}


def measured(model: str, devices: int) -> dict[str, object]:
    """Returns a row: the step found within the machine's memory, its proof, and the time to find it."""
    cpu, began = time.process_time(), time.perf_counter()
    plan = pase.compile(model, devices=devices, baselines=False)
    return {
        "model": model,
        "devices": devices,
        "mesh": list(plan.mesh.sizes),
        "accumulate": plan.accumulate,
        "recomputed_blocks": len(plan.remat),
        "step_s": plan.cost,
        "optimal": plan.optimal,
        "gap": (plan.cost - plan.bound) / plan.cost,
        "memory_bytes": plan.memory.total,
        "fits": plan.fits,
        "search": plan.provenance["search"],
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - began, 2),
        "seconds": {k: round(v, 3) for k, v in plan.seconds.items()},
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


BENCH = Benchmark(
    "memory_search",
    CASES,
    measured,
    named="{case}",
    head={"target": "h100x8 (predicted)"},
    prepare=lambda: pase.compile("zoo:mlp", devices=8),  # imports and kernels
)
