"""Every zoo model compiled for 8, 32 and 64 devices: predicted step, best baseline, and what compiling took.

.venv/bin/python -m bench.search.zoo [--devices 8,32,64] [-o FILE] [MODEL…]     # writes bench/results/zoo_compile.json
.venv/bin/python -m bench.search.zoo llama3_405b --devices 1024,16384 -o bench/results/zoo_compile_405b.json

Costs are predictions of the cost model. Seconds are of this process on this machine, kernels warm.
"""

from __future__ import annotations

import argparse
import resource
import time

import pase
from bench.provenance import RESULTS, save
from pase import zoo


def measured(name: str, devices: int) -> dict[str, object]:
    """One model's row: predicted step, best baseline, seconds to compile."""
    began = time.perf_counter()
    plan = pase.compile(f"zoo:{name}", devices=devices)
    total = time.perf_counter() - began
    fitting = {name: cost for name, cost in plan.baselines.items() if name not in plan.too_large}
    against = dict(sorted(fitting.items(), key=lambda item: item[1]))
    best = next(iter(against), None)
    return {
        "model": name,
        "devices": devices,
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


def main() -> None:
    """Writes bench/results/zoo_compile.json: a row for each model and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=None)
    parser.add_argument("--devices", default="8,32,64")
    parser.add_argument("-o", default=str(RESULTS / "zoo_compile.json"))
    arguments = parser.parse_args()
    pase.compile("zoo:mlp", devices=8)  # kernels, imports
    rows = []
    for name in arguments.models or zoo.names():
        for devices in map(int, arguments.devices.split(",")):
            row = measured(name, devices)
            rows.append(row)
            print(
                f"{name:14} {devices:4}  {row['step_s'] * 1e3:10.3f} ms  best baseline {row['best_baseline']} "
                f"×{(row['best_baseline_s'] or 0) / row['step_s']:.3f}  {row['seconds']}",
                flush=True,
            )
    result = {
        "target": "h100x8 (predicted)",
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rows": rows,
    }
    save(result, arguments.o)


if __name__ == "__main__":
    main()
