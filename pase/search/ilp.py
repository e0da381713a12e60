"""The residual problem as an integer program for HiGHS (scipy's), in a process of its own.

One binary per config, one variable per allowed pair of an edge (the local polytope), memory rows added
only where an answer breaks them. A process, so that it uses the second core, and can be stopped at once.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np

from pase.search.flat import Flat
from pase.search.rows import Rows

__all__ = ["IlpJob", "ilp_problem", "solve_ilp"]

_ROWS_A_ROUND = 40
_COST_SCALE = (
    1e6  # costs are scaled to about this size, rows to _ROW_SCALE, against HiGHS's tolerances of 1e-6
)
_ROW_SCALE = 1e4
_PRESOLVED = 6_000  # unknowns; below, HiGHS does without its presolve


def ilp_problem(
    flat: Flat, rows: Rows, usable: np.ndarray, scale: float, seconds: float
) -> dict[str, np.ndarray]:
    """Arrays for ``solve_ilp``. usable: bool [entries of flat], pairs that may still occur; scale: the
    size of the costs, against which tolerances are set; seconds: the time it may take."""
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
    """A running integer program; ``poll`` gives its answer once there is one."""

    def __init__(self, problem: dict[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **problem)  # type: ignore[arg-type]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pase.search.ilp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(buffer.getvalue())
        self.process.stdin.close()

    def poll(self) -> tuple[str, np.ndarray | None, float] | None:
        """None while it runs, else (status, choice, bound); see ``solve_ilp``. A dead process is 'failed'."""
        if self.process.poll() is None:
            return None
        assert self.process.stdout is not None
        data = self.process.stdout.read()
        self.process.stdout.close()
        if self.process.returncode != 0 or not data:
            return "failed", None, -np.inf
        with np.load(io.BytesIO(data), allow_pickle=False) as answer:
            choice = answer["choice"] if answer["choice"].size else None
            return str(answer["status"]), choice, float(answer["bound"])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.stdout.close()


def solve_ilp(problem: dict[str, np.ndarray]) -> tuple[str, np.ndarray | None, float]:
    """("optimal" | "infeasible" | "stopped", choice int64 [n] or None, lower bound)."""
    import scipy.sparse as sp
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp

    scale, seconds = (float(x) for x in problem["settings"])
    ends_at = time.monotonic() + seconds
    # Powers of two, so that numbers stay what they are; and no presolve where there is no need of it. HiGHS (scipy
    # 1.17) with presolve, costs times 1e6 / 72 and a row times 1e4 / 117, called 715 optimal where 710 fits:
    # tests/search/test_memory_ilp.py, seed 17.
    factor = float(_power_of_two(np.array(_COST_SCALE / scale)))
    slot, ptr, capacity = problem["slot"], problem["ptr"], problem["capacity"]
    slots = int(slot[-1])
    objective, equal, rhs = _polytope(problem)
    owner = np.repeat(np.arange(slots), np.diff(ptr))

    def used(share: np.ndarray) -> np.ndarray:
        total = np.zeros(capacity.size + 1)
        np.add.at(total, problem["point"], problem["change"] * share[owner])
        return np.cumsum(total)[: capacity.size]

    def peaks(over: np.ndarray, limit: int) -> np.ndarray:
        """The worst of the points that are over and no better than their neighbours."""
        left, right = np.append(-np.inf, over[:-1]), np.append(over[1:], -np.inf)
        at = np.flatnonzero((over > 0) & (over >= left) & (over > right))
        return at[np.argsort(-over[at], kind="stable")[:limit]]

    def memory_matrix(points: np.ndarray) -> sp.csr_array:
        rows, cols, values = [], [], []
        for i, t in enumerate(points):
            before = problem["point"] <= t
            held = np.bincount(owner[before], problem["change"][before], minlength=slots)
            at = np.flatnonzero(held)
            rows.append(np.full(at.size, i))
            cols.append(at)
            values.append(held[at] * row_scale[t])
        shape = (points.size, objective.size)
        return sp.csr_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))), shape=shape
        )

    row_scale = _power_of_two(_ROW_SCALE / np.maximum(capacity, 1.0))
    active = np.zeros(0, np.int64)
    bound = -np.inf
    while True:  # the relaxation, with the rows it breaks
        left = ends_at - time.monotonic()
        if left <= 0:
            return "stopped", None, bound
        limits: dict[str, Any] = (
            {"A_ub": memory_matrix(active), "b_ub": capacity[active] * row_scale[active]}
            if active.size
            else {}
        )
        lp = linprog(
            objective * factor, A_eq=equal, b_eq=rhs, bounds=(0, 1), options={"time_limit": left}, **limits
        )
        if lp.status == 2:
            return "infeasible", None, np.inf
        if lp.x is None or lp.fun is None or lp.status != 0:
            return "stopped", None, bound
        bound = lp.fun / factor
        new = peaks((used(lp.x[:slots]) - capacity) * row_scale - 1e-3, _ROWS_A_ROUND)
        new = np.setdiff1d(new, active)
        if not new.size:
            break
        active = np.union1d(active, new)
    integral = np.concatenate([np.ones(slots), np.zeros(objective.size - slots)])
    while True:
        left = ends_at - time.monotonic()
        if left <= 0:
            return "stopped", None, bound
        limits_of = [LinearConstraint(equal, rhs, rhs)]
        if active.size:
            limits_of.append(
                LinearConstraint(memory_matrix(active), -np.inf, capacity[active] * row_scale[active])
            )
        answer = milp(
            objective * factor,
            constraints=limits_of,
            bounds=Bounds(0, 1),
            integrality=integral,
            options={"time_limit": left, "mip_rel_gap": 0.0, "presolve": objective.size > _PRESOLVED},
        )
        if answer.status == 2:
            return "infeasible", None, np.inf
        if answer.mip_dual_bound is not None:
            bound = max(bound, answer.mip_dual_bound / factor)
        if answer.x is None:
            return "stopped", None, bound
        choice = np.array([answer.x[a:b].argmax() for a, b in pairwise(slot)])
        share = np.zeros(slots)
        share[slot[:-1] + choice] = 1.0
        over = used(share) - capacity
        if not (over > 0).any():
            return ("optimal" if answer.status == 0 else "stopped"), choice, bound
        new = np.setdiff1d(peaks(over * row_scale, 10**9), active)
        if not new.size:  # HiGHS's tolerance let a byte through: close the rows a little
            capacity = capacity.copy()
            capacity[over > 0] -= 2 * over[over > 0]
            continue
        active = np.union1d(active, new)


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """The nearest one, float64."""
    return np.exp2(np.round(np.log2(x)))


def _polytope(problem: dict[str, np.ndarray]) -> tuple[np.ndarray, Any, np.ndarray]:
    """(objective, equality matrix, right-hand side): one config a node; pairs agree with both ends."""
    import scipy.sparse as sp

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
    return np.concatenate(costs), sp.csr_array(data, shape=(row, col)), rhs


def main() -> None:
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as archive:
        status, choice, bound = solve_ilp(dict(archive))
    buffer = io.BytesIO()
    np.savez(buffer, status=status, choice=np.zeros(0, np.int64) if choice is None else choice, bound=bound)
    sys.stdout.buffer.write(buffer.getvalue())


if __name__ == "__main__":
    main()
