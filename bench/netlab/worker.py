"""Runs on every host: joins the others, measures what a job file lists, the first host writes the results.

    python -m bench.netlab.worker JOB.json RANK

Results are appended one line a cell, so that a job that dies is taken up behind the
model that killed it.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.netlab.steps import Cell, in_turn, timed

ROUNDS = 3


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
    cells = [(item, Cell(**{**item["cell"], "mesh": tuple(item["cell"]["mesh"])})) for item in job["cells"]]
    for _, group in itertools.groupby(cells, key=lambda x: (x[1].model, x[1].batch)):
        together = list(group)

        def begin(i: int, together: list[Any] = together) -> None:
            say({"key": together[i][0]["key"], "begun": time.time()})

        if job.get("traced"):
            begin(0)
            found = [timed(cell, item["repeats"], Path(item["traces"])) for item, cell in together]
        else:
            found = in_turn([(cell, item["repeats"]) for item, cell in together], ROUNDS, begin)
        for (item, _), row in zip(together, found, strict=True):
            say({"key": item["key"], **row})


if __name__ == "__main__":
    main(*sys.argv[1:])
