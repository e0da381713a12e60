"""Runs pase and other solvers on cost tables, for the search benches."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.cases import SHARED
from bench.runner import Option, option
from pase.errors import Infeasible
from pase.search import MemoryProfile, solve, verify
from pase.search.bounded.contract import contract, fixed_bytes
from pase.search.bounded.flat import flatten
from pase.search.bounded.ilp import ilp_problem, solve_ilp
from pase.search.bounded.rows import Rows, memory_rows
from pase.search.types import Effort
from pase.tables.types import CostTables

MOST_PAIRS = {"highs": 4_000_000, "cpsat": 2_000_000}  # more pairs do not fit into memory
TOO_LARGE: dict[str, Any] = {"cost": None, "bound": None, "optimal": False, "note": "too many pairs to state"}
DATA = SHARED


def search_options(*, seconds: float, repeats: int = 3) -> list[Option]:
    """Returns the options of a search bench: a time limit, repeats, and which solvers."""
    return [
        option("--seconds", type=float, default=seconds, help="time limit of each run"),
        option("--repeats", type=int, default=repeats),
        option("--solvers", default="pase,cpsat,highs,toulbar2", help="comma-separated"),
    ]


def settings(rows: object, given: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Returns the entry of the result file with the bench's own options."""
    own = ("seconds", "repeats", "solvers", "runs", "rounds", "files")
    return {"settings": {k: v for k, v in vars(given).items() if k in own} | more}


def _pase(tables: CostTables, memory: MemoryProfile | None, seconds: float) -> dict[str, Any]:
    found = solve(tables, memory, effort=Effort(time_limit=seconds))
    verify(tables, found, memory)
    return {
        "cost": found.cost if found.feasible else None,
        "bound": found.bound,
        "optimal": found.optimal,
        "method": found.method,
        "work": found.work,
        "peak_entries": found.peak_entries,
    }


def _highs(tables: CostTables, memory: MemoryProfile | None, seconds: float) -> dict[str, Any]:
    """scipy's HiGHS on the local polytope; memory rows are added when they are violated."""
    costs, pairs, matrices, rows = plain(tables, memory)
    if sum(m.size for m in matrices) > MOST_PAIRS["highs"]:
        return TOO_LARGE
    scale = float(np.median([np.abs(c[np.isfinite(c)]).max() for c in costs])) or 1.0
    # A forbidden config has no allowed pair. If a node has no pairs, it gets a cost that is too high for any solution.
    joined = {v for pair in pairs for v in pair}
    allowed = [np.isfinite(c) for c in costs]
    matrices = [
        np.where(np.logical_and.outer(allowed[a], allowed[b]), m, np.inf)
        for (a, b), m in zip(pairs, matrices, strict=True)
    ]
    forbidden_cost = 1e3 * max(float(c[ok].max()) for c, ok in zip(costs, allowed, strict=True)) + 1.0
    costs = [
        np.where(ok, c, 0.0 if v in joined else forbidden_cost)
        for v, (c, ok) in enumerate(zip(costs, allowed, strict=True))
    ]
    flat = flatten(costs, pairs, matrices)
    status, choice, bound = solve_ilp(ilp_problem(flat, rows, np.isfinite(flat.entries), scale, seconds))
    cost = None if choice is None else flat.cost_of(choice)
    return {"cost": cost, "bound": bound, "optimal": status == "optimal"}


def _cpsat(tables: CostTables, memory: MemoryProfile | None, seconds: float) -> dict[str, Any]:
    """OR-tools CP-SAT: a Boolean per config and per allowed pair; costs are integers."""
    from ortools.sat.python import cp_model

    costs, pairs, matrices, rows = plain(tables, memory)
    if sum(m.size for m in matrices) > MOST_PAIRS["cpsat"]:
        return TOO_LARGE
    model = cp_model.CpModel()
    terms: list[tuple[Any, int]] = []
    x = []
    for c in costs:
        v = [model.new_bool_var("") for _ in range(c.size)]
        model.add_exactly_one(v)
        for var, value in zip(v, c, strict=True):
            if np.isinf(value):
                model.add(var == 0)
            elif value:
                terms.append((var, int(value)))
        x.append(v)
    for (a, b), m in zip(pairs, matrices, strict=True):
        cells: dict[tuple[int, int], Any] = {}
        for i, j in zip(*np.nonzero(np.isfinite(m)), strict=True):
            cells[i, j] = model.new_bool_var("")
            if m[i, j]:
                terms.append((cells[i, j], int(m[i, j])))
        by_row: dict[int, list[Any]] = {}
        for (i, _), v in cells.items():
            by_row.setdefault(i, []).append(v)
        for i in range(m.shape[0]):
            model.add(sum(by_row.get(i, [])) == x[a][i])
        by_col: dict[int, list[Any]] = {}
        for (_, j), v in cells.items():
            by_col.setdefault(j, []).append(v)
        for j in range(m.shape[1]):
            model.add(sum(by_col.get(j, [])) == x[b][j])
    if memory is not None:
        held = rows.dense(np.arange(rows.points))
        flat_x = [var for v in x for var in v]
        for t in range(rows.points):
            at = np.flatnonzero(held[:, t])
            model.add(sum(int(held[i, t]) * flat_x[i] for i in at) <= int(rows.capacity[t]))
    model.minimize(sum(value * var for var, value in terms))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    some = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "cost": solver.objective_value if some else None,
        "bound": solver.best_objective_bound,
        "optimal": status == cp_model.OPTIMAL,
    }


def _toulbar2(tables: CostTables, memory: MemoryProfile | None, seconds: float) -> dict[str, Any]:
    """toulbar2 with virtual arc consistency, on integers; without a memory limit."""
    import pytoulbar2

    if memory is not None:
        return {"cost": None, "bound": None, "optimal": False, "note": "memory limit not modelled"}
    costs, pairs, matrices, _ = plain(tables, None)
    top = 10 * float(sum(c[np.isfinite(c)].max() for c in costs)) + 1e15
    problem = pytoulbar2.CFN(top, resolution=0, vac=1)
    whole = [np.where(np.isfinite(c), np.round(c), top) for c in costs]
    for i, c in enumerate(whole):
        problem.AddVariable(f"x{i}", range(c.size))
        problem.AddFunction([f"x{i}"], [int(value) for value in c])
    for (a, b), m in zip(pairs, matrices, strict=True):
        cells = np.where(np.isfinite(m), np.round(m), top).reshape(-1)
        problem.AddFunction([f"x{a}", f"x{b}"], [int(value) for value in cells])
    answer = problem.Solve(showSolutions=0, timeLimit=max(1, int(seconds)))
    cost = None if answer is None else float(answer[1])
    bound = float(problem.GetDDualBound())
    return {"cost": cost, "bound": bound, "optimal": cost is not None and cost - bound < 1e-9 * abs(cost) + 1}


SOLVERS: dict[str, Callable[[CostTables, MemoryProfile | None, float], dict[str, Any]]] = {
    "pase": _pase,
    "highs": _highs,
    "cpsat": _cpsat,
    "toulbar2": _toulbar2,
}


def plain(
    tables: CostTables, memory: MemoryProfile | None
) -> tuple[list[np.ndarray], list[tuple[int, int]], list[np.ndarray], Rows]:
    """Returns the problem for the other solvers: dense matrices, parallel edges added, nothing reduced."""
    matrices: dict[tuple[int, int], np.ndarray] = {}
    for e in tables.edges:
        a, b, m = (e.src, e.dst, e.dense()) if e.src < e.dst else (e.dst, e.src, e.dense().T)
        matrices[a, b] = matrices[a, b] + m if (a, b) in matrices else m
    costs = list(tables.node_costs)
    sizes = [c.size for c in costs]
    own = [[(v, np.arange(k))] for v, k in enumerate(sizes)]
    profile = memory or MemoryProfile(
        bytes=tuple(np.zeros(k) for k in sizes),
        start=np.zeros(len(sizes), np.int64),
        stop=np.zeros(len(sizes), np.int64),
        limit_bytes=0.0,
    )
    return costs, list(matrices), list(matrices.values()), memory_rows(profile, sizes, own, [])


def _child(
    pipe: Any, solver: str, tables: CostTables, memory: MemoryProfile | None, seconds: float, repeats: int
) -> None:
    """Runs a solver in its own process, so that peak memory is that of this solver."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    first_s = 0.0
    answer: dict[str, Any] = {}
    for i in range(repeats + 1):
        began = time.perf_counter()
        try:
            answer = dict(SOLVERS[solver](tables, memory, seconds))
        except Infeasible:
            answer = {"cost": None, "bound": None, "optimal": True}
        took = time.perf_counter() - began
        if i == 0:
            first_s = took  # kernels loaded from the cache, or compiled
            if took > 5 or solver != "pase":  # long runs, and those of other solvers, are not repeated
                times = [took]
                break
        else:
            times.append(took)
    answer["first_s"] = round(first_s, 4)
    answer["median_s"] = round(statistics.median(times), 5)
    answer["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    answer["before_mb"] = round(before / 1024)
    pipe.send(answer)


def measure(
    name: str, tables: CostTables, memory: MemoryProfile | None, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields a row per solver, each from a fresh process, killed at three times its limit plus a minute."""
    for solver in args.solvers.split(","):
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(theirs, solver, tables, memory, args.seconds, args.repeats)
        )
        process.start()
        theirs.close()
        answer: dict[str, Any]
        try:
            answer = (
                ours.recv() if ours.poll(3 * args.seconds + 60) else {"note": "killed: did not stop in time"}
            )
        except EOFError:
            answer = {"note": "died (out of memory, or not installed)"}
        process.kill()
        process.join()
        row = {"instance": name, "solver": solver, "limit_s": args.seconds, **answer}
        yield {k: _plain(v) for k, v in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def contracted_size(tables: CostTables, memory: MemoryProfile | None) -> dict[str, int]:
    """Returns the size of the problem after the exact reductions."""
    left = contract(tables, memory)
    points = 0
    if memory is not None:
        sizes = [c.size for c in left.costs]
        points = memory_rows(memory, sizes, left.members, fixed_bytes(left, memory)).points
    return {"left_nodes": len(left.nodes), "left_edges": len(left.pairs), "left_points": points}
