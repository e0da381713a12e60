"""Every zoo model compiled for 8, 32 and 64 devices.

    python -m bench search.zoo [--devices 8,32,64] [-o FILE] [MODEL…]
    python -m bench search.zoo llama3_405b --devices 1024,16384 -o bench/results/zoo_compile_405b.json

A row has the predicted step, the best baseline, and the seconds of this process on this machine with warm kernels.
Writes bench/results/zoo_compile.json.
"""

from __future__ import annotations

import time
from argparse import Namespace

import pase
from bench.runner import Benchmark, option
from pase import zoo


def measured(name: str, devices: int) -> dict[str, object]:
    """Returns a row: predicted step, best baseline, seconds to compile."""
    began = time.perf_counter()
    plan = pase.compile(f"zoo:{name}", devices=devices)
    total = time.perf_counter() - began
    fitting = {name: cost for name, cost in plan.baselines.items() if name not in plan.too_large}
    against = dict(sorted(fitting.items(), key=lambda item: item[1]))
    best = next(iter(against), None)
    return {
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "meshes_tried": len(plan.tried),
        "nodes": len(plan.nodes),
        "step_s": plan.cost,
        "optimal": plan.optimal,
        "best_baseline": best,
        "best_baseline_s": against[best] if best else None,
        "data_parallel_s": against.get("data_parallel"),
        "never_worse": all(plan.cost <= c * (1 + 1e-12) for c in against.values()),
        "memory_bytes": plan.memory.total,
        "fits": plan.fits,
        "seconds": {k: round(v, 4) for k, v in plan.seconds.items()},
        "total_s": round(total, 4),
    }


def rows(given: Namespace) -> dict[str, tuple[str, int]]:
    """Returns the model and number of devices of each row."""
    return {f"{name} {n}": (name, n) for name in zoo.names() for n in map(int, given.devices.split(","))}


BENCH = Benchmark(
    "zoo_compile",
    rows,
    measured,
    named="{model} {devices}",
    head={"target": "h100x8 (predicted)"},
    options=[option("--devices", default="8,32,64", help="comma-separated")],
    prepare=lambda: pase.compile("zoo:mlp", devices=8),  # imports and kernels
)
