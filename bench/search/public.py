"""Weighted CSPs and graphical models from files, by pase and by others.

    python -m bench search.public --files FOLDER [--seconds 10] [--only 404] [--solvers pase,toulbar2]

FOLDER has .wcsp and .uai files. The rows of bench/results are of files from toulbar2's own repository
(github.com/toulbar2/toulbar2: validation/default, cover and web/EXAMPLES), which are not copied here; each row has its
file's hash. toulbar2 reads the file itself, including functions of three variables; the others get pase's tables. For
all of them the costs of a .uai file are integers: -ln of a weight times 10^7. Writes bench/results/search_public.json.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.runner import ROOT, Benchmark, option
from bench.search.common import SOLVERS, measure, search_options, settings
from pase.search import MemoryProfile
from pase.search.bounded.contract import contract
from pase.search.instances.readers import read_instance
from pase.tables.types import CostTables

UNIT = 1e7
"""The unit of the costs of a .uai file; toulbar2 rounds to it as well."""


def _native(path: Path, tables: CostTables, memory: MemoryProfile | None, seconds: float) -> dict[str, Any]:
    """toulbar2 on the file itself, with virtual arc consistency. It leaves out a constant of a .uai file, so cost and
    bound are shifted to the cost of its choice in pase's tables."""
    import pytoulbar2

    problem = pytoulbar2.CFN(vac=1)
    problem.Read(str(path))
    answer = problem.Solve(showSolutions=0, timeLimit=max(1, int(seconds)))
    bound = float(problem.GetDDualBound())
    if answer is None:
        return {"cost": None, "bound": bound, "optimal": False}
    cost = cost_given(tables, answer[0])
    return {"cost": cost, "bound": bound + cost - answer[1], "optimal": answer[1] - bound < 1}


def cost_given(tables: CostTables, values: Sequence[int]) -> float:
    """Returns the cost of these values of the file's variables, the first nodes, which determine all other nodes."""
    costs = list(tables.node_costs)
    for v, k in enumerate(values):
        costs[v] = np.where(np.arange(costs[v].size) == k, costs[v], np.inf)
    left = contract(replace(tables, node_costs=tuple(costs)))
    assert not left.nodes, "a node that is not a variable is left undecided"
    return left.constant


def whole(tables: CostTables) -> CostTables:
    """Returns all costs in units, rounded; forbidden entries stay forbidden, and equal matrices stay one array."""
    made: dict[int, np.ndarray] = {}

    def rounded(a: np.ndarray) -> np.ndarray:
        if id(a) not in made:
            made[id(a)] = np.round(a * UNIT)
        return made[id(a)]

    edges = tuple(replace(e, cost=rounded(e.cost)) for e in tables.edges)
    return replace(tables, node_costs=tuple(map(rounded, tables.node_costs)), edges=edges)


def measured(path: Path, given: Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each solver."""
    tables, memory = read_instance(path)
    tables = whole(tables) if path.suffix == ".uai" else tables
    about = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        "nodes": len(tables.node_costs),
        "edges": len(tables.edges),
        "largest": max(c.size for c in tables.node_costs),
    }
    SOLVERS["toulbar2"] = partial(_native, path)
    for row in measure(path.name, tables, memory, given):
        yield about | row


BENCH = Benchmark(
    "search_public",
    lambda given: {f.name: f for f in sorted(given.files.iterdir()) if f.suffix in (".wcsp", ".uai")},
    measured,
    named="{instance}",
    head=lambda rows, given: settings(rows, given, files=given.files.name),
    options=[
        *search_options(seconds=10.0, repeats=1),
        option("--files", type=Path, default=ROOT / "examples", metavar="FOLDER"),
    ],
)
