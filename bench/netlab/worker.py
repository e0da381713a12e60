"""The process on each host of the laboratory: measures the cells of a job.

    python -m bench.netlab.worker JOB.json RANK

The workers join one another and measure what the job file lists; the first host appends one line per cell to the
results. If a job dies, it is therefore continued after the model that killed it.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.netlab.steps import ROUNDS, Cell, in_turn, timed


def main(job_file: str, rank: str) -> None:
    """Runs a job file's tasks on this host; the first host writes one JSON row a task to the job's results file."""
    job = json.loads(Path(job_file).read_text())
    results = Path(job["results"])

    def say(row: dict[str, Any]) -> None:
        if int(rank) == 0:
            with results.open("a") as f:
                f.write(json.dumps({"at": job["stamp"], **row}) + "\n")

    if job["kind"] == "torch":
        from bench.netlab import torch_buckets

        torch_buckets.run_cells(job, say, int(rank))
        return
    if job["kind"] == "frameworks":
        from bench.netlab import frameworks

        frameworks.run_cells(job, say, int(rank))
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job["coordinator"], job["hosts"], int(rank), initialization_timeout=120)
    if job["kind"] == "buckets":
        from bench.netlab.buckets import run_cells

        run_cells(job, say)
        return
    if job["kind"] == "levels":
        from bench.netlab import levels

        levels.run_cells(job, say)
        return
    cells = [(item, Cell(**{**item["cell"], "mesh": tuple(item["cell"]["mesh"])})) for item in job["cells"]]
    for _, group in itertools.groupby(cells, key=lambda x: (x[1].model, x[1].batch)):
        together = list(group)
        if not _in_time(job["until"]):
            return

        def begin(i: int, together: list[Any] = together) -> None:
            say({"key": together[i][0]["key"], "begun": time.time()})

        if job.get("traced"):
            for i, (item, cell) in enumerate(together):
                begin(i)
                late_s = item.get("late_s", 0.0) * (int(rank) == job["hosts"] - 1)
                say({"key": item["key"], **timed(cell, item["repeats"], Path(item["traces"]), late_s)})
            continue
        found = in_turn([(cell, item["repeats"]) for item, cell in together], ROUNDS, begin)
        for (item, _), row in zip(together, found, strict=True):
            say({"key": item["key"], **row})


def _in_time(until: float) -> bool:
    """Returns whether there is time; the first host decides for all."""
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.int32(time.time() < until)))


if __name__ == "__main__":
    main(*sys.argv[1:])
