"""This host's CPU calibrated, and small models' step times predicted from that and then measured.

    .venv/bin/python -m bench.replay.calibrate_cpu [--budget 60] [--devices 2]     # writes
    bench/results/calibrate_cpu.json .venv/bin/python -m bench.replay.calibrate_cpu --add      # one more run, beside
    those that the file holds

Two host devices in one process. Every strategy of each model is priced with the machine file measured in that run, and
then run as ``plan.jax.train_step`` lowers it by default: nothing is fitted to the steps. A step during which other
programs took more than a fifth of a core is measured again, a few times; each row says what they took. glibc is told to
keep what a step frees: by default it gives large blocks back to the kernel, or not, by what the process did before, and
touching them anew costs up to a third of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.arguments import parser, wanted
from bench.provenance import BEGAN, ROOT, save

if TYPE_CHECKING:
    from bench.netlab.steps import Running

CASES = (("mlp", 256), ("mlp", 2048), ("gpt2", 32), ("alexnet", 32))
"""(reduced zoo model, batch)."""
STEPS, ROUNDS = 5, 5
"""Timed steps of a strategy each time that its turn comes, and turns."""
DISTURBED, TRIES = 0.2, 5
"""Cores that other programs may take while a step is measured, and how often it is tried."""
KEPT = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:"
    "glibc.malloc.arena_max=1"
}
"""Blocks of any size stay in the heap, and in the one that grows: a thread's own holds 64 MB."""


def main() -> None:
    """Writes bench/results/calibrate_cpu.json: each run's calibration, and each strategy's predicted and measured
    time."""
    options = parser(__doc__, "calibrate_cpu")
    options.add_argument("--budget", type=float, default=60.0, help="seconds that calibrating takes")
    options.add_argument("--max-spread", type=float, default=3.0, help="as of pase calibrate")
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--machine", help="a machine file measured before; default: measure now")
    options.add_argument("--add", action="store_true", help="keep the runs that the result file holds")
    args = options.parse_args()
    if any(os.environ.get(k) != v for k, v in KEPT.items()):  # the allocator reads it as the process begins
        command = [sys.executable, "-m", "bench.replay.calibrate_cpu", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEPT})
    cases = wanted(((f"{model} {batch}", (model, batch)) for model, batch in CASES), args.only)
    before = json.loads(args.o.read_text()).get("runs", []) if args.add and args.o.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(args.machine or f"{folder}/cpu.toml")
        measured = {} if args.machine else calibrated(file, args.devices, args.budget, args.max_spread)
        rows = predicted_and_measured(cases, file, args.devices, Path(folder))
    errors = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in rows]
    run = {
        **{k: BEGAN[k] for k in ("commit", "command", "date", "load_1min")},
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "kendall_tau": tau([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "rows": rows,
        "calibration": measured,
    }
    runs = [*before, run]
    result = {
        "devices": args.devices,
        "median_errors": [r["median_error"] for r in runs],
        "kendall_taus": [r["kendall_tau"] for r in runs],
        "runs": runs,
    }
    save(result, args.o)
    for r in rows:
        print(
            f"{r['model']:>12} {r['batch']:>4} {r['strategy']:<14} predicted {r['predicted_s'] * 1e3:8.2f} ms, "
            f"measured {r['measured_s'] * 1e3:8.2f} ms, {r['predicted_s'] / r['measured_s']:.2f}"
        )
    print(f"median error {run['median_error']:.0%}, Kendall tau {run['kendall_tau']:.2f}")


def calibrated(file: Path, devices: int, budget_s: float, max_spread: float) -> dict[str, Any]:
    """Runs ``pase calibrate`` into a machine file; what it says of that."""
    command = ["calibrate", "-o", str(file), "-n", str(devices), "--budget", f"{budget_s}s"]
    more = ["--dtypes", "float32", "--json", "--max-spread", str(max_spread)]
    run = [sys.executable, "-m", "pase.cli", *command, *more]
    said: dict[str, Any] = json.loads(
        subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return said


def predicted_and_measured(
    cases: list[tuple[str, int]], file: Path, devices: int, folder: Path
) -> list[dict[str, Any]]:
    """One row a model: predicted and measured seconds of each of its strategies on host devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from bench.netlab.steps import Running, planned

    rows = []
    for model, batch in cases:
        cells = [c for c in planned(model, batch, devices, file, folder) if c.same_as is None]
        for cell, steps in zip(
            cells, in_rounds([Running(replace(c, lowering="auto")) for c in cells]), strict=True
        ):
            rows.append(
                {
                    "model": model,
                    "batch": batch,
                    "strategy": cell.strategy,
                    "mesh": list(cell.mesh),
                    "predicted_s": cell.predicted_s,
                    "predicted_compute_s": cell.predicted_compute_s,
                    **steps,
                }
            )
    return rows


def in_rounds(running: Sequence[Running]) -> list[dict[str, float]]:
    """Of each strategy the median step, its spread, the CPU time of a device's step (waiting takes none), and how many
    cores other programs took meanwhile. All run in turn, a few times over: the machine's speed changes by the minute,
    and that must not decide their order."""
    import jax

    visits = [[visit(r) for r in running] for _ in range(ROUNDS)]
    out = []
    for own in zip(*visits, strict=True):
        low, middle, high = statistics.quantiles([t for v in own for t in v.times], n=4)
        cpu = statistics.median(v.cpu_s for v in own) / jax.device_count()
        taken = statistics.mean(v.others_cores for v in own)
        out.append(
            {"measured_s": middle, "spread": (high - low) / middle, "cpu_s": cpu, "others_cores": taken}
        )
    return out


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Some steps' seconds, the process's CPU time of one of them, and cores that other programs took meanwhile."""

    times: list[float]
    cpu_s: float
    others_cores: float


def visit(running: Running) -> Visit:
    """Some steps: the least disturbed of a few tries. One step goes before, since another program's arrays are in the
    caches."""
    from pase.calibrate.here import others_s

    found: list[Visit] = []
    while not found or (found[-1].others_cores > DISTURBED and len(found) < TRIES):
        running.run(1)
        running.forget()
        began, others = time.perf_counter(), others_s()
        running.run(STEPS)
        taken = max(others_s() - others, 0.0) / (time.perf_counter() - began)
        cpu_s = running.cpu_s / STEPS
        found.append(Visit(times=list(running.times), cpu_s=cpu_s, others_cores=taken))
    return min(found, key=lambda f: f.others_cores)


def tau(a: list[float], b: list[float]) -> float:
    """Kendall's rank correlation of two lists."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic)


if __name__ == "__main__":
    main()
