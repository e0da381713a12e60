"""Weighted CSPs and graphical models from files, against the solvers that are made for them.

    python -m bench.search.public --files FOLDER [--seconds 10] [--only 404] [--solvers pase,toulbar2]

FOLDER holds .wcsp and .uai files. The rows of bench/results are files of toulbar2's own repository
(github.com/toulbar2/toulbar2: validation/default, cover and web/EXAMPLES), which are not copied here; each row has its
file's hash. toulbar2 reads the file itself, functions of three variables and all; the others get pase's tables. Costs
of a .uai are whole numbers, -ln of a weight times 10^7, for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import wanted
from bench.provenance import ROOT
from bench.search.common import SOLVERS, measure, search_options, write_results
from pase.search import MemoryProfile
from pase.search.bounded.contract import contract
from pase.search.instances.readers import read_instance
from pase.tables.types import CostTables

UNIT = 1e7
"""Of a .uai's costs; toulbar2 rounds to it as well."""


def _native(path: Path, tables: CostTables, memory: MemoryProfile | None, seconds: float) -> dict[str, Any]:
    """toulbar2 on the file as it is, with virtual arc consistency. It leaves out a constant of a .uai: cost and bound
    are moved to what its choice costs in pase's tables."""
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
    """What the file's variables, which are the first nodes, cost at these values: they decide all other nodes."""
    costs = list(tables.node_costs)
    for v, k in enumerate(values):
        costs[v] = np.where(np.arange(costs[v].size) == k, costs[v], np.inf)
    left = contract(replace(tables, node_costs=tuple(costs)))
    assert not left.nodes, "a node that is not a variable is left undecided"
    return left.constant


def whole(tables: CostTables) -> CostTables:
    """All costs in units, rounded; what is forbidden stays so. Equal matrices stay one array."""
    made: dict[int, np.ndarray] = {}

    def rounded(a: np.ndarray) -> np.ndarray:
        if id(a) not in made:
            made[id(a)] = np.round(a * UNIT)
        return made[id(a)]

    edges = tuple(replace(e, cost=rounded(e.cost)) for e in tables.edges)
    return replace(tables, node_costs=tuple(map(rounded, tables.node_costs)), edges=edges)


def main() -> None:
    """Writes bench/results/search_public.json: a row for each file and solver."""
    made = search_options(__doc__, "search_public", seconds=10.0, repeats=1)
    made.add_argument("--files", type=Path, default=ROOT / "examples", metavar="FOLDER")
    args = made.parse_args()
    rows = []
    files = sorted(f for f in args.files.iterdir() if f.suffix in (".wcsp", ".uai"))
    for path in wanted(((file.name, file) for file in files), args.only):
        tables, memory = read_instance(path)
        tables = whole(tables) if path.suffix == ".uai" else tables
        about = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            "nodes": len(tables.node_costs),
            "edges": len(tables.edges),
            "largest": max(c.size for c in tables.node_costs),
        }
        SOLVERS["toulbar2"] = partial(_native, path)
        rows += [about | row for row in measure(path.name, tables, memory, args)]
    args.files = args.files.name
    write_results(args, rows)


if __name__ == "__main__":
    main()
