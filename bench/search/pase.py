"""PaSE's own instances: every optimum, and general solvers.

    python -m bench search.pase [--seconds 20] [--only transformer]

The solvers get the same tables. The times of the paper and of its prototype are in the notes next to
../shared/data/pase_instances. Writes bench/results/search_pase.json.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.runner import Benchmark
from bench.search.common import DATA, measure, search_options, settings
from pase.search.instances.readers import read_instance

PAPER_S = {  # Table I, PaSE's column; for p = 8, 16, 64
    "alexnet": {8: 0.253, 16: 0.295, 64: 0.475},
    "inception3": {8: 20.018, 16: 39.791, 64: 196.253},
    "rnnlm": {8: 0.086, 16: 0.069, 64: 0.215},
    "transformer": {8: 28.798, 16: 130.882, 64: 1883.187},
}


def measured(path: Path, given: Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each solver."""
    tables, _ = read_instance(path)
    optimum = json.loads(path.read_text())["exact"]["optimum"]
    model, p = path.stem.split("_p")
    for row in measure(path.stem, tables, None, given):
        yield row | {
            "optimum": optimum,
            "paper_s": PAPER_S[model][int(p)],
            "right": row.get("cost") == optimum,
        }


BENCH = Benchmark(
    "search_pase",
    lambda: {file.stem: file for file in sorted((DATA / "pase_instances").glob("*.json"))},
    measured,
    named="{instance}",
    head=settings,
    options=search_options(seconds=20.0, repeats=5),
)
