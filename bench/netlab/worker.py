"""Runs on every host: joins the others, measures what a job file lists, the first host writes the results.

    python -m bench.netlab.worker JOB.json RANK

Results are appended one line a cell, so that a job that dies is taken up behind the cell that killed it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.netlab.steps import Cell, timed


def main(job_file: str, rank: str) -> None:
    job = json.loads(Path(job_file).read_text())
    results = Path(job["results"])

    def say(row: dict[str, Any]) -> None:
        if int(rank) == 0:
            with results.open("a") as f:
                f.write(json.dumps(row) + "\n")

    if job["kind"] == "torch":
        from bench.netlab import torch_buckets

        torch_buckets.run_cells(job, say, int(rank))
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job["coordinator"], job["hosts"], int(rank), initialization_timeout=120)
    if job["kind"] == "buckets":
        from bench.netlab.buckets import run_cells

        run_cells(job, say)
        return
    for item in job["cells"]:
        cell = Cell(**{**item["cell"], "mesh": tuple(item["cell"]["mesh"])})
        key = item["key"]
        say({"key": key, "begun": time.time()})
        traces = Path(item["traces"]) if item.get("traces") else None
        say({"key": key, **timed(cell, item["repeats"], traces)})


if __name__ == "__main__":
    main(*sys.argv[1:])
