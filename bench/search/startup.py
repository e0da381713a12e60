"""Seconds of `import pase`, `pase --help` and `pase solve`.

    python -m bench search.startup

Medians of new processes, compared with a bare interpreter. `pase solve` searches the largest of the paper's instances
(Transformer at p = 64), if ../shared has it. Other work on the machine changes CPU seconds less than wall seconds.
Writes bench/results/startup.json.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from bench.cases import SHARED
from bench.processes import children_s
from bench.runner import ROOT, Benchmark, option

PAPER = SHARED / "pase_instances" / "transformer_p64.json"
CASES = {
    "python": ["-c", "pass"],
    "import pase": ["-c", "import pase"],
    "pase --help": ["-m", "pase.cli", "--help"],
    **({"pase solve": ["-m", "pase.cli", "solve", str(PAPER)]} if PAPER.exists() else {}),
}


def rounds(cases: dict[str, list[str]], given: Namespace) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Runs the commands in turn, so that a busy moment affects all of them; yields the seconds of each."""
    rows: dict[str, dict[str, list[float]]] = {name: {"s": [], "cpu_s": []} for name in cases}
    for _ in range(given.runs):
        for name, arguments in cases.items():
            began, before = time.perf_counter(), children_s()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            rows[name]["s"].append(time.perf_counter() - began)
            rows[name]["cpu_s"].append(children_s() - before)
    yield from rows.items()


def summary(rows: dict[str, dict[str, list[float]]], given: Namespace) -> dict[str, Any]:
    """Returns the median and least seconds, and the median CPU seconds, of each command."""
    return {
        "runs": given.runs,
        "median_s": {name: round(statistics.median(r["s"]), 4) for name, r in rows.items()},
        "least_s": {name: round(min(r["s"]), 4) for name, r in rows.items()},
        "median_cpu_s": {name: round(statistics.median(r["cpu_s"]), 4) for name, r in rows.items()},
    }


BENCH = Benchmark(
    "startup",
    CASES,
    stream=rounds,
    at="",
    head=summary,
    line=lambda name, row: f"{name}: median {statistics.median(row['s']):.3f} s",
    options=[option("--runs", type=int, default=21)],
)
