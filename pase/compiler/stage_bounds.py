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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.compiler.stage_features import Feature, direction, running
from pase.compiler.stage_menu import StageRole, StageSplit, StageTables
from pase.errors import Infeasible, PaseError
from pase.pipeline.beside import starts
from pase.pipeline.cuts import CutProblem, longest_paths, most_held
from pase.pipeline.simulate import Path, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes

__all__ = ["StageBounds"]

_ROUNDS = 12
_ENOUGH, _STILL = 1e-3, 3
"""The bound of a schedule is final once this many consecutive rounds raise it by less than this part."""
_DIRECTIONS, _NEAR = 4, 5e-3
"""How many directions are searched for each role in a round, and how different they are."""
_PRICES = (0.2, 1.0)
_FIRST = (
    running(forward=1, input=1, weight=1),
    running(forward=1),
    running(input=1),
    running(weight=1),
    direction(before=1),
    direction(sums=1),
    direction(after=1),
    running(input=1, weight=1),
)
"""Directions to begin with, besides that of the whole step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _HalfSpace:
    """weights @ features >= base + slope * blocks, for every split of a stage. touched: splits that come nearest: a
    stage's tables and the choice of configs in them."""

    weights: np.ndarray
    base: float
    slope: float
    touched: tuple[tuple[StageTables, np.ndarray], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Relaxation:
    """step_s: the program's. stages: its features of each stage; directions: what they are worth to it; both float64
    [stages, features].
    """

    step_s: float
    stages: np.ndarray
    directions: np.ndarray
    used: frozenset[int]
    """``id`` of the half-spaces that it rests on."""


@dataclass(kw_only=True, eq=False)
class StageBounds:
    """Bounds for the pipelines of ``ranks``, which have the ways to run of ``tables``.

    limit: bytes on a device of every rank, or of each one; infinite if there is none. send_s: seconds that at least
    one transfer takes. sites: of each rank; empty: all are equal.
    """

    tables: Sequence[StageTables]
    ranks: int
    limit: float | np.ndarray
    send_s: float = 0.0
    sites: tuple[int, ...] = ()
    known: dict[StageRole, list[_HalfSpace]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = self.sites or (0,) * self.ranks
        self.limits = np.broadcast_to(np.asarray(self.limit, float), (self.ranks,))
        finite = self.limits[np.isfinite(self.limits)]
        bytes_unit = float(finite.max(initial=0.0)) or 1.0
        self.unit = np.where(np.arange(len(Feature)) < Feature.STATIC, 1.0, bytes_unit)

    @property
    def blocks(self) -> int:
        return self.tables[0].places.blocks

    def least_s(self, problem: CutProblem, below: float = np.inf, rounds: int = _ROUNDS) -> float:
        """Seconds that no pipeline under the problem's schedule beats; infinite if none fits. Ends at ``below``.

        problem: of some splits of the stages; its paths are where the program begins.
        """
        s = problem.schedule
        roles = [
            StageRole(first=k == 0, last=k == s.stages - 1, site=self.sites[r])
            for k, r in enumerate(s.rank_of)
        ]
        for role in dict.fromkeys(roles):
            if role not in self.known:
                self.known[role] = []
                for weights in (self._at(role.site)[0].step, *_FIRST, *self._bytes(role.site)):
                    self._search(role, weights)
        chains = longest_paths(replace(problem, bytes_fixed=None))
        best, still, active = 0.0, 0, {role: list(self.known[role]) for role in roles}
        for _ in range(rounds):
            try:
                found = self._program(s, roles, chains, active)
            except Infeasible:
                return np.inf
            still = still + 1 if found.step_s < best * (1 + _ENOUGH) else 0
            best = max(best, found.step_s)
            if best >= below or still >= _STILL:
                break
            chains.append(simulate(s, self._times(s, found.stages)).path)
            active = {role: [h for h in hs if id(h) in found.used] for role, hs in active.items()}
            for role, weights in self._asked(roles, found.directions):
                active[role].append(self._search(role, weights))
        return float(best)

    def ways(self, role: StageRole) -> list[StageSplit]:
        """The splits that come nearest to the half-spaces that were searched, each once."""
        found = (t.split_by(role, choice) for h in self.known[role] for t, choice in h.touched)
        return list({id(w): w for w in found}.values())

    def _at(self, site: int) -> list[StageTables]:
        return [t for t in self.tables if t.site == site]

    def _bytes(self, site: int) -> Iterator[np.ndarray]:
        """Directions to begin with under a limit: bytes alone, and the step at some prices of a rank's memory."""
        limit = float(self.limits[self.sites.index(site)])
        if np.isinf(limit):
            return
        first = self._at(site)[0]
        step = first.step
        each = first.least(StageRole(site=site), self.blocks, step) / self.ranks / limit
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
        exposed = np.zeros((2, s.ranks))
        for back, r, weights in self._exposed(s):
            exposed[back, r] = max(exposed[back, r], float((weights * stages).sum()))
        return StageTimes.of(
            *(stages[:, : Feature.FORWARD_SENT] + stages[:, Feature.FORWARD_SENT : Feature.BEFORE]).T,
            ranks=s.ranks,
            send=self.send_s,
            before=exposed[0],
            after=exposed[1] + np.bincount(np.array(s.rank_of), stages[:, Feature.AFTER], s.ranks),
        )

    def _exposed(self, s: Schedule) -> Iterator[tuple[int, int, np.ndarray]]:
        """What a rank's gathers (0) or sums (1) add to a path that begins (ends) there is at least each of: (which, the
        rank, weights of each stage's features [stages, features]).

        The first and the last of ``pase.pipeline.beside``'s lines, without the one block that has nothing beside it.
        """
        for back, moved in enumerate((Feature.BEFORE, Feature.SUMS)):
            for r in range(s.ranks):
                every = starts(s, r, back=bool(back))
                slow = self._at(self.sites[r])[0].slow
                out = np.zeros((s.stages, len(Feature)))
                out[[x.stage for x in every], moved] = slow
                yield back, r, out
                for x in every if slow < 1 else ():
                    out = out.copy()  # what was sent before stays sent
                    out[x.stage, moved] = 1.0
                    hidden = x.ahead.copy()
                    hidden[x.kind, x.stage] += 1
                    yield back, r, out - _worked(hidden)

    def _search(self, role: StageRole, weights: np.ndarray) -> _HalfSpace:
        """The half-space of a direction, which is then known."""
        weights = weights / np.abs(weights * self.unit).max()
        free = not weights[Feature.STATIC :].any()
        rises = min(weights[Feature.FORWARD_SENT], weights[Feature.AFTER]) < weights[Feature.BEFORE]
        rises |= weights[Feature.WEIGHT_SENT] < weights[Feature.SUMS]
        rises |= bool((weights < 0).any())
        # In seconds alone the first tables are the least, unless gathers and sums weigh less where they run each time,
        # or more compute hides more.
        tables = self._at(role.site)[: 1 if free and not rises else None]

        touched = list[tuple[StageTables, np.ndarray]]()

        def least(blocks: float) -> float:
            found = [t.solved(role, blocks, weights) for t in tables]
            best = min(range(len(found)), key=lambda i: found[i].bound)
            touched.append((tables[best], found[best].choice))
            return float(found[best].bound)

        if not role.ends:  # without ends all grows with the blocks
            base, slope = 0.0, least(self.blocks) / self.blocks
        else:  # the least over splits is concave in the blocks: no less than its chord
            low, high = 1, max(self.blocks - self.ranks + 1, 2)
            at_low, at_high = least(low), least(high)
            slope = (at_high - at_low) / (high - low)
            base = at_low - slope * low
        made = _HalfSpace(weights=weights, base=base, slope=slope, touched=tuple(touched))
        self.known[role].append(made)
        return made

    def _program(
        self,
        s: Schedule,
        roles: Sequence[StageRole],
        known: Sequence[Path],
        active: Mapping[StageRole, Sequence[_HalfSpace]],
    ) -> _Relaxation:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, vstack

        many, features, scale = s.stages, len(Feature), self._scale()
        # Columns: blocks of each stage, its features, what of each rank's gathers and sums is exposed, the step.
        of, ends = np.tile(scale, many), 2 * s.ranks
        chains = [_along(s, p) for p in known]
        moments = list(self._moments(s))
        exposed = list(self._exposed(s))
        paths, tops = _schedule_rows(s, known, chains, exposed, moments, of, scale[0])
        tops[0] *= self.send_s / scale[0]
        sparse, owners = [], list[tuple[StageRole, int]]()
        for role, hs in ((role, hs) for role, hs in active.items() if hs):
            at = np.array([k for k, r in enumerate(roles) if r == role])
            weights = np.array([h.weights for h in hs]) * scale
            size = np.abs(weights).max(axis=1)
            lines = np.hstack([np.array([[h.slope] for h in hs]), -weights]) / size[:, None]
            columns = np.hstack([at[:, None], many + at[:, None] * features + np.arange(features)])
            count = len(hs) * len(at)
            data = np.broadcast_to(lines, (len(at), *lines.shape)).ravel()
            where = np.broadcast_to(columns[:, None], (len(at), len(hs), 1 + features)).ravel()
            start = np.arange(count + 1) * (1 + features)
            sparse.append(csr_array((data, where, start), shape=(count, many * (1 + features) + ends + 1)))
            tops.append(np.tile(-np.array([h.base for h in hs]) / size, len(at)))
            owners.append((role, count))
        width = many * (1 + features) + ends + 1
        rows = vstack([csr_array(np.vstack(paths)), *sparse], format="csr")
        self.tables[0].spent.cells += rows.nnz
        found = linprog(  # type: ignore[call-overload]  # its stub knows no sparse rows
            np.append(np.zeros(width - 1), 1.0),
            A_ub=rows,
            b_ub=np.concatenate(tops),
            A_eq=np.append(np.ones(many), np.zeros(width - many))[None],
            b_eq=[float(self.blocks)],
            bounds=[(1.0, float(self.blocks))] * many + [(0.0, np.inf)] * (width - many),
            method="highs",
        )
        if found.status == 2:
            raise Infeasible(f"no blocks fit under schedule '{s.name}'")
        if found.status != 0 or found.x is None or found.fun is None:
            raise PaseError(f"the program of a pipeline's bound was not solved: {found.message}")
        prices = -found.ineqlin.marginals
        paid, hid, kept, rest = np.split(prices, np.cumsum([len(chains), len(exposed), len(moments)]))
        directions = np.tensordot(paid, np.array([c for c, _ in chains]), 1)
        directions = directions + np.tensordot(hid, np.array([w for _, _, w in exposed]), 1)
        if moments:  # in seconds per byte
            directions = directions + np.tensordot(kept, np.array(moments), 1) * scale[0]
        used = set[int]()
        for role, count in owners:
            mine, rest = np.split(rest, [count])
            on = np.flatnonzero(mine.reshape(-1, len(active[role])).any(axis=0))
            used |= {id(active[role][int(i)]) for i in on}
        return _Relaxation(
            step_s=float(found.fun) * scale[0],
            stages=found.x[many : many * (1 + features)].reshape(many, features) * scale,
            directions=directions,
            used=frozenset(used),
        )

    def _scale(self) -> np.ndarray:
        """Of the features, in the program: a rank's step, the limit."""
        role = next(iter(self.known))
        first = self.known[role][0]
        unit = abs(first.base) + first.slope * self.blocks / self.ranks
        unit /= float(np.abs(first.weights).max())
        return np.where(np.arange(len(Feature)) < Feature.STATIC, max(unit, 1e-12), self.unit)

    def _moments(self, s: Schedule) -> Iterator[np.ndarray]:
        """What each stage's features weigh in a rank's bytes at each moment at which it may hold most, as parts of its
        limit, float64 [stages, features]."""
        rank = np.array(s.rank_of)
        for r in map(int, np.flatnonzero(np.isfinite(self.limits))):
            for held in most_held(s, r):
                out = np.zeros((s.stages, len(Feature)))
                out[:, Feature.STATIC] = rank == r
                out[:, Feature.KEPT], out[:, Feature.WAITING] = held
                yield out / self.limits[r]


def _schedule_rows(
    s: Schedule,
    known: Sequence[Path],
    chains: Sequence[tuple[np.ndarray, float]],
    exposed: Sequence[tuple[int, int, np.ndarray]],
    moments: Sequence[np.ndarray],
    of: np.ndarray,
    unit: float,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows of the program and their limits: paths (limits: in transfers), what of gathers and sums is exposed, moments.

    of: the scale of each stage's features; unit: of seconds.
    """
    many, ends = s.stages, 2 * s.ranks
    along = np.array([c.ravel() for c, _ in chains]) * of / unit
    at_ends = np.zeros((len(chains), ends + 1))
    at_ends[:, -1] = -1.0
    for row, p in zip(at_ends, known, strict=True):
        row[[p.first, s.ranks + p.last]] += 1.0
    sent = np.array([w.ravel() for _, _, w in exposed]) * of / unit
    which = np.zeros((len(exposed), ends + 1))
    which[np.arange(len(exposed)), [back * s.ranks + r for back, r, _ in exposed]] = -1.0
    rows = [
        np.hstack([np.zeros((len(chains), many)), along, at_ends]),
        np.hstack([np.zeros((len(exposed), many)), sent, which]),
    ]
    limits = [np.array([-crossed for _, crossed in chains]), np.zeros(len(exposed))]
    if moments:
        held = np.array([m.ravel() for m in moments]) * of
        rows.append(np.hstack([np.zeros((len(moments), many)), held, np.zeros((len(moments), ends + 1))]))
        limits.append(np.ones(len(moments)))
    return rows, limits


def _along(s: Schedule, p: Path) -> tuple[np.ndarray, float]:
    """A path as the weights of each stage's features, float64 [stages, features], and its transfers. What its ends wait
    for gathers and sums is ``_exposed``."""
    out = _worked(p.runs)
    out[:, Feature.FORWARD_SENT : Feature.BEFORE] = out[:, : Feature.FORWARD_SENT]
    out[:, Feature.AFTER] = np.array(s.rank_of) == p.last
    return out, float(p.crossed.sum())


def _worked(runs: np.ndarray) -> np.ndarray:
    """How often actions run, float64 [kinds, stages], as weights of their compute, float64 [stages, features]."""
    out = np.zeros((runs.shape[1], len(Feature)))
    whole = runs[Kind.BACKWARD]
    out[:, Feature.FORWARD] = runs[Kind.FORWARD]
    out[:, Feature.INPUT] = runs[Kind.INPUT] + whole
    out[:, Feature.WEIGHT] = runs[Kind.WEIGHT] + whole
    return out
