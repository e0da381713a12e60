"""Compiling within the machine's memory: the cost, what is proven, and what it takes.

    python -m bench.search.memory [--only NAME] [-o bench/results/memory_search.json]

CPU seconds are of this process, tracing included and the baselines left out; numba's cache is warm.
"""

from __future__ import annotations

import resource
import time

import pase
from bench.arguments import parser, wanted
from bench.provenance import save

CASES = {
    "mlp, 8": ("zoo:mlp", 8),
    "llama3_8b, 32": ("zoo:llama3_8b", 32),
    "llama3_405b, 16384": ("zoo:llama3_405b?batch=2048", 16384),
    "llama3_405b plain, 16384": ("zoo:llama3_405b?batch=2048&attention=plain", 16384),
    "llama3_70b, 64": ("zoo:llama3_70b?batch=64", 64),
    "llama3_70b written out, 64": ("zoo:llama3_70b?scan=0&batch=64", 64),
}


def measured(model: str, devices: int) -> dict[str, object]:
    """One row: the step found within the machine's memory, its proof, and what finding it took."""
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


def main() -> None:
    """Writes bench/results/memory_search.json: a row for each case."""
    args = parser(__doc__, "memory_search").parse_args()
    pase.compile("zoo:mlp", devices=8)  # imports
    rows = []
    for name, case in wanted(((name, (name, case)) for name, case in CASES.items()), args.only):
        rows.append({"case": name, **measured(*case)})
        r = rows[-1]
        print(f"{name:28} {r['step_s']:.6f} s  gap {r['gap']:.1e}  {r['cpu_s']} CPU s", flush=True)
    save({"target": "h100x8 (predicted)", "rows": rows}, args.o)


if __name__ == "__main__":
    main()
