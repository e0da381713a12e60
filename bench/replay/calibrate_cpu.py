"""Predicts and measures steps of small models on this calibrated host.

    python -m bench replay.calibrate_cpu [--budget 60] [--devices 2]
    python -m bench replay.calibrate_cpu --add      # one more run; those in the result file are kept

The host has two devices in one process. Every strategy of each model is priced with the machine file measured in that
run, and then run as ``plan.jax.train_step`` lowers it by default: nothing is fitted to the steps. A step during which
other programs took more than a fifth of a core is measured again, a few times; each row states how much they took.
glibc is set to keep what a step frees. By default it returns large blocks to the kernel or not depending on what the
process did before, and touching them again costs up to a third of a step. Writes bench/results/calibrate_cpu.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.runner import BEGAN, ROOT, Benchmark, option

if TYPE_CHECKING:
    from bench.netlab.steps import Running

CASES = (("mlp", 256), ("mlp", 2048), ("gpt2", 32), ("alexnet", 32))
"""(reduced zoo model, batch)."""
STEPS, ROUNDS = 5, 5
"""Timed steps of a strategy in each round, and the number of rounds unless another is asked for."""
DISTURBED, TRIES = 0.2, 5
"""How many cores other programs may take while steps are measured, and the number of tries unless another is asked
for."""
KEPT = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:"
    "glibc.malloc.arena_max=1"
}
"""Blocks of any size stay in the main heap, which grows: the heap of a thread holds only 64 MB."""


def calibrated(file: Path, devices: int, budget_s: float, max_spread: float) -> dict[str, Any]:
    """Runs ``pase calibrate`` to write a machine file, and returns its JSON output."""
    command = ["calibrate", "-o", str(file), "-n", str(devices), "--budget", f"{budget_s}s"]
    more = ["--dtypes", "float32", "--json", "--max-spread", str(max_spread)]
    run = [sys.executable, "-m", "pase.cli", *command, *more]
    said: dict[str, Any] = json.loads(
        subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return said


def predicted_and_measured(
    model: str,
    batch: int,
    *,
    file: Path,
    devices: int,
    folder: Path,
    rounds: int = ROUNDS,
    tries: int = TRIES,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each strategy of a model: its predicted and measured seconds on host devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from bench.netlab.steps import Running, planned

    cells = [c for c in planned(model, batch, devices, file, folder) if c.same_as is None]
    measured = in_rounds([Running(replace(c, lowering="auto")) for c in cells], rounds, tries)
    for cell, steps in zip(cells, measured, strict=True):
        yield {
            "model": model,
            "batch": batch,
            "strategy": cell.strategy,
            "mesh": list(cell.mesh),
            "predicted_s": cell.predicted_s,
            "predicted_compute_s": cell.predicted_compute_s,
            **steps,
        }


def in_rounds(running: Sequence[Running], rounds: int, tries: int) -> list[dict[str, float]]:
    """Returns for each strategy the median step, its spread, the CPU time of a device's step (without waiting), and how
    many cores other programs took meanwhile. The strategies run in turn, for several rounds: the machine's speed
    changes by the minute, and that must not decide their order."""
    import jax

    visits = [[visit(r, tries) for r in running] for _ in range(rounds)]
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
    """The seconds of some steps, the process's CPU time per step, and how many cores other programs took meanwhile."""

    times: list[float]
    cpu_s: float
    others_cores: float


def visit(running: Running, tries: int) -> Visit:
    """Runs some steps, and returns the least disturbed of several tries. A step before them is not timed, because the
    caches have the arrays of another program."""
    from pase.calibrate.here import others_s

    found: list[Visit] = []
    while not found or (found[-1].others_cores > DISTURBED and len(found) < tries):
        running.run(1)
        running.forget()
        began, others = time.perf_counter(), others_s()
        running.run(STEPS)
        taken = max(others_s() - others, 0.0) / (time.perf_counter() - began)
        cpu_s = running.cpu_s / STEPS
        found.append(Visit(times=list(running.times), cpu_s=cpu_s, others_cores=taken))
    return min(found, key=lambda f: f.others_cores)


def tau(a: list[float], b: list[float]) -> float:
    """Returns Kendall's rank correlation of two lists."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic)


def keep_memory() -> None:
    """Starts this program again with ``KEPT``, which the allocator reads when a process starts."""
    if any(os.environ.get(k) != v for k, v in KEPT.items()):
        _, *words = sys.argv[0].split()  # python -m bench NAME
        os.execve(sys.executable, [sys.executable, *words, *sys.argv[1:]], {**os.environ, **KEPT})


def prepare(given: Namespace) -> None:
    """Calibrates this machine if no machine file is given, and reads the earlier runs that are kept."""
    keep_memory()
    given.before = json.loads(given.out.read_text())["runs"] if given.add and given.out.exists() else []
    given.folder = tempfile.TemporaryDirectory()
    given.calibration = {}
    if not given.machine:
        given.machine = f"{given.folder.name}/cpu.toml"
        given.calibration = calibrated(Path(given.machine), given.devices, given.budget, given.max_spread)


def summary(rows: list[dict[str, Any]], given: Namespace) -> dict[str, Any]:
    """Returns the runs, the last of which is this one, and how well each predicted."""
    errors = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in rows]
    run = {
        **{k: BEGAN[k] for k in ("commit", "command", "date", "load_1min")},
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "kendall_tau": tau([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "rows": rows,
        "calibration": given.calibration,
    }
    runs = [*given.before, run]
    return {
        "devices": given.devices,
        "median_errors": [r["median_error"] for r in runs],
        "kendall_taus": [r["kendall_tau"] for r in runs],
        "runs": runs,
    }


BENCH = Benchmark(
    "calibrate_cpu",
    {f"{model} {batch}": (model, batch) for model, batch in CASES},
    lambda model, batch, given: predicted_and_measured(
        model,
        batch,
        file=Path(given.machine),
        devices=given.devices,
        folder=Path(given.folder.name),
        rounds=given.rounds,
        tries=given.tries,
    ),
    named="{model} {batch}",
    at="",
    head=summary,
    options=[
        option("--budget", type=float, default=60.0, help="seconds that calibrating takes"),
        option("--max-spread", type=float, default=3.0, help="as of pase calibrate"),
        option("--devices", type=int, default=2),
        option("--rounds", type=int, default=ROUNDS, help="rounds, in each of which every strategy runs"),
        option("--tries", type=int, default=TRIES, help="how often disturbed steps are measured again"),
        option("--machine", help="a machine file measured before; default: measure now"),
        option("--add", action="store_true", help="keep the runs that the result file holds"),
    ],
    prepare=prepare,
)
