"""Compile time and step time of the annotated and the manual lowering.

    python -m bench audit.lowerings                # reduced zoo models under a few strategies; ten minutes
    python -m bench audit.lowerings --only "mlp"   # these rows again

For each model and strategy, the train step of one plan is lowered as annotated, as manual, as manual with prefetching
loops (the default), and as manual with the messages of the policy ``ours``. Compile time is the CPU time of this
process in XLA's compiler, which other work on the machine affects little; tracing and lowering by JAX are separate.
Step time is the shortest of several wall times, with the variants taken in turn. Eight devices share a few cores, so a
step here is the computation of all devices plus the copies between them, without overlap. Writes
bench/results/lowerings.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.runner import Benchmark

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.backends.jax.spmd.lower import Lowering

ROWS = [
    (model, strategy)
    for model in ("mlp", "gpt2", "llama3_8b", "vit_l16", "rnnlm", "alexnet")
    for strategy in ("data_parallel", "fsdp", "megatron/megatron_sp_2x4", "ours@2x4")
]
ROUNDS = 15
"""Steps of each variant, taken in turn."""


def measured(model: str, strategy: str) -> dict[str, Any] | None:
    """Returns a row; None if the strategy does not apply to the model."""
    from bench.cases.plans import reduced

    plan = reduced(model).plan(strategy)
    if plan is None:
        return None
    ahead = replace(plan, overlap=0.0)  # loops prefetch the next iteration, as under the default price
    ways: list[tuple[str, Plan, Lowering]] = [("annotated", plan, "annotated"), ("manual", plan, "manual")]
    ways.append(("manual, ahead", ahead, "manual"))
    if plan.unit == "s":
        ways.append(("manual, ours", plan.scheduled("ours"), "manual"))
    row: dict[str, Any] = {"model": model, "strategy": strategy, "mesh": list(plan.mesh.sizes)}
    steps: dict[str, Callable[[], float]] = {}
    for name, of, lowering in ways:
        row[name], steps[name] = prepared(of, lowering, *reduced(model).model.init(0))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(step())
    for name, seconds in times.items():
        row[name]["step_ms"] = round(min(seconds) * 1e3, 3)
    return row


def prepared(
    plan: Plan, lowering: Lowering, params: Any, batch: Any
) -> tuple[dict[str, Any], Callable[[], float]]:
    """Returns the CPU seconds of JAX and of XLA with the collectives in the program, and a function that runs a step
    and returns its wall seconds."""
    import jax
    import optax

    from pase.hlo.collectives import collectives

    optimizer = optax.adam(1e-3)
    begun = time.process_time()
    lowered = plan.jax.lower_train_step(optimizer, lowering=lowering)
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    placed, *inputs = plan.jax.device_put(params, batch)
    held = [placed, plan.jax.init(optimizer, placed)]

    def step() -> float:
        start = time.perf_counter()
        new, state, _ = jax.block_until_ready(compiled(*held, *inputs))
        held[:] = new, state
        return time.perf_counter() - start

    step()
    costs = {
        "jax_cpu_s": round(traced - begun, 2),
        "xla_cpu_s": round(done - traced, 2),
        "collectives": sum(h.count or 1 for h in collectives(compiled)),
    }
    return costs, step


def versions(rows: object) -> dict[str, Any]:
    """Returns the version of JAX, and how steps are measured."""
    import jax

    return {"jax": jax.__version__, "devices": 8, "rounds": ROUNDS}


BENCH = Benchmark(
    "lowerings",
    {f"{model} {strategy}": (model, strategy) for model, strategy in ROWS},
    measured,
    named="{model} {strategy}",
    head=versions,
    environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
)
