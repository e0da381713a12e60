"""The IOPDDL contest's instances, within the contest's own time limits; general solvers on the same tables beside.

python -m bench.search_iopddl [--only S] [--seconds 0]     # 0: each instance's limit; others get 60 s at most

The limit covers reading, as in the contest. ``wall_s`` of pase is the whole program, from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.arguments import wanted
from bench.search_common import DATA, contracted_size, measure, options, write_results
from pase.search import Solution, verify
from pase.search.readers import read_instance
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables

BEST_KNOWN = {  # cost, the contest's time limit (on 8 cores)
    "B": (532_843, 60),
    "G": (217_039, 120),
    "A": (6_548_641_531, 60),
    "P": (662_197_407_330, 240),
    "M": (49_928_157_537, 180),
    "S": (1_521_949_307, 240),
}


OTHERS_S = 60.0


def by_command(
    path: Path, seconds: float, tables: CostTables, memory: MemoryProfile | None
) -> dict[str, object]:
    """``pase solve`` as a user runs it; its answer recomputed from the tables."""
    command = [sys.executable, "-c", "from pase.cli import main; main()", "solve", str(path)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "choice.json"
        began = time.perf_counter()
        run = subprocess.run(
            [*command, "--time-limit", str(seconds), "--json", "-o", str(answer)],
            capture_output=True,
            text=True,
            check=False,
        )
        wall_s = time.perf_counter() - began
        if run.returncode:
            said_why = run.stderr.strip().splitlines()[-1:]
            return {"cost": None, "feasible": False, "wall_s": round(wall_s, 2), "note": " ".join(said_why)}
        said = json.loads(run.stdout)
        choice = np.array(json.loads(answer.read_text()))
    found = Solution(
        choice=choice,
        cost=float(said["cost"]),
        bound=float(said["bound"]),
        optimal=said["optimal"],
        feasible=said["feasible"],
    )
    cost = verify(tables, found, memory)
    return {
        "cost": cost if found.feasible else None,
        "bound": found.bound,
        "gap": found.gap,
        "optimal": found.optimal,
        "feasible": found.feasible,
        "wall_s": round(wall_s, 2),
        "search_s": round(said["seconds"], 2),
        "in_time": wall_s <= seconds,
        "method": said["method"],
        "certificate": said["certificate"],
        "peak_mb": said["peak_mb"],
    }


def main() -> None:
    """Writes bench/results/search_iopddl.json: a row for each instance and solver."""
    args = options(__doc__, "search_iopddl", seconds=0.0)
    rows: list[dict[str, object]] = []
    solvers = args.solvers.split(",")
    cases = ((name, (name, *case)) for name, case in BEST_KNOWN.items())
    for name, known, limit in wanted(cases, args.only):
        path = DATA / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"
        began = time.perf_counter()
        tables, memory = read_instance(path)
        size = {
            "nodes": len(tables.node_costs),
            "edges": len(tables.edges),
            "read_s": round(time.perf_counter() - began, 2),
            "best_known": known,
        }
        if "pase" in solvers:
            row = by_command(path, args.seconds or limit, tables, memory)
            cost = row["cost"]
            row["over_best_known"] = cost / known - 1 if isinstance(cost, float) else None
            size |= contracted_size(tables, memory)
            rows.append({"instance": name, "solver": "pase", "limit_s": args.seconds or limit, **size, **row})
            print(rows[-1], flush=True)
        seconds = min(OTHERS_S, args.seconds or limit)
        others = ",".join(s for s in solvers if s in ("cpsat", "highs"))
        if others:
            how = argparse.Namespace(solvers=others, seconds=seconds, repeats=0)
            rows += [{**row, "best_known": known} for row in measure(name, tables, memory, how)]
    write_results(args, rows)


if __name__ == "__main__":
    main()
