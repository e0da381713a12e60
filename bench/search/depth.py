"""What compiling takes by the number of layers, where they are written out one by one.

    python -m bench.search.depth [--only "8 layers"] [-o bench/results/depth.json]

CPU seconds of one process, kernels warm: of the search alone, with its parts on the clock as the plan states them; and
of compiling as it is by default, which prices what people do by hand and keeps to the machine's memory.
"""

from __future__ import annotations

import time

import pase
from bench.arguments import parser, wanted
from bench.provenance import save

LAYERS = (2, 8, 32, 128)


def measured(layers: int) -> dict[str, object]:
    """One row: what compiling a decoder of that many layers takes, whole and by part."""
    model = f"zoo:llama3_8b?scan=0&batch=64&layers={layers}"
    began = time.process_time()
    plan = pase.compile(model, devices=64, memory_limit="none", baselines=False, overlap="none")
    searched = time.process_time()
    whole = pase.compile(model, devices=64, overlap="none")
    return {
        "layers": layers,
        "nodes": len(plan.nodes),
        "step_s": plan.cost,
        "optimal": plan.optimal,
        "cpu_s": round(searched - began, 2),
        "methods": len(whole.baselines),
        "default_cpu_s": round(time.process_time() - searched, 2),
        "seconds": {k: round(v, 3) for k, v in plan.seconds.items()},
    }


def main() -> None:
    """Writes bench/results/depth.json: a row for each number of layers."""
    args = parser(__doc__, "depth").parse_args()
    pase.compile("zoo:mlp", devices=8)  # imports
    rows = []
    for layers in wanted(((f"{n} layers", n) for n in LAYERS), args.only):
        rows.append(measured(layers))
        print(rows[-1], flush=True)
    save({"rows": rows}, args.o)


if __name__ == "__main__":
    main()
