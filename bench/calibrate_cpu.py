"""This host's CPU calibrated, and small models' step times predicted from that and then measured.

    .venv/bin/python -m bench.calibrate_cpu [--budget 60] [--devices 2]     # writes bench/results/calibrate_cpu.json

Two host devices in one process. Every strategy of each model is priced with the measured machine file and then run:
nothing is fitted to the steps.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.arguments import parser, wanted
from bench.provenance import ROOT, save

CASES = (("mlp", 256), ("mlp", 2048), ("gpt2", 32), ("alexnet", 32))
"""(reduced zoo model, batch)."""


def main() -> None:
    """Writes bench/results/calibrate_cpu.json: the calibration, and each strategy's predicted and measured time."""
    options = parser(__doc__, "calibrate_cpu")
    options.add_argument("--budget", type=float, default=60.0, help="seconds that calibrating takes")
    options.add_argument("--max-spread", type=float, default=3.0, help="as of pase calibrate")
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--machine", help="a machine file measured before; default: measure now")
    args = options.parse_args()
    cases = wanted(((f"{model} {batch}", (model, batch)) for model, batch in CASES), args.only)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(args.machine or f"{folder}/cpu.toml")
        summary = {}
        if not args.machine:
            command = ["calibrate", "-o", str(file), "-n", str(args.devices), "--budget", f"{args.budget}s"]
            more = ["--dtypes", "float32", "--json", "--max-spread", str(args.max_spread)]
            run = [sys.executable, "-m", "pase.cli", *command, *more]
            summary = json.loads(
                subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
            )
        rows = predicted_and_measured(cases, file, args.devices, Path(folder))
    errors = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in rows]
    result = {
        "devices": args.devices,
        "calibration": summary,
        "median_error": statistics.median(errors),
        "kendall_tau": tau([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "rows": rows,
    }
    save(result, args.o)
    for r in rows:
        print(
            f"{r['model']:>12} {r['batch']:>4} {r['strategy']:<14} predicted {r['predicted_s'] * 1e3:8.2f} ms, "
            f"measured {r['measured_s'] * 1e3:8.2f} ms, {r['predicted_s'] / r['measured_s']:.2f}"
        )
    print(f"median error {result['median_error']:.0%}, Kendall tau {result['kendall_tau']:.2f}")


def predicted_and_measured(
    cases: list[tuple[str, int]], file: Path, devices: int, folder: Path
) -> list[dict]:
    """One row a model: predicted and measured seconds of each of its strategies on host devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from bench.netlab.steps import planned, timed

    rows = []
    for model, batch in cases:
        for cell in planned(model, batch, devices, file, folder):
            if cell.same_as is None:
                t = timed(cell, 9)["steps_s"]
                low, middle, high = (sorted(t)[i] for i in (2, 4, 6))
                rows.append(
                    {
                        "model": model,
                        "batch": batch,
                        "strategy": cell.strategy,
                        "mesh": list(cell.mesh),
                        "predicted_s": cell.predicted_s,
                        "predicted_compute_s": cell.predicted_compute_s,
                        "measured_s": middle,
                        "spread": (high - low) / middle,
                    }
                )
    return rows


def tau(a: list[float], b: list[float]) -> float:
    """Kendall's rank correlation of two lists."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic)


if __name__ == "__main__":
    main()
