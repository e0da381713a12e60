"""Audits memory: predicted peak bytes against XLA's buffer assignment.

    python -m bench audit.memory             # every reduced zoo model on 8 host devices; minutes
    python -m bench audit.memory gpt2 mlp    # the rows of these models again

Writes bench/results/memory_truth.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.runner import Benchmark

BEGAN_S = time.perf_counter()
STRATEGIES = (
    "data_parallel",
    "zero2",
    "fsdp",
    "megatron/megatron_2x4",
    "megatron/megatron_sp_2x4",
    "ours@8",
    "ours@2x4",
)


def models() -> dict[str, str]:
    """Returns the zoo's models that differ in their reduced sizes."""
    from bench.cases.plans import distinct_models

    return {name: name for name in distinct_models()}


def measured(name: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each strategy of a model."""
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla_memory import compare_memory

    for strategy in STRATEGIES:
        plan = reduced(name).plan(strategy)
        if plan is None:
            continue
        step = plan.jax.lower_train_step(optax.adam(1e-3), lowering="annotated")
        p = compare_memory(plan, step.compile())
        yield {
            "strategy": strategy.split("/")[-1],
            "stored": p.stored,
            "stored_compiled": p.stored_compiled,
            "predicted": p.predicted,
            "on_cpu": p.on_cpu,
            "compiled": p.compiled,
            "error": round(p.error, 4),
        }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and worst errors, and how many rows have the stored bytes right."""
    errors = [abs(r["error"]) for r in rows]
    return {
        "seconds": round(time.perf_counter() - BEGAN_S),
        "median_error": statistics.median(errors),
        "median_error_without_cpu_habit": statistics.median(
            abs(r["predicted"] - r["compiled"]) / r["compiled"] for r in rows
        ),
        "worst_error": max(errors),
        "stored_exact": sum(abs(r["stored"] - r["stored_compiled"]) <= 64 for r in rows),
    }


BENCH = Benchmark(
    "memory_truth",
    models,
    measured,
    named="{model}",
    head=summary,
    order=lambda _, row: (row["model"], row["strategy"]),
    environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
)
