"""What a step costs as XLA splits it and as pase does: compile time and step time on 8 host devices.

    .venv/bin/python -m bench.audit.lowerings                # reduced zoo models under a few strategies; ten minutes
    .venv/bin/python -m bench.audit.lowerings --only "mlp"   # these rows again; the others are kept

For each model and strategy, the same plan's train step as annotated, manual, manual with loops that gather one turn
ahead (the default), and manual with the messages of ``ours``.
Compile time is CPU seconds of this process in XLA's compiler, so that other work on the machine counts little; tracing
and lowering by JAX are apart. Of the step the smallest of several wall times is kept, all taken in turn. Eight
devices on a few cores share them, so a step here is all devices' computation and the copies between them, without any
overlap. Writes bench/results/lowerings.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.arguments import parser, wanted
from bench.provenance import save

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.backends.jax.plan import Lowering

ROWS = [
    (model, strategy)
    for model in ("mlp", "gpt2", "llama3_8b", "vit_l16", "rnnlm", "alexnet")
    for strategy in ("data_parallel", "fsdp", "megatron/megatron_sp_2x4", "ours@2x4")
]
ROUNDS = 15
"""Steps of each kind, taken in turn."""


def main() -> None:
    """Measures the rows asked for and writes them beside those that stand."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    options = parser(__doc__, "lowerings").parse_args()
    for model, strategy in wanted([(" ".join(row), row) for row in ROWS], options.only):
        row = measured(model, strategy)
        if row is not None:
            print(json.dumps(row), file=sys.stderr, flush=True)
            keep(row, options.o)


def keep(row: dict[str, Any], path: Path) -> None:
    """The row in the file, instead of an older one. Each is written as soon as it is made."""
    import jax

    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    names = [list(row) for row in ROWS]
    rows = [r for r in rows if (r["model"], r["strategy"]) != (row["model"], row["strategy"])] + [row]
    rows.sort(key=lambda r: names.index([r["model"], r["strategy"]]))
    save({"jax": jax.__version__, "devices": 8, "rounds": ROUNDS, "rows": rows}, path)


def measured(model: str, strategy: str) -> dict[str, Any] | None:
    """One row; None where the strategy does not apply to the model."""
    from bench.cases.plans import reduced

    plan = reduced(model).plan(strategy)
    if plan is None:
        return None
    ahead = replace(plan, overlap=0.0)  # loops gather one turn ahead, as under the default price
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
    """(CPU seconds of JAX and of XLA, collectives in the program; a function that runs a step and returns its wall
    seconds)."""
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


if __name__ == "__main__":
    main()
