"""The instances of the IOPDDL contest, by pase and by general solvers.

    python -m bench search.iopddl [--only S] [--runs 0,1,0] [--rounds 60] [--solvers pase,cpsat]

pase runs several times. Its budget is in rounds of work and does not depend on a clock, so a seed that runs twice must
give the same choice whatever else the machine does; ``load_1min`` of each run states the load. ``wall_s`` is the time
of the whole program; ``in_time`` is whether that is within the contest's limit, which was for eight cores. Other
solvers get 60 s. Writes bench/results/search_iopddl.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.processes import children_s
from bench.runner import BEGAN, Benchmark, option
from bench.search.common import DATA, contracted_size, measure, search_options, settings
from pase.search import Solution, verify
from pase.search.instances.readers import read_instance
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
    path: Path, limit: int, seed: int, rounds: int, tables: CostTables, memory: MemoryProfile | None
) -> dict[str, object]:
    """Runs ``pase solve`` as a user does, and verifies its answer with the tables."""
    command = [sys.executable, "-c", "from pase.cli import main; main()", "solve", str(path)]
    options = ["--seed", str(seed), "--rounds", str(rounds), "--json"]
    ran: dict[str, object] = {"seed": seed, "rounds": rounds}
    ran |= {"load_1min": round(os.getloadavg()[0], 2), "commit": BEGAN["commit"]}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "choice.json"
        began, before = time.perf_counter(), children_s()
        run = subprocess.run(
            [*command, *options, "-o", str(answer)], capture_output=True, text=True, check=False
        )
        wall_s = time.perf_counter() - began
        ran |= {
            "wall_s": round(wall_s, 2),
            "cpu_s": round(children_s() - before, 2),
            "in_time": wall_s <= limit,
        }
        if run.returncode:
            said_why = run.stderr.strip().splitlines()[-1:]
            return {"cost": None, "feasible": False, "note": " ".join(said_why)} | ran
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
    return ran | {
        "cost": cost if found.feasible else None,
        "bound": found.bound,
        "gap": found.gap,
        "optimal": found.optimal,
        "feasible": found.feasible,
        "search_s": round(said["seconds"], 2),
        "method": said["method"],
        "certificate": said["certificate"],
        "peak_mb": said["peak_mb"],
        "choice": hashlib.sha256(choice.tobytes()).hexdigest()[:16],
    }


def worst(instance: str, known: int, runs: list[dict[str, object]]) -> dict[str, object]:
    """Returns the highest cost, the largest gap, the longest time and the most memory of several runs."""
    costs = [row["cost"] for row in runs]
    choices = [(row["seed"], row["choice"]) for row in runs if "choice" in row]
    seeds = len({seed for seed, _ in choices})
    cost = None if None in costs else max(float(str(c)) for c in costs)
    return {
        "instance": instance,
        "solver": "pase, worst of its runs",
        "cost": cost,
        "over_best_known": None if cost is None else cost / known - 1,
        "gap": None if cost is None else max(float(str(row["gap"])) for row in runs),
        "wall_s": max(float(str(row["wall_s"])) for row in runs),
        "cpu_s": max(float(str(row["cpu_s"])) for row in runs),
        "peak_mb": max((float(str(row["peak_mb"])) for row in runs if "peak_mb" in row), default=None),
        # None: no seed ran twice.
        "equal_seeds_equal_choices": len(set(choices)) == seeds if len(choices) > seeds else None,
    }


def measured(name: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of one instance: each run of pase, the worst of them, and the other solvers."""
    known, limit = BEST_KNOWN[name]
    path = DATA / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"
    began = time.perf_counter()
    tables, memory = read_instance(path)
    size = {
        "nodes": len(tables.node_costs),
        "edges": len(tables.edges),
        "read_s": round(time.perf_counter() - began, 2),
        "best_known": known,
    }
    solvers = given.solvers.split(",")
    if "pase" in solvers:
        size |= contracted_size(tables, memory)
        runs = []
        for seed in map(int, given.runs.split(",")):
            row = by_command(path, limit, seed, given.rounds, tables, memory)
            row["over_best_known"] = row["cost"] / known - 1 if isinstance(row["cost"], float) else None
            runs.append({"instance": name, "solver": "pase", "limit_s": limit, **size, **row})
            yield runs[-1]
        yield worst(name, known, runs)
    others = ",".join(s for s in solvers if s in ("cpsat", "highs"))
    if others:
        how = argparse.Namespace(solvers=others, seconds=given.seconds, repeats=0)
        for row in measure(name, tables, memory, how):
            yield row | {"best_known": known}


BENCH = Benchmark(
    "search_iopddl",
    list(BEST_KNOWN),
    measured,
    named="{instance}",
    head=settings,
    options=[
        *search_options(seconds=OTHERS_S),
        option("--runs", default="0,1,0", help="the seed of each of pase's runs"),
        option("--rounds", type=int, default=60, help="pase's budget"),
    ],
)
