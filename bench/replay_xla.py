"""Another degree of tensor parallelism from traces of jax.profiler, beside the run that really has it.

    .venv/bin/python -m bench.replay_xla [--budget 30]     # writes bench/results/replay_xla.json

Two host devices in one process, each with a core. A GPT-2 of two layers runs whole on both and split by Megatron's
rule, both traced. From each trace the other is predicted: with the kernels of the other run, by shape, and by the
roofline of a machine file alone that is measured in the same run. Nothing is fitted to the steps.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arguments import parser, wanted
from bench.calibrate_cpu import KEPT, calibrated
from bench.provenance import save

STEPS = 12
BATCHES = (16, 32, 64)
WHOLE, SPLIT = "no split", "megatron"


def gpt2(batch: int) -> tuple[Any, ...]:
    """The model: its loss, parameters and batch."""
    from bench.netlab.models import model

    m = model("gpt2", batch)
    return m.loss_fn, m.params, m.batch


def gpt2_16() -> tuple[Any, ...]:
    """With 16 examples; ``--model`` names a function without arguments."""
    return gpt2(16)


def gpt2_32() -> tuple[Any, ...]:
    """With 32."""
    return gpt2(32)


def gpt2_64() -> tuple[Any, ...]:
    """With 64."""
    return gpt2(64)


def main() -> None:
    """Writes bench/results/replay_xla.json: each prediction beside the traced run at that degree."""
    options = parser(__doc__, "replay_xla")
    options.add_argument("--budget", type=float, default=30.0, help="seconds that calibrating takes")
    options.add_argument("--machine", help="a machine file measured before; default: measure now")
    args = options.parse_args()
    if any(os.environ.get(k) != v for k, v in KEPT.items()):  # the allocator reads it as the process begins
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.replay_xla", *sys.argv[1:]], {**os.environ, **KEPT}
        )
    batches = wanted(((f"gpt2 {b}", b) for b in BATCHES), args.only)
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(args.machine or f"{folder}/cpu.toml")
        if not args.machine:
            calibrated(machine, 2, args.budget, 3.0)
        rows = [row for b in batches for row in compared(b, machine, Path(folder))]
    kinds = {"shapes measured": True, "roofline": False}
    errors = {k: [abs(r["error"]) for r in rows if r["kernels_measured"] is v] for k, v in kinds.items()}
    summary = {k: {"median": statistics.median(e), "worst": max(e)} for k, e in errors.items()}
    print(save({"what_ifs": len(rows), "summary": summary, "rows": rows}, args.o).read_text())


def traced(batch: int, machine: Path, folder: Path) -> dict[str, Path]:
    """Strategy → traces of its run on two host devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from bench.netlab.steps import Running, planned

    out = {}
    for cell in planned("gpt2", batch, 2, machine, folder):
        if cell.strategy in (WHOLE, SPLIT):
            out[cell.strategy] = folder / f"{batch}_{cell.strategy.replace(' ', '_')}"
            Running(replace(cell, lowering="auto")).run(STEPS, out[cell.strategy])
    return out


def compared(batch: int, machine: Path, folder: Path) -> list[dict[str, Any]]:
    """Four predictions: either degree from the other, with its kernels and without."""
    from pase.bridges.degrees import by_tensor, loaded_kernel_times
    from pase.replay import align, load, measure
    from pase.replay.steady import evaluate
    from pase.replay.trust import Run

    runs = traced(batch, machine, folder)
    read = {s: Run(measured=measure(align(load(path)))) for s, path in runs.items()}
    rows = []
    for now, then, ran, ways in ((WHOLE, SPLIT, "tp=1,sp", 2), (SPLIT, WHOLE, "tp=2,sp", 1)):
        for known in (True, False):
            kernels = loaded_kernel_times([runs[then]]) if known else None
            model = f"bench.replay_xla:gpt2_{batch}"
            change = by_tensor(ways, model=model, ran=ran, machine=str(machine), measured=kernels)
            graph, said = change(read[now].measured.timeline, read[now].graph)
            predicted, true = max(evaluate(graph).values()), read[then].measured_ns
            rows.append(
                {
                    "what_if": f"gpt2, {batch} examples, {ran}: tensor={ways}",
                    "kernels_measured": known,
                    "now_ms": read[now].measured_ns / 1e6,
                    "predicted_ms": predicted / 1e6,
                    "true_ms": true / 1e6,
                    "error": predicted / true - 1,
                    "spread_of_true": read[then].spread,
                    "note": said["note"],
                }
            )
    return rows


if __name__ == "__main__":
    main()
