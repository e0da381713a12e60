"""Another degree of tensor parallelism from traces of jax.profiler, beside the run that really has it.

    .venv/bin/python -m bench.replay.xla [--budget 30]     # writes bench/results/replay_xla.json

Two host devices in one process, each with a core. A GPT-2 of two layers runs whole on both and split by Megatron's
rule. Steps of the two are traced in turn, a few times over: the machine's speed changes by the minute, and that must
not pass for a degree's. From each turn's traces the other degree is predicted: with the kernels of the other run, by
shape, and by the roofline of a machine file alone that is measured in the same run. Nothing is fitted to the steps.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.arguments import parser, wanted
from bench.provenance import save
from bench.replay.calibrate_cpu import KEPT, calibrated

if TYPE_CHECKING:
    from pase.replay.reports.trust import Run

STEPS, TURNS = 6, 5
"""Traced steps of a strategy each time that its turn comes, and turns."""
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
            sys.executable, [sys.executable, "-m", "bench.replay.xla", *sys.argv[1:]], {**os.environ, **KEPT}
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


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The traces of one turn: of either strategy some steps, directly behind the other's. others_cores: how many of
    this machine's cores other programs took meanwhile."""

    traces: dict[str, Path]
    others_cores: float


def traced(batch: int, machine: Path, folder: Path) -> list[Turn]:
    """Both strategies on two host devices, in turn. A step goes before each: the other's arrays are in the caches."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from bench.netlab.steps import Running, planned

    cells = {c.strategy: c for c in planned("gpt2", batch, 2, machine, folder)}
    running = {s: Running(replace(cells[s], lowering="auto")) for s in (WHOLE, SPLIT)}
    out = []
    for turn in range(TURNS):
        traces = {s: folder / f"{batch}_{turn}_{s.replace(' ', '_')}" for s in running}
        for s, r in running.items():
            r.run(1)
            r.forget()
            r.run(STEPS, traces[s])
        others = sum(r.busy_s - r.cpu_s for r in running.values())
        took = sum(sum(r.times) for r in running.values())
        out.append(Turn(traces=traces, others_cores=max(others, 0.0) / took))
    return out


def compared(batch: int, machine: Path, folder: Path) -> list[dict[str, Any]]:
    """Four what-ifs: either degree from the other, with its kernels and without; each asked of every turn, and compared
    with what the same turn measured. The error is the median of the turns'."""
    from pase.bridges.degrees import by_tensor, loaded_kernel_times

    turns = traced(batch, machine, folder)
    read = [{s: measured_run(path) for s, path in t.traces.items()} for t in turns]
    rows = []
    for now, then, ran, ways in ((WHOLE, SPLIT, "tp=1,sp", 2), (SPLIT, WHOLE, "tp=2,sp", 1)):
        for known in (True, False):
            asked = []
            for turn, runs in zip(turns, read, strict=True):
                kernels = loaded_kernel_times([turn.traces[then]]) if known else None
                model = f"bench.replay.xla:gpt2_{batch}"
                change = by_tensor(ways, model=model, ran=ran, machine=str(machine), measured=kernels)
                graph, said = change(runs[now].measured.timeline, runs[now].graph)
                ns = runs[now].changed_ns(graph)
                asked.append(
                    {
                        "now_ms": runs[now].measured_ns / 1e6,
                        "predicted_ms": ns / 1e6,
                        "true_ms": runs[then].measured_ns / 1e6,
                        "error": ns / runs[then].measured_ns - 1,
                        "spread_of_true": runs[then].spread,
                        "others_cores": turn.others_cores,
                        "note": said["note"],
                    }
                )
            true = [x["true_ms"] for x in asked]
            rows.append(
                {
                    "what_if": f"gpt2, {batch} examples, {ran}: tensor={ways}",
                    "kernels_measured": known,
                    "error": statistics.median(x["error"] for x in asked),
                    "spread_of_turns": (max(true) - min(true)) / 2 / statistics.fmean(true),
                    "turns": asked,
                }
            )
    return rows


def measured_run(traces: Path) -> Run:
    """The traced steps of a turn."""
    from pase.replay import align, load, measure
    from pase.replay.reports.trust import Run

    return Run(measured=measure(align(load(traces))))


if __name__ == "__main__":
    main()
