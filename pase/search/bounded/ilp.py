"""The residual problem as an integer program for HiGHS (in scipy), run in a separate process.

There is one binary per config and one variable per allowed pair of an edge (the local polytope). Memory rows are added
only if an answer violates them. A separate process uses another core and can be stopped at once.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.search.bounded.flat import Flat
from pase.search.bounded.rows import Rows

if TYPE_CHECKING:
    import scipy.sparse as sp

__all__ = ["IlpJob", "ilp_problem", "solve_ilp"]

_ROWS_A_ROUND = 40
_COST_SCALE, _ROW_SCALE = 1e6, 1e4
"""Costs and rows are scaled to about these sizes, against HiGHS's tolerances of 1e-6."""
_PRESOLVED = 6_000  # unknowns; below this, HiGHS runs without presolve
_MOST_STEPS = 100_000  # simplex steps per linear program, a budget that does not depend on a clock
_MOST_NODES = (
    500_000  # nodes of HiGHS's tree times unknowns, because the cost of a node grows with the unknowns
)


def ilp_problem(
    flat: Flat, rows: Rows, usable: np.ndarray, scale: float, seconds: float
) -> dict[str, np.ndarray]:
    """Arrays for ``solve_ilp``.

    usable: bool [entries of flat], the pairs that may still occur. scale: the size of the costs, relative to which
    tolerances are set. seconds: the time limit; inf: only the budget of work limits it.
    """
    return {
        "cost": flat.cost,
        "slot": flat.slot,
        "head": flat.head,
        "tail": flat.tail,
        "matrix": flat.matrix,
        "entries": np.where(usable, flat.entries, np.inf),
        "capacity": rows.capacity,
        "ptr": rows.ptr,
        "point": rows.point,
        "change": rows.change,
        "settings": np.array([scale, seconds]),
    }


class IlpJob:
    """A running integer program.

    due: the round that waits for the answer. No earlier round uses it, so that the result does not depend on when the
    answer arrives.
    """

    def __init__(self, problem: dict[str, np.ndarray], due: int) -> None:
        self.due = due
        buffer = io.BytesIO()
        np.savez(buffer, **problem)  # type: ignore[arg-type]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pase.search.bounded.ilp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(buffer.getvalue())
        self.process.stdin.close()
        self.process.stdin = None  # otherwise ``communicate`` would flush it

    def wait(self, seconds: float) -> IlpAnswer | None:
        """(status, choice, bound), see ``solve_ilp``; None if it takes longer. The status of a dead process is
        'failed'."""
        # With a timeout of 0, ``communicate`` gives up before its first look, even if the process has ended.
        timeout = max(0.01, seconds) if np.isfinite(seconds) else None
        try:
            data, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        if self.process.returncode != 0 or not data:
            return "failed", None, -np.inf
        with np.load(io.BytesIO(data), allow_pickle=False) as answer:
            choice = answer["choice"] if answer["choice"].size else None
            return str(answer["status"]), choice, float(answer["bound"])

    def stop(self) -> None:
        """Kill the process if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.stdout.close()


IlpAnswer = tuple[str, "np.ndarray | None", float]
"""("optimal" | "infeasible" | "stopped", choice int64 [n] or None, lower bound)."""


class _Capacity:
    """The memory limit as rows over the configs [slots]. Rows are added as they are violated."""

    def __init__(self, problem: dict[str, np.ndarray]) -> None:
        self.point, self.change = problem["point"], problem["change"]
        self.capacity = problem["capacity"]
        self.slots = int(problem["slot"][-1])
        self.owner = np.repeat(np.arange(self.slots), np.diff(problem["ptr"]))
        self.scale = _power_of_two(_ROW_SCALE / np.maximum(self.capacity, 1.0))
        self.active = np.zeros(0, np.int64)

    def over(self, share: np.ndarray) -> np.ndarray:
        """Bytes in use minus the capacity, float64 [points]. share: the fraction of each config, float64 [slots]."""
        total = np.zeros(self.capacity.size + 1)
        np.add.at(total, self.point, self.change * share[self.owner])
        return np.cumsum(total)[: self.capacity.size] - self.capacity

    def add(self, over: np.ndarray, most: int) -> bool:
        """Add the worst of the points that are over the limit and are local maxima. Returns whether any is new."""
        left, right = np.append(-np.inf, over[:-1]), np.append(over[1:], -np.inf)
        at = np.flatnonzero((over > 0) & (over >= left) & (over > right))
        worst = at[np.argsort(-over[at], kind="stable")[:most]]
        before = self.active.size
        self.active = np.union1d(self.active, worst)
        return self.active.size > before

    def matrix(self, columns: int) -> sp.csr_array:
        """The active rows, scaled: [active, columns]."""
        import scipy.sparse as sparse

        rows, cols, values = [], [], []
        for i, t in enumerate(self.active):
            before = self.point <= t
            held = np.bincount(self.owner[before], self.change[before], minlength=self.slots)
            at = np.flatnonzero(held)
            rows.append(np.full(at.size, i))
            cols.append(at)
            values.append(held[at] * self.scale[t])
        shape = (self.active.size, columns)
        return sparse.csr_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))), shape=shape
        )

    def limits(self) -> np.ndarray:
        """Right-hand sides of the active rows."""
        return np.asarray(self.capacity[self.active] * self.scale[self.active])


def solve_ilp(problem: dict[str, np.ndarray]) -> IlpAnswer:
    """The cheapest choice: solves the linear relaxation, then the integer program, each with the rows it violates."""
    scale, seconds = (float(x) for x in problem["settings"])
    ends_at = time.monotonic() + seconds
    # Scale by powers of two, so that numbers stay exact, and skip presolve for small problems. With presolve, costs
    # times 1e6 / 72 and a row times 1e4 / 117, HiGHS (scipy 1.17) returned 715 as optimal although 710 fits:
    # tests/search/test_solve.py, seed 17.
    factor = float(_power_of_two(np.array(_COST_SCALE / scale)))
    objective, equal, rhs = _polytope(problem)
    memory = _Capacity(problem)
    status, bound = _relaxed(objective * factor, equal, rhs, memory, ends_at)
    bound /= factor
    if status != "optimal":
        return status, None, bound
    return _whole(problem["slot"], objective, factor, equal, rhs, memory, bound, ends_at)


def _relaxed(
    objective: np.ndarray, equal: sp.csr_array, rhs: np.ndarray, memory: _Capacity, ends_at: float
) -> tuple[str, float]:
    """(status, bound) of the linear relaxation, in the objective's unit."""
    from scipy.optimize import linprog

    bound = -np.inf
    while (left := ends_at - time.monotonic()) > 0:
        rows: dict[str, Any] = {"A_eq": equal, "b_eq": rhs}
        if memory.active.size:
            rows |= {"A_ub": memory.matrix(objective.size), "b_ub": memory.limits()}
        lp = linprog(objective, bounds=(0, 1), options={"time_limit": left, "maxiter": _MOST_STEPS}, **rows)
        if lp.status == 2:
            return "infeasible", np.inf
        if lp.x is None or lp.fun is None or lp.status != 0:
            return "stopped", bound
        bound = float(lp.fun)
        if not memory.add(memory.over(lp.x[: memory.slots]) * memory.scale - 1e-3, _ROWS_A_ROUND):
            return "optimal", bound
    return "stopped", bound


def _whole(
    slot: np.ndarray,
    objective: np.ndarray,
    factor: float,
    equal: sp.csr_array,
    rhs: np.ndarray,
    memory: _Capacity,
    bound: float,
    ends_at: float,
) -> IlpAnswer:
    """Solve with one config per node. bound: a known lower bound."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    integral = np.concatenate([np.ones(memory.slots), np.zeros(objective.size - memory.slots)])
    while (left := ends_at - time.monotonic()) > 0:
        limits = [LinearConstraint(equal, rhs, rhs)]
        if memory.active.size:
            limits.append(LinearConstraint(memory.matrix(objective.size), -np.inf, memory.limits()))
        answer = milp(
            objective * factor,
            constraints=limits,
            bounds=Bounds(0, 1),
            integrality=integral,
            options={
                "time_limit": left,
                "node_limit": max(1, _MOST_NODES // objective.size),
                "mip_rel_gap": 0.0,
                "presolve": objective.size > _PRESOLVED,
            },
        )
        if answer.status == 2:
            return "infeasible", None, np.inf
        if answer.mip_dual_bound is not None:
            bound = max(bound, answer.mip_dual_bound / factor)
        if answer.x is None:
            return "stopped", None, bound
        choice = np.array([answer.x[a:b].argmax() for a, b in pairwise(slot)])
        share = np.zeros(memory.slots)
        share[slot[:-1] + choice] = 1.0
        over = memory.over(share)
        if not (over > 0).any():
            return ("optimal" if answer.status == 0 else "stopped"), choice, bound
        if not memory.add(over * memory.scale, 10**9):
            # HiGHS's tolerance admitted a violation, so tighten the rows a little.
            memory.capacity = np.where(over > 0, memory.capacity - 2 * over, memory.capacity)
    return "stopped", None, bound


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """The nearest power of two, float64."""
    return np.exp2(np.round(np.log2(x)))


def _polytope(problem: dict[str, np.ndarray]) -> tuple[np.ndarray, sp.csr_array, np.ndarray]:
    """(Objective, equality matrix, right-hand side): one config per node, and pairs that agree with both ends."""
    import scipy.sparse as sparse

    slot, head, tail = problem["slot"], problem["head"], problem["tail"]
    n, slots = slot.size - 1, int(slot[-1])
    sizes = np.diff(slot)
    costs = [problem["cost"]]
    rows = [np.repeat(np.arange(n), sizes)]
    cols = [np.arange(slots)]
    values = [np.ones(slots)]
    row, col = n, slots
    for e in range(head.size):
        a, b = int(head[e]), int(tail[e])
        ka, kb = int(sizes[a]), int(sizes[b])
        start = int(problem["matrix"][e])
        table = problem["entries"][start : start + ka * kb].reshape(ka, kb)
        i, j = np.nonzero(np.isfinite(table))
        pair = np.arange(col, col + i.size)
        costs.append(table[i, j])
        for side, k, v in ((i, ka, a), (j, kb, b)):
            rows += [row + side, row + np.arange(k)]
            cols += [pair, slot[v] + np.arange(k)]
            values += [np.ones(i.size), -np.ones(k)]
            row += k
        col += i.size
    data = (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols)))
    rhs = np.concatenate([np.ones(n), np.zeros(row - n)])
    return np.concatenate(costs), sparse.csr_array(data, shape=(row, col)), rhs


def main() -> None:
    """Solve the problem on standard input, and write the answer to standard output."""
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as archive:
        status, choice, bound = solve_ilp(dict(archive))
    buffer = io.BytesIO()
    np.savez(buffer, status=status, choice=np.zeros(0, np.int64) if choice is None else choice, bound=bound)
    sys.stdout.buffer.write(buffer.getvalue())


if __name__ == "__main__":
    main()
