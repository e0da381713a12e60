"""Finds the best division of a chain of unequal units into pipeline stages, with a proof.

Each stage has a range of the units and one of the ways to run that range. As with equal blocks
(``pase.pipeline.cuts``), every path of a schedule is linear in the choice. An integer program picks the ranges and ways
whose longest known path is shortest, and a simulation of them adds its longest path. The search ends when no choice can
be shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pase.errors import Infeasible
from pase.pipeline.bounds import paths
from pase.pipeline.cuts import TOLERANCE, most_held
from pase.pipeline.simulate import Path, Simulated, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes

__all__ = [
    "RangeProblem",
    "RangeWay",
    "Ranges",
    "best_ranges",
    "least_divided",
    "least_partition",
    "partitions_below",
    "runs_of",
    "shortest",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeWay:
    """A way to run the units ``first`` … ``end - 1`` as a stage.

    runs: seconds of one micro-batch by kind of action, float64 [kinds]. before, after: seconds once per step before the
    first and after the last action of the rank. send: lower bounds on the seconds to send activations to the next stage
    and gradients back. held, kept, waiting: bytes, like ``StageBytes``. buffers: bytes of its largest op.
    """

    first: int
    end: int
    runs: np.ndarray
    before: float = 0.0
    after: float = 0.0
    send: tuple[float, float] = (0.0, 0.0)
    held: float = 0.0
    kept: float = 0.0
    waiting: float = 0.0
    buffers: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeProblem:
    """The problem of choosing a way for each stage.

    ways: the possible ways of each stage. exact: a choice (the index of each stage's way) -> its times. limits: bytes
    of memory, [ranks].
    """

    schedule: Schedule
    units: int
    ways: Sequence[Sequence[RangeWay]]
    exact: Callable[[Sequence[int]], StageTimes]
    limits: np.ndarray

    @cached_property
    def columns(self) -> list[tuple[int, int]]:
        """The columns of the integer program: (stage, index of its way)."""
        return [(k, i) for k, of in enumerate(self.ways) for i in range(len(of))]

    def row(self, path: Path) -> np.ndarray:
        """The seconds that each column adds to a path, float64 [columns]."""
        rank = self.schedule.rank_of
        out = np.zeros(len(self.columns))
        for c, (k, i) in enumerate(self.columns):
            way = self.ways[k][i]
            out[c] = path.runs[:, k] @ way.runs
            out[c] += way.before * (rank[k] == path.first) + way.after * (rank[k] == path.last)
            if k < self.schedule.stages - 1:
                out[c] += path.crossed[:, k] @ way.send
        return out

    @cached_property
    def memory_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of each column [rows, columns], bytes of memory [rows]).

        There is a row for each moment at which a rank may reach its peak, and for each of its stages, whose largest op
        may be running then.
        """
        s, rows, room = self.schedule, list[np.ndarray](), list[float]()
        stage = np.array([k for k, _ in self.columns])
        of = {
            name: np.array([getattr(self.ways[k][i], name) for k, i in self.columns])
            for name in ("held", "kept", "waiting", "buffers")
        }
        rank = np.array(s.rank_of)[stage]
        for r in map(int, np.flatnonzero(np.isfinite(self.limits))):
            for held in most_held(s, r):
                base = (rank == r) * of["held"] + held[0][stage] * of["kept"] + held[1][stage] * of["waiting"]
                for k in (k for k, at in enumerate(s.rank_of) if at == r):
                    rows.append(base + (stage == k) * of["buffers"])
                    room.append(float(self.limits[r]))
        return np.array(rows).reshape(len(rows), len(stage)), np.array(room)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """The result of ``best_ranges``.

    choice: the index of each stage's way, or None if no choice beats the given time. bound: a lower bound in seconds on
    the step for all choices, up to ``TOLERANCE``. simulations: the number of simulations that were run. cells: the
    total number of matrix entries of the integer programs.
    """

    choice: tuple[int, ...] | None
    simulated: Simulated | None
    bound: float
    simulations: int
    cells: int = 0


def best_ranges(
    problem: RangeProblem,
    below: float = np.inf,
    most: int = 200,
    gap: float = TOLERANCE,
    nodes: int | None = None,
) -> Ranges:
    """The choice with the shortest step. ``best_cuts`` describes the arguments. Raises Infeasible if no choice fits.

    The time that a way adds to a path is a lower bound, so a choice may take longer than its known paths. A simulated
    choice is therefore excluded from the program, whose bound is then that of all other choices.
    """
    s = problem.schedule
    if problem.units < s.stages:
        raise Infeasible(
            f"{problem.units} units are too few for {s.stages} stages", fix="choose fewer stages"
        )
    known, done = [problem.row(p) for p in paths(s)], dict[tuple[int, ...], Simulated]()
    bound, cells, top = 0.0, 0, below
    while len(done) < most:
        try:
            choice, least = shortest(
                s, problem.units, problem.ways, known, problem.memory_rows, gap / 2, nodes, apart=list(done)
            )
        except Infeasible:
            if not done:
                raise
            choice, least = None, np.inf  # every choice that fits was simulated
        cells += (len(known) + len(problem.memory_rows[1]) + problem.units) * len(problem.columns)
        bound = max(bound, least)
        if choice is None or bound >= top * (1 - gap):
            break
        done[choice] = simulate(s, problem.exact(choice))
        top = min(top, done[choice].step_s)
        known.append(problem.row(done[choice].path))
    best = min(done, key=lambda c: done[c].step_s, default=None)
    bound = bound if best is None else min(bound, done[best].step_s)
    if best is None or done[best].step_s >= below:
        return Ranges(choice=None, simulated=None, bound=bound, simulations=len(done), cells=cells)
    return Ranges(choice=best, simulated=done[best], bound=bound, simulations=len(done), cells=cells)


def shortest(
    schedule: Schedule,
    units: int,
    ways: Sequence[Sequence[RangeWay]],
    known: Sequence[np.ndarray],
    memory: tuple[np.ndarray, np.ndarray] | None = None,
    gap: float = TOLERANCE,
    nodes: int | None = None,
    apart: Sequence[tuple[int, ...]] = (),
) -> tuple[tuple[int, ...] | None, float]:
    """(the choice whose longest known path is shortest, a lower bound in seconds for all choices).

    The choice is None if the node limit was reached before any was found. known: for each path, the seconds that each
    way adds, stage by stage. apart: choices to exclude. Raises Infeasible if no choice fits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    columns, many = [(k, i) for k, of in enumerate(ways) for i in range(len(of))], schedule.stages
    rows = np.array(known)
    unit = float(rows.max(initial=0.0)) or 1.0
    joins = np.zeros((many * (units + 1), len(columns) + 1))
    for c, (k, i) in enumerate(columns):  # each stage begins where the one before ends
        joins[k * (units + 1) + ways[k][i].first, c] = 1.0
        if k + 1 < many:
            joins[(k + 1) * (units + 1) + ways[k][i].end, c] = -1.0
    begins = np.zeros(many * (units + 1))
    begins[0] = 1.0
    rules = [
        LinearConstraint(joins, begins, begins),
        LinearConstraint(np.hstack([rows / unit, -np.ones((len(known), 1))]), -np.inf, 0.0),
    ]
    if memory is not None and len(memory[1]):
        held = memory[0] / memory[1][:, None]
        rules.append(LinearConstraint(np.hstack([held, np.zeros((len(held), 1))]), -np.inf, 1.0))
    if apart:
        among = np.array([[float(choice[k] == i) for k, i in columns] + [0.0] for choice in apart])
        rules.append(LinearConstraint(among, -np.inf, many - 1.0))
    limits: Any = {"mip_rel_gap": gap if gap > TOLERANCE else 0.0}
    limits |= {} if nodes is None else {"node_limit": nodes}
    most = [float(k + 1 < many or ways[k][i].end == units) for k, i in columns]
    found = milp(
        np.append(np.zeros(len(columns)), 1.0),
        constraints=rules,
        bounds=Bounds(0.0, np.append(most, np.inf)),
        integrality=np.append(np.ones(len(columns)), 0.0),
        options=limits,
    )
    if found.status == 2:
        raise Infeasible(
            f"{units} units in {many} stages do not fit in memory in any division",
            where=f"schedule '{schedule.name}'",
            fix="use more devices or another schedule, or raise the memory limit",
        )
    least = 0.0 if found.mip_dual_bound is None else float(found.mip_dual_bound) * unit
    if found.x is None:
        return None, least
    picked = {k: i for (k, i), x in zip(columns, found.x, strict=False) if x > 0.5}
    return tuple(picked[k] for k in range(many)), least


def least_divided(work: np.ndarray, ranks: np.ndarray) -> float:
    """A lower bound on the seconds of the busiest rank, for any division of the units, up to ``TOLERANCE``.

    It is exact if each unit may be split into any parts, on any ranks. work: seconds of each unit on a rank of each
    kind, float64 [kinds, units]. ranks: the number of ranks of each kind, [kinds].

    >>> round(least_divided(np.array([[1, 10.0], [10, 1]]), np.array([1, 1])), 9)
    0.999999
    """
    from scipy.optimize import linprog

    kinds, units = work.shape
    unit = float(work.max()) or 1.0
    busy = np.zeros((kinds, kinds * units + 1))
    for k in range(kinds):
        busy[k, k * units : (k + 1) * units] = work[k] / unit
    busy[:, -1] = -ranks
    done = np.hstack([np.tile(np.eye(units), kinds), np.zeros((units, 1))])
    goal = np.append(np.zeros(kinds * units), 1.0)
    found = linprog(goal, A_ub=busy, b_ub=np.zeros(kinds), A_eq=done, b_eq=np.ones(units))
    return float(found.fun or 0.0) * unit * (1 - TOLERANCE)


def least_partition(work: np.ndarray, stages: int) -> list[tuple[int, int]]:
    """The division into ranges of units whose longest range is shortest.

    work: work[a, b] is the seconds of units a … b - 1, float64 [units + 1, units + 1].

    >>> least_partition(np.array([[0, 1, 4, 5.0], [0, 0, 3, 4], [0, 0, 0, 1], [0, 0, 0, 0]]), 2)
    [(0, 1), (1, 3)]
    """
    top = _reach(work, stages)
    out, end = list[tuple[int, int]](), len(work) - 1
    for k in range(stages, 0, -1):
        costs = [max(top[k - 1][a], work[a, end]) for a in range(end)]
        first = int(np.argmin(costs))
        out.append((first, end))
        end = first
    return out[::-1]


def _reach(work: np.ndarray, stages: int) -> list[np.ndarray]:
    """[k][b]: the seconds of the longest stage in the best division of units 0 … b - 1 into k stages."""
    n = len(work)
    top = [np.append(0.0, np.full(n - 1, np.inf))]
    for _ in range(stages):
        prior = top[-1]
        now = np.full(n, np.inf)
        for b in range(1, n):
            now[b] = np.maximum(prior[:b], work[:b, b]).min()
        top.append(now)
    return top


def partitions_below(work: np.ndarray, stages: int, below: float) -> list[list[tuple[int, int]]]:
    """For each stage, its ranges in the partitions whose stages all take less than ``below`` seconds.

    work: as in ``least_partition``.
    """
    n = len(work) - 1
    ahead = _reach(work, stages)
    behind = [x[::-1] for x in _reach(work[::-1, ::-1].T, stages)]
    return [
        [
            (a, b)
            for a in range(n)
            for b in range(a + 1, n + 1)
            if max(ahead[k][a], work[a, b], behind[stages - k - 1][b]) < below
        ]
        for k in range(stages)
    ]


def runs_of(*, forward: float, input: float, weight: float, recompute: float) -> np.ndarray:
    """Seconds by kind of action, float64 [kinds]."""
    out = np.zeros(len(Kind))
    out[Kind.FORWARD], out[Kind.WEIGHT] = forward, weight
    out[Kind.INPUT] = recompute + input
    out[Kind.BACKWARD] = recompute + input + weight
    return out
