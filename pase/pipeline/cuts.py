"""Finds the best number of equal blocks for each pipeline stage, with a proof.

A step takes as long as its longest path. Every path is linear in the stages' times, and so in their numbers of blocks.
The longest path of each simulation is therefore a lower bound for all other cuts. The search asks an integer program
for the numbers of blocks whose longest known path is shortest, simulates these cuts, and adds their longest path. It
ends when no cuts can beat the best simulated ones. (A cutting-plane method: Kelley 1960; Benders 1962.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.pipeline.bounds import paths
from pase.pipeline.overlap import HoistedCollectives, Lines
from pase.pipeline.potentials import step_rows
from pase.pipeline.simulate import Path, Simulated, in_flight, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from scipy.optimize import OptimizeResult
    from scipy.sparse import csr_array

__all__ = ["CutProblem", "Cuts", "StageBytes", "best_cuts", "moments", "most_held"]

TOLERANCE = 1e-6
"""The relative tolerance of the integer program's answers (HiGHS). Proofs hold up to it."""


_ROUNDING = 1e-9
"""The relative rounding error of the difference of two sums of seconds."""

_MOST_STAGES = 20
"""The most stages for which the integer program is solved. With more it takes too long."""

_MOST_ACTIONS = 5000
"""The most actions for which the linear program has all paths. With more it takes too long, so it has only some."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBytes:
    """Bytes of each stage, float64 [stages].

    held: bytes that are held for the whole step. kept: residuals of one micro-batch until its backward. for_weights:
    the part of ``kept`` that stays until the weight gradients are computed.
    """

    held: np.ndarray
    kept: np.ndarray
    for_weights: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class CutProblem:
    """The problem of dividing equal blocks among the stages, at least ``least`` to each.

    fixed: the times of stages without blocks. each: the times that one block adds, for each stage under its own
    strategy; here, before and after are per stage, float64 [stages]. hoisted: once-per-step collectives that overlap
    with compute, in addition to these times. bytes_fixed, bytes_each: the same for bytes. limit: bytes of memory, one
    number for all ranks or float64 [ranks].
    """

    schedule: Schedule
    blocks: int
    fixed: StageTimes
    each: StageTimes
    bytes_fixed: StageBytes | None = None
    bytes_each: StageBytes | None = None
    limit: float | np.ndarray = np.inf
    least: int = 1
    hoisted: HoistedCollectives | None = None

    @cached_property
    def limits(self) -> np.ndarray:
        """Bytes of memory of each rank, float64 [ranks]."""
        return np.broadcast_to(np.asarray(self.limit, float), (self.schedule.ranks,))

    def times(self, counts: np.ndarray) -> StageTimes:
        """The times of stages with these numbers of blocks. counts: int [stages]."""
        f, e = self.fixed, self.each
        return StageTimes(
            forward=f.forward + counts * e.forward,
            input=f.input + counts * e.input,
            weight=f.weight + counts * e.weight,
            recompute=f.recompute + counts * e.recompute,
            send=f.send,
            before=f.before + self.on_rank @ (counts * e.before) + _values(self.exposed[0], counts),
            after=f.after + self.on_rank @ (counts * e.after) + _values(self.exposed[1], counts),
        )

    @cached_property
    def exposed(self) -> tuple[tuple[Lines, ...], tuple[Lines, ...]]:
        """The exposed seconds of each rank's hoisted all-gathers, and of its gradient reductions.

        Both are empty if no collectives are hoisted.
        """
        s, hoisted = self.schedule, self.hoisted
        if hoisted is None:
            return (), ()
        gathers, sums = ([hoisted.exposed(s, r, back=b) for r in range(s.ranks)] for b in (False, True))
        return tuple(gathers), tuple(sums)

    def hidden(self, counts: np.ndarray) -> np.ndarray:
        """Seconds of each rank's collectives that overlap with compute, minus their slowdown of it, float64 [ranks]."""
        if self.hoisted is None:
            return np.zeros(self.schedule.ranks)
        whole = np.zeros(self.schedule.ranks)
        for sent in (self.hoisted.gathers, self.hoisted.sums):
            whole += self.on_rank @ (sent[:-2].sum(axis=0) + counts * sent[-2] + sent[-1])
        hidden = whole - _values(self.exposed[0], counts) - _values(self.exposed[1], counts)
        return np.where(hidden > _ROUNDING * whole, hidden, 0.0)

    @cached_property
    def on_rank(self) -> np.ndarray:
        """1 if a rank has a stage, otherwise 0, float64 [ranks, stages]."""
        rank = np.array(self.schedule.rank_of)
        out: np.ndarray = (np.arange(self.schedule.ranks)[:, None] == rank).astype(float)
        return out

    def along(self, path: Path, counts: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """The length of a path: (seconds without blocks, seconds per additional block of each stage [stages]).

        counts: the numbers of blocks for which the length is exact, by default equal ones. For all others it is a lower
        bound.
        """
        base, slope = path.seconds(self.fixed), (path.runs * self.each.by_kind).sum(axis=0)
        slope = (
            slope + self.on_rank[path.first] * self.each.before + self.on_rank[path.last] * self.each.after
        )
        if self.hoisted is not None:
            at = (
                np.full(self.schedule.stages, self.blocks / self.schedule.stages)
                if counts is None
                else counts
            )
            for lines in (self.exposed[0][path.first], self.exposed[1][path.last]):
                k = lines.at(at)[1]
                base, slope = base + float(lines.base[k]), slope + lines.slope[k]
        return base, slope

    @cached_property
    def memory_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(bytes per additional block of each stage [rows, stages], bytes available for blocks [rows]).

        There is a row for each moment at which a rank may reach its peak.
        """
        s, f, e = self.schedule, self.bytes_fixed, self.bytes_each
        if f is None or e is None or np.isinf(self.limits).all():
            return np.zeros((0, s.stages)), np.zeros(0)
        of, held = moments(s)
        some = np.isfinite(self.limits[of])
        of, held = of[some], held[some]
        mine, kept, waiting = self.on_rank[of], held[:, 0], held[:, 1]
        used = mine @ f.held + kept @ f.kept + waiting @ f.for_weights
        return mine * e.held + kept * e.kept + waiting * e.for_weights, self.limits[of] - used


def _values(lines: tuple[Lines, ...], counts: np.ndarray) -> np.ndarray:
    return np.array([x.at(counts)[0] for x in lines]) if lines else np.zeros(1)


@lru_cache(maxsize=1024)
def most_held(schedule: Schedule, rank: int) -> np.ndarray:
    """The moments of ``in_flight`` that no other moment dominates; float64 [moments, 2, stages]."""
    held = in_flight(schedule, rank)
    flat = np.unique(held.reshape(len(held), -1), axis=0)[::-1]
    kept: list[np.ndarray] = []
    for row in flat:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.array(kept).reshape(len(kept), *held.shape[1:])


@lru_cache(maxsize=256)
def moments(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """The moments at which a rank may hold the most bytes: (rank [moments], what it holds [moments, 2, stages]).

    ``in_flight`` describes what a rank holds.
    """
    of = [most_held(schedule, r) for r in range(schedule.ranks)]
    return np.repeat(np.arange(schedule.ranks), [len(x) for x in of]), np.concatenate(of)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts:
    """The result of ``best_cuts``.

    counts: the number of blocks of each stage, or None if no cuts beat the given time. bound: a lower bound in seconds
    on the step for any counts, up to ``TOLERANCE``. simulations: the number of simulations that were run.
    """

    counts: tuple[int, ...] | None
    simulated: Simulated | None
    bound: float
    simulations: int
    cells: int = 0
    """The total number of matrix entries of the integer programs that were solved."""

    @property
    def optimal(self) -> bool:
        return self.simulated is not None and self.bound >= self.simulated.step_s * (1 - TOLERANCE)


def best_cuts(
    problem: CutProblem,
    below: float = np.inf,
    most: int = 200,
    gap: float = TOLERANCE,
    nodes: int | None = None,
    start: np.ndarray | None = None,
) -> Cuts:
    """The numbers of blocks that give the shortest step.

    below: seconds of a known step; only shorter steps are searched for. The search stops after ``most`` simulations, at
    a relative ``gap``, or when one integer program has visited ``nodes`` of its tree. It then returns the best cuts so
    far, with a valid bound. The result does not depend on how busy the machine is. start: numbers of blocks that fit in
    memory, an additional starting point of the search for many stages. Raises Infeasible if no numbers fit.
    """
    s = problem.schedule
    if problem.blocks < problem.least * s.stages:
        raise Infeasible(
            f"{problem.blocks} blocks are too few for {s.stages} stages of at least {problem.least}",
            fix="choose fewer stages",
        )
    known = [problem.along(p) for p in paths(s)]
    if s.stages > _MOST_STAGES:
        return _of_many(problem, known, below, 4 * most, start)
    best: tuple[np.ndarray, Simulated] | None = None
    bound, tried, cells = _parts(problem, known)[1], 0, 0
    while bound < below * (1 - TOLERANCE) and tried < most:
        counts, least = _master(problem, known, gap / 2, nodes)
        cells += (len(known) + len(problem.memory_rows[1])) * s.stages
        bound = max(bound, least)
        top = below if best is None else min(below, best[1].step_s)
        if counts is None or bound >= top * (1 - gap):
            break
        done = simulate(s, problem.times(counts))
        tried += 1
        if best is None or done.step_s < best[1].step_s:
            best = counts, done
        known.append(problem.along(done.path, counts))
        value, slope = known[-1]
        if s.lockstep or value + slope @ counts < done.step_s * (1 - TOLERANCE):
            break  # idle slots take time that no path includes, so such cuts are simulated but not proven
    if best is None or best[1].step_s >= below:
        return Cuts(counts=None, simulated=None, bound=bound, simulations=tried, cells=cells)
    bound = min(bound, best[1].step_s)
    whole = tuple(map(int, best[0]))
    return Cuts(counts=whole, simulated=best[1], bound=bound, simulations=tried, cells=cells)


def _of_many(
    problem: CutProblem,
    known: list[tuple[float, np.ndarray]],
    below: float,
    most: int,
    start: np.ndarray | None,
) -> Cuts:
    """Like ``best_cuts``, for many stages.

    The bound is that of fractional numbers of blocks, which are then rounded. A local search moves one block at a time
    to another stage if that makes the step shorter, for up to ``most`` simulations. It first tries the stages whose
    numbers differ most from the fractional ones.
    """
    s = problem.schedule
    (parts, bound), cells = _parts(problem, known), len(known) * s.stages
    if bound < below * (1 - TOLERANCE) and not s.lockstep and sum(map(len, s.orders)) <= _MOST_ACTIONS:
        parts, bound, cells = _timed_parts(problem)
    starts = [_rounded(problem, x) for x in (parts, np.full(s.stages, problem.blocks / s.stages))]
    done = dict[bytes, tuple[np.ndarray, Simulated]]()

    def step_s(counts: np.ndarray) -> float:
        key = counts.tobytes()
        if key not in done:
            done[key] = counts, simulate(s, problem.times(counts))
        return done[key][1].step_s

    tried = [x for x in (start, *starts) if x is not None] if bound < below * (1 - TOLERANCE) else []
    now = min(tried, key=step_s, default=None)
    while now is not None and len(done) < most:
        least, near = step_s(now), _moves(problem, now, parts, done)
        now = next((x for x in near if len(done) < most and step_s(x) < least), None)
    best = min(done.values(), key=lambda x: x[1].step_s, default=None)
    if best is None or best[1].step_s >= below:
        return Cuts(counts=None, simulated=None, bound=bound, simulations=len(done), cells=cells)
    return Cuts(
        counts=tuple(map(int, best[0])),
        simulated=best[1],
        bound=min(bound, best[1].step_s),
        simulations=len(done),
        cells=cells,
    )


def _moves(
    problem: CutProblem, counts: np.ndarray, parts: np.ndarray, seen: Container[bytes]
) -> Iterator[np.ndarray]:
    """The given numbers with one block moved to another stage, if they fit in memory and are not in ``seen``."""
    (rows, room), far, n = problem.memory_rows, counts - parts, counts.size
    for k, to in zip(*np.unravel_index(np.argsort(far[None] - far[:, None], axis=None), (n, n)), strict=True):
        if k != to and counts[k] > problem.least:
            x = counts.copy()
            x[k], x[to] = x[k] - 1, x[to] + 1
            if x.tobytes() not in seen and (not len(rows) or (rows @ x <= room * (1 + 1e-9)).all()):
                yield x


def _timed_parts(problem: CutProblem) -> tuple[np.ndarray, float, int]:
    """(the fractional numbers of blocks with the shortest step, its seconds, matrix entries of the program).

    The seconds are a lower bound for all numbers of blocks.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, hstack, vstack

    s, steps = problem.schedule, step_rows(problem.schedule)
    many, ends, kinds = s.stages, 2 * s.ranks, len(Kind) * s.stages
    width = many + steps.columns
    unit = float(problem.times(np.full(many, problem.blocks / many)).full.max()) * s.micro_batches or 1.0
    blocks = np.tile(np.eye(many), (len(Kind), 1)) * problem.each.by_kind.reshape(-1, 1)
    taken = np.hstack([blocks / unit, -np.eye(kinds)])
    fixed, each = ((t.before, t.after) for t in (problem.fixed, problem.each))
    lines, tops = list[np.ndarray](), list[float]()
    for which, r in np.ndindex(2, s.ranks):
        slope, base = problem.on_rank[r] * each[which], float(fixed[which][r])
        of = (
            problem.exposed[which][r]
            if problem.hoisted is not None
            else Lines(base=np.zeros(1), slope=np.zeros((1, many)))
        )
        for b, x in zip(of.base, of.slope, strict=True):
            lines.append(np.concatenate([(slope + x) / unit, -np.eye(ends)[which * s.ranks + r]]))
            tops.append(-base - float(b))
    held, room = problem.memory_rows
    scale = np.maximum(np.abs(held).max(axis=1, initial=0.0), 1.0)
    at_ends = np.array(lines)
    rows = vstack(
        [
            hstack([csr_array((steps.rows.shape[0], many)), steps.rows]),
            _wide(taken, width),
            _wide(np.hstack([at_ends[:, :many], np.zeros((len(lines), kinds)), at_ends[:, many:]]), width),
            *([_wide(held / scale[:, None], width)] if len(held) else []),
        ],
        format="csr",
    )
    found = linprog(
        (np.arange(width) == many + kinds + ends).astype(float),
        A_ub=rows,
        b_ub=np.concatenate(
            [
                np.concatenate([steps.tops(problem.fixed.send), -problem.fixed.by_kind.ravel(), tops]) / unit,
                room / scale,
            ]
        ),
        A_eq=(np.arange(width) < many).astype(float)[None],
        b_eq=[float(problem.blocks)],
        bounds=[(float(problem.least), float(problem.blocks))] * many + [(0.0, np.inf)] * (width - many),
        method="highs-ipm",
    )
    if found.status == 2:
        raise _unfit(problem)
    if found.x is None or found.fun is None:
        raise PaseError(
            f"the linear program of a pipeline's cuts was not solved ({found.message})",
            where=f"schedule '{s.name}'",
            fix="choose fewer stages or another schedule, and please report it",
        )
    return found.x[:many], float(found.fun) * unit, rows.nnz


def _wide(rows: np.ndarray, width: int) -> csr_array:
    """The rows, padded with zeros to the given width."""
    from scipy.sparse import csr_array, hstack

    return hstack([csr_array(rows), csr_array((len(rows), width - rows.shape[1]))])


def _parts(problem: CutProblem, known: list[tuple[float, np.ndarray]]) -> tuple[np.ndarray, float]:
    """(the fractional numbers of blocks whose longest known path is shortest, a lower bound in seconds for all)."""
    found, unit = _program(problem, known, 0.0, {})
    return found.x[:-1], float(found.fun) * unit


def _master(
    problem: CutProblem, known: list[tuple[float, np.ndarray]], gap: float, nodes: int | None
) -> tuple[np.ndarray | None, float]:
    """(the numbers of blocks whose longest known path is shortest, a lower bound in seconds for all numbers).

    The numbers are None if the node limit was reached before any were found.
    """
    limits = {"mip_rel_gap": gap if gap > TOLERANCE else 0.0} | (
        {} if nodes is None else {"node_limit": nodes}
    )
    found, unit = _program(problem, known, 1.0, limits)
    counts = None if found.x is None else np.rint(found.x[:-1]).astype(np.int64)
    return counts, 0.0 if found.mip_dual_bound is None else float(found.mip_dual_bound) * unit


def _rounded(problem: CutProblem, parts: np.ndarray) -> np.ndarray | None:
    """Integer numbers of blocks near the fractional ones that fit in memory, or None if the last blocks do not fit."""
    rows, room = problem.memory_rows
    counts = np.maximum(np.floor(parts + 1e-6), problem.least).astype(np.int64)
    while counts.sum() > problem.blocks:
        over = np.where(counts > problem.least, counts - parts, -np.inf)
        counts[int(over.argmax())] -= 1
    while counts.sum() < problem.blocks:
        for k in np.argsort(counts - parts, kind="stable"):
            more = counts + (np.arange(counts.size) == k)
            if not len(rows) or (rows @ more <= room * (1 + 1e-9)).all():
                counts = more
                break
        else:
            return None
    return counts


def _program(
    problem: CutProblem, known: list[tuple[float, np.ndarray]], whole: float, limits: Any
) -> tuple[OptimizeResult, float]:
    """(the solution of the program, the seconds of one unit of its objective).

    The unknowns are the numbers of blocks and the step. whole: 1 if the numbers must be integers, 0 if they may be
    fractional. limits: options of the solver. Raises Infeasible if no numbers fit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    s = problem.schedule
    base, slope = np.array([k[0] for k in known]), np.stack([k[1] for k in known])
    unit = float(base.max() + slope.max(axis=1).max() * problem.blocks) or 1.0
    rows, room = problem.memory_rows
    scale = np.maximum(np.abs(rows).max(axis=1, initial=0.0), 1.0)
    rules = [
        LinearConstraint(np.hstack([np.ones((1, s.stages)), [[0.0]]]), problem.blocks, problem.blocks),
        LinearConstraint(np.hstack([slope / unit, -np.ones((len(known), 1))]), -np.inf, -base / unit),
    ]
    if len(rows):
        rules.append(
            LinearConstraint(
                np.hstack([rows / scale[:, None], np.zeros((len(rows), 1))]), -np.inf, room / scale
            )
        )
    low, high = np.full(s.stages + 1, float(problem.least)), np.full(s.stages + 1, float(problem.blocks))
    low[-1], high[-1] = 0.0, np.inf
    found = milp(
        np.append(np.zeros(s.stages), 1.0),
        constraints=rules,
        bounds=Bounds(low, high),
        integrality=np.append(np.full(s.stages, whole), 0.0),
        options=limits,
    )
    if found.status == 2:
        raise _unfit(problem)
    return found, unit


def _unfit(problem: CutProblem) -> Infeasible:
    s = problem.schedule
    return Infeasible(
        f"{problem.blocks} blocks in {s.stages} stages do not fit in {problem.limits.max() / 2**30:.4g} GiB per device "
        "in any division",
        where=f"schedule '{s.name}'",
        fix="use more devices or another schedule, or raise the memory limit",
    )
