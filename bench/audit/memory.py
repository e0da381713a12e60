"""Memory truth: peak bytes that plans predict beside what XLA's buffer assignment says of the compiled steps.

.venv/bin/python -m bench.audit.memory             # every reduced zoo model, 8 host devices; minutes
.venv/bin/python -m bench.audit.memory gpt2 mlp    # these models again; the others' rows are kept

Writes bench/results/memory_truth.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from bench.provenance import ROOT, save

RESULTS = ROOT / "bench" / "results" / "memory_truth.json"
STRATEGIES = (
    "data_parallel",
    "zero2",
    "fsdp",
    "megatron/megatron_2x4",
    "megatron/megatron_sp_2x4",
    "ours@8",
    "ours@2x4",
)


def main(models: list[str]) -> None:
    """Writes bench/results/memory_truth.json: predicted peak bytes beside XLA's, by model and strategy."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import optax

    from bench.cases.plans import distinct_models, reduced
    from pase.backends.audit.xla_memory import compare_memory

    rows = json.loads(RESULTS.read_text())["rows"] if models and RESULTS.exists() else []
    began = time.perf_counter()
    for name in models or distinct_models():
        rows = [r for r in rows if r["model"] != name]
        for strategy in STRATEGIES:
            plan = reduced(name).plan(strategy)
            if plan is None:
                continue
            p = compare_memory(
                plan, plan.jax.lower_train_step(optax.adam(1e-3), lowering="annotated").compile()
            )
            rows.append(
                {
                    "model": name,
                    "strategy": strategy.split("/")[-1],
                    "stored": p.stored,
                    "stored_compiled": p.stored_compiled,
                    "predicted": p.predicted,
                    "on_cpu": p.on_cpu,
                    "compiled": p.compiled,
                    "error": round(p.error, 4),
                }
            )
            print(rows[-1], flush=True)
        _write(rows, began)


def _write(rows: list[dict[str, Any]], began: float) -> None:
    """After each model: a run that is stopped keeps what it has."""
    errors = [abs(r["error"]) for r in rows]
    result = {
        "seconds": round(time.perf_counter() - began),
        "median_error": statistics.median(errors),
        "median_error_without_cpu_habit": statistics.median(
            abs(r["predicted"] - r["compiled"]) / r["compiled"] for r in rows
        ),
        "worst_error": max(errors),
        "stored_exact": sum(abs(r["stored"] - r["stored_compiled"]) <= 64 for r in rows),
        "rows": sorted(rows, key=lambda r: (r["model"], r["strategy"])),
    }
    save(result, RESULTS)


if __name__ == "__main__":
    main(sys.argv[1:])
