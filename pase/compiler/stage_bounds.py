"""What no pipeline of some ranks, micro-batches and mesh can beat, under a schedule and within each rank's memory.

A stage's seconds and bytes are a vector of features (``stage_features``). Under every split, a weighted sum of them is
at least what a search over the tables with these weights finds: a half-space per direction, for each number of
blocks. A linear program over the stages' vectors and numbers of blocks then bounds the step: each path of the schedule
is a row, and so is each moment at which a rank may hold most. The program's dual prices are the directions in which
its answer is too good to be true; they are searched next. (Kelley 1960; the Lagrangian dual of the choice of splits.)

The bound counts in parts of blocks, mixes splits within a stage, and leaves out what lives for one op only. It holds
for every cut, and every split and way to recompute of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.compiler.stage_features import Feature, direction
from pase.compiler.stage_menu import StageRole, StageTables
from pase.errors import Infeasible
from pase.pipeline.cuts import CutProblem, longest_paths, most_held
from pase.pipeline.simulate import Path, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes

__all__ = ["StageBounds"]

_ROUNDS = 12
_ENOUGH, _STILL = 1e-3, 3
"""The bound of a schedule is final once so many rounds in turn raise it by less than this part."""
_DIRECTIONS, _NEAR = 4, 5e-3
"""How many directions are searched for each role in a round, and how different they are."""
_PRICES = (0.2, 1.0)
_FIRST = (
    direction(forward=1, input=1, weight=1),
    direction(forward=1),
    direction(input=1),
    direction(weight=1),
    direction(before=1),
    direction(after=1),
    direction(input=1, weight=1),
)
"""Directions to begin with, besides that of the whole step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _HalfSpace:
    """weights @ features >= base + slope * blocks, for every split of a stage."""

    weights: np.ndarray
    base: float
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Answer:
    """step_s: the program's. stages: its features of each stage; directions: what they are worth to it; both float64
    [stages, features].
    """

    step_s: float
    stages: np.ndarray
    directions: np.ndarray


@dataclass(kw_only=True, eq=False)
class StageBounds:
    """Bounds for the pipelines of ``ranks``, which have the ways to run of ``tables``.

    limit: bytes on a device, infinite if there is none. send_s: seconds that at least one transfer takes.
    """

    tables: Sequence[StageTables]
    ranks: int
    limit: float
    send_s: float = 0.0
    known: dict[StageRole, list[_HalfSpace]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bytes_unit = 1.0 if np.isinf(self.limit) else self.limit
        self.unit = np.where(np.arange(len(Feature)) < Feature.STATIC, 1.0, bytes_unit)

    @property
    def blocks(self) -> int:
        return self.tables[0].places.blocks

    def least_s(self, problem: CutProblem, below: float = np.inf, rounds: int = _ROUNDS) -> float:
        """Seconds that no pipeline under the problem's schedule beats; infinite if none fits. Ends at ``below``.

        problem: of some splits of the stages; its paths are where the program begins.
        """
        s = problem.schedule
        roles = [StageRole(first=k == 0, last=k == s.stages - 1) for k in range(s.stages)]
        for role in dict.fromkeys(roles):
            if role not in self.known:
                self.known[role] = []
                for weights in (self.tables[0].step, *_FIRST, *self._bytes()):
                    self._search(role, weights)
        chains = longest_paths(replace(problem, bytes_fixed=None))
        best, still = 0.0, 0
        for _ in range(rounds):
            try:
                found = self._program(s, roles, chains)
            except Infeasible:
                return np.inf
            still = still + 1 if found.step_s < best * (1 + _ENOUGH) else 0
            best = max(best, found.step_s)
            if best >= below or still >= _STILL:
                break
            chains.append(simulate(s, self._times(s, found.stages)).path)
            for role, weights in self._asked(roles, found.directions):
                self._search(role, weights)
        return best

    def _bytes(self) -> Iterator[np.ndarray]:
        """Directions to begin with under a limit: bytes alone, and the step at some prices of a rank's memory."""
        if np.isinf(self.limit):
            return
        step = self.tables[0].step
        each = self.tables[0].least(StageRole(), self.blocks, step) / self.ranks / self.limit
        yield from (direction(static=1), direction(kept=1), direction(waiting=1))
        for flying in (self.ranks / 2, self.ranks):
            held = direction(static=1, kept=flying)
            yield held
            yield from (step + price * each * held for price in _PRICES)

    def _asked(
        self, roles: Sequence[StageRole], directions: np.ndarray
    ) -> Iterator[tuple[StageRole, np.ndarray]]:
        """Directions to search next: those that differ most from each other and from those that were searched."""
        unit = directions * self.unit
        size = np.abs(unit).max(axis=1)
        for role in dict.fromkeys(roles):
            mine = [k for k, r in enumerate(roles) if r == role and size[k] > 0]
            had = [h.weights * self.unit for h in self.known[role]]
            far = {k: min(np.abs(unit[k] / size[k] - h / np.abs(h).max()).max() for h in had) for k in mine}
            for _ in range(_DIRECTIONS):
                k = max(far, key=far.__getitem__, default=None)
                if k is None or far[k] < _NEAR:
                    break
                yield role, directions[k]
                far = {
                    i: min(d, float(np.abs(unit[i] / size[i] - unit[k] / size[k]).max()))
                    for i, d in far.items()
                }

    def _times(self, s: Schedule, stages: np.ndarray) -> StageTimes:
        rank = np.array(s.rank_of)
        return StageTimes.of(
            *stages[:, : Feature.BEFORE].T,
            ranks=s.ranks,
            send=self.send_s,
            before=np.bincount(rank, stages[:, Feature.BEFORE], s.ranks),
            after=np.bincount(rank, stages[:, Feature.AFTER], s.ranks),
        )

    def _search(self, role: StageRole, weights: np.ndarray) -> None:
        """Add the half-space of a direction."""
        size = np.abs(weights * self.unit).max()
        if size == 0.0:
            return
        weights = weights / size

        def least(blocks: float) -> float:
            return min(t.least(role, blocks, weights) for t in self.tables)

        if role == StageRole():  # without ends all grows with the blocks
            made = _HalfSpace(weights=weights, base=0.0, slope=least(self.blocks) / self.blocks)
        else:  # the least over splits is concave in the blocks: no less than its chord
            low, high = 1, max(self.blocks - self.ranks + 1, 2)
            at_low, at_high = least(low), least(high)
            slope = (at_high - at_low) / (high - low)
            made = _HalfSpace(weights=weights, base=at_low - slope * low, slope=slope)
        self.known[role].append(made)

    def _program(self, s: Schedule, roles: Sequence[StageRole], known: Sequence[Path]) -> _Answer:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        many, features = s.stages, len(Feature)
        width = many * (1 + features) + 1  # blocks of each stage, its features, the step
        scale = self._scale()
        rows, tops = [], []

        def row(of_blocks: np.ndarray | float, of_features: np.ndarray, of_step: float, top: float) -> None:
            out = np.zeros(width)
            out[:many] = of_blocks
            out[many:-1] = (of_features * scale).ravel()
            out[-1] = of_step
            rows.append(out)
            tops.append(top)

        moments = list(self._moments(s))
        chains = [_along(s, p) for p in known]
        for coefficients, crossed in chains:
            row(0.0, coefficients / scale[0], -1.0, -crossed * self.send_s / scale[0])
        for moment in moments:
            row(0.0, moment / self.limit, 0.0, 1.0)
        for k, role in enumerate(roles):
            for h in self.known[role]:
                of = np.zeros((many, features))
                of[k] = -h.weights
                size = float(np.abs(h.weights * scale).max())
                blocks = np.zeros(many)
                blocks[k] = h.slope / size
                row(blocks, of / size, 0.0, -h.base / size)
        found = linprog(
            np.append(np.zeros(width - 1), 1.0),
            A_ub=csr_array(np.array(rows)),
            b_ub=np.array(tops),
            A_eq=csr_array(np.append(np.ones(many), np.zeros(width - many))[None]),
            b_eq=[float(self.blocks)],
            bounds=[(1.0, float(self.blocks))] * many + [(0.0, None)] * (width - many),
            method="highs",
        )
        if found.status == 2:
            raise Infeasible(f"no blocks fit under schedule '{s.name}'")
        if found.status != 0:
            nothing = np.zeros((many, features))
            return _Answer(step_s=0.0, stages=nothing, directions=nothing)
        prices = -found.ineqlin.marginals
        directions = sum(
            (p * c for p, (c, _) in zip(prices, chains, strict=False) if p > 0), np.zeros((many, features))
        )
        for p, moment in zip(prices[len(chains) :], moments, strict=False):
            if p > 0:  # in seconds per byte
                directions = directions + p * scale[0] * moment / self.limit
        stages = found.x[many:-1].reshape(many, features) * scale
        return _Answer(step_s=float(found.fun) * scale[0], stages=stages, directions=directions)

    def _scale(self) -> np.ndarray:
        """Of the features, in the program: a rank's step, the limit."""
        role = next(iter(self.known))
        first = self.known[role][0]
        unit = abs(first.base) + first.slope * self.blocks / self.ranks
        unit /= float(np.abs(first.weights).max())
        return np.where(np.arange(len(Feature)) < Feature.STATIC, max(unit, 1e-12), self.unit)

    def _moments(self, s: Schedule) -> Iterator[np.ndarray]:
        """What each stage's features weigh in a rank's bytes at each moment at which it may hold most, float64
        [stages, features]."""
        if np.isinf(self.limit):
            return
        rank = np.array(s.rank_of)
        for r in range(s.ranks):
            for held in most_held(s, r):
                out = np.zeros((s.stages, len(Feature)))
                out[:, Feature.STATIC] = rank == r
                out[:, Feature.KEPT], out[:, Feature.WAITING] = held
                yield out


def _along(s: Schedule, p: Path) -> tuple[np.ndarray, float]:
    """A path as the weights of each stage's features, float64 [stages, features], and its transfers."""
    rank = np.array(s.rank_of)
    out = np.zeros((s.stages, len(Feature)))
    whole = p.runs[Kind.BACKWARD]
    out[:, Feature.FORWARD] = p.runs[Kind.FORWARD]
    out[:, Feature.INPUT] = p.runs[Kind.INPUT] + whole
    out[:, Feature.WEIGHT] = p.runs[Kind.WEIGHT] + whole
    out[:, Feature.BEFORE] = rank == p.first
    out[:, Feature.AFTER] = rank == p.last
    return out, float(p.crossed.sum())
