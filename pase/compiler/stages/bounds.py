"""Lower bounds on every pipeline of some ranks, micro-batches and mesh, under a schedule and each rank's memory limit.

A stage's seconds and bytes are a vector of features (``features``). For any weights, a search over the tables finds the
least weighted sum of features over all splits. This gives a half-space per direction, for each number of blocks. A
linear program over the stages' vectors and numbers of blocks then bounds the step. Its rows say that each action ends
after those that it waits for (``pase.pipeline.potentials``), and that each rank stays within its memory at each moment
at which it may hold most. The program's dual prices are the directions in which its answer may be too low, and they are
searched next. (Kelley 1960; the Lagrangian dual of the choice of splits.)

The bound allows fractions of blocks, and mixtures of splits within a stage. It holds for every cut, every split of each
stage, and every way to recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.stages.features import Feature, direction, running, slower_may_weigh_less
from pase.compiler.stages.menu import StageRole, StageSplit, StageTables, roles_of
from pase.errors import Infeasible, PaseError
from pase.pipeline.bounds import paths
from pase.pipeline.cuts import moments
from pase.pipeline.overlap import starts
from pase.pipeline.potentials import StepRows, path_rows, step_rows
from pase.pipeline.simulate import Path, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["StageBounds"]

_ROUNDS = 12
_MOST_ACTIONS = 5000
"""For schedules with more actions, only some paths are rows, because programs of all of them take too long."""
_ENOUGH, _STILL = 1e-3, 3
"""The bound of a schedule is final once this many consecutive rounds raise it by less than this fraction."""
_DIRECTIONS, _NEAR = 4, 5e-3
"""How many directions are searched for each role in a round, and how different they must be."""
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
"""The directions to begin with, in addition to that of the whole step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _HalfSpace:
    """weights @ features >= base + slope * blocks, for every split of a stage.

    touched: the splits that come nearest, each as a stage's tables and the choice of configs in them.
    """

    weights: np.ndarray
    base: float
    slope: float
    touched: tuple[tuple[StageTables, np.ndarray], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Relaxation:
    """The solution of the linear program.

    step_s: the seconds of the step.
    stages: the features of each stage, float64 [stages, features].
    directions: the dual prices of these features, float64 [stages, features].
    """

    step_s: float
    stages: np.ndarray
    directions: np.ndarray
    used: frozenset[int]
    """The ``id`` of each half-space on which the solution depends."""


@dataclass(kw_only=True, eq=False)
class Climb:
    """The bound of a schedule, which every round of a linear program and its searches may raise.

    taken: the rows of the program that do not change from round to round.
    moments: how many of these rows, the last ones, limit bytes.
    some: the paths that are known.
    exact: whether all paths are rows, except in the first round.
    active: the half-spaces in the program.
    seen: how many of all known half-spaces have been in the program.
    best: the bound in seconds so far; infinite if nothing fits.
    still: the number of consecutive rounds that hardly raised it.
    """

    schedule: Schedule
    roles: tuple[StageRole, ...]
    taken: csr_array
    moments: int
    some: list[Path]
    exact: bool
    active: dict[StageRole, list[_HalfSpace]]
    seen: dict[StageRole, int]
    best: float = 0.0
    still: int = 0
    rounds: int = 0

    @property
    def final(self) -> bool:
        """Whether more rounds are not worth their time."""
        return np.isinf(self.best) or self.still >= _STILL or self.rounds >= _ROUNDS


@dataclass(kw_only=True, eq=False)
class StageBounds:
    """Bounds for the pipelines of ``ranks``, for the ways to run a step that ``tables`` have.

    limit: bytes on a device, of every rank or one value per rank; infinite without a limit.
    send_s: the least seconds to send activations to the next stage, and gradients back.
    groups: the device group of each rank; empty if all ranks are equal.
    """

    tables: Sequence[StageTables]
    ranks: int
    limit: float | np.ndarray
    send_s: tuple[float, float] = (0.0, 0.0)
    groups: tuple[int, ...] = ()
    known: dict[StageRole, list[_HalfSpace]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = self.groups or (0,) * self.ranks
        self.limits = np.broadcast_to(np.asarray(self.limit, float), (self.ranks,))
        finite = self.limits[np.isfinite(self.limits)]
        bytes_unit = float(finite.max(initial=0.0)) or 1.0
        self.unit = np.where(np.arange(len(Feature)) < Feature.STATIC, 1.0, bytes_unit)

    @property
    def blocks(self) -> int:
        return self.tables[0].places.blocks

    def least_s(self, s: Schedule, below: float = np.inf, rounds: int = _ROUNDS) -> float:
        """Return the seconds that no pipeline under the schedule beats; infinite if none fits. Stop at ``below``."""
        climb = self.climb(s)
        while climb.rounds < rounds and not climb.final and climb.best < below:
            self.lift(climb)
        return climb.best

    def climb(self, s: Schedule) -> Climb:
        """Return the bound of a schedule before its first round."""
        roles = roles_of(s, self.groups)
        for role in dict.fromkeys(roles):
            if role not in self.known:
                self.known[role] = []
                for weights in (self._at(role.group)[0].step, *_FIRST, *self._bytes(role.group)):
                    self._search(role, weights)
        held = self._moments(s)
        return Climb(
            schedule=s,
            roles=roles,
            taken=self._taken(s, held, np.tile(self._scale(), s.stages)),
            moments=len(held),
            some=list(paths(s)),
            exact=sum(map(len, s.orders)) <= _MOST_ACTIONS,
            active={role: [] for role in roles},
            seen=dict.fromkeys(roles, 0),
        )

    def lift(self, c: Climb) -> None:
        """Run one more round: the program, and searches in the directions in which its answer may be too low."""
        s = c.schedule
        c.rounds += 1
        for role, hs in c.active.items():  # add what rounds of other schedules have found
            hs += self.known[role][c.seen[role] :]
            c.seen[role] = len(self.known[role])
        try:
            every = c.exact and c.rounds > 1  # at first, a few paths tell which schedules are promising
            found = self._program(c, step_rows(s) if every else path_rows(s, c.some))
        except Infeasible:
            c.best = np.inf
            return
        c.still = c.still + 1 if found.step_s < c.best * (1 + _ENOUGH) else 0
        c.best = max(c.best, found.step_s)
        if c.final:
            return
        if not c.exact:
            c.some.append(simulate(s, self._times(s, found.stages)).path)
        c.active = {role: [h for h in hs if id(h) in found.used] for role, hs in c.active.items()}
        for role, weights in self._asked(c.roles, found.directions):
            self._search(role, weights)

    def least_of(self, schedules: Sequence[Schedule], below: float) -> list[float]:
        """Return bounds of some schedules. The least of them is as high as rounds make it, or at least ``below``.

        A schedule whose bound is not the least needs no more rounds.
        """
        climbs = [self.climb(s) for s in schedules]
        while climbs:
            lowest = min(climbs, key=lambda c: c.best)
            if lowest.best >= below or lowest.final:
                break
            self.lift(lowest)
        return [c.best for c in climbs]

    def ways(self, role: StageRole) -> list[StageSplit]:
        """Return the splits that come nearest to the half-spaces that were searched, each once."""
        found = (t.split_by(role, choice) for h in self.known[role] for t, choice in h.touched)
        return list({id(w): w for w in found}.values())

    def _at(self, group: int) -> list[StageTables]:
        return [t for t in self.tables if t.group == group]

    def _least_buffers(self, role: StageRole) -> float:
        return min(t.least_buffers(role) for t in self._at(role.group))

    def _bytes(self, group: int) -> Iterator[np.ndarray]:
        """Yield directions to begin with under a limit: bytes alone, and the step at some prices of a rank's memory."""
        limit = float(self.limits[self.groups.index(group)])
        if np.isinf(limit):
            return
        first = self._at(group)[0]
        step = first.step
        each = first.least(StageRole(group=group), self.blocks, step) / self.ranks / limit
        yield from (direction(static=1), direction(kept=1), direction(waiting=1))
        for flying in (self.ranks / 2, self.ranks):
            held = direction(static=1, kept=flying)
            yield held
            yield from (step + price * each * held for price in _PRICES)

    def _asked(
        self, roles: Sequence[StageRole], directions: np.ndarray
    ) -> Iterator[tuple[StageRole, np.ndarray]]:
        """Yield the directions to search next: those that differ most from each other and from earlier ones."""
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
            send=np.array(self.send_s)[:, None],
            before=exposed[0],
            after=exposed[1],
        )

    def _exposed(self, s: Schedule) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield what a rank takes at least before its first action (0) or after its last one (1).

        The result is (0 or 1, the rank, weights of each stage's features [stages, features]). For gathers and sums,
        these are the first and the last of the lines of ``pase.pipeline.overlap``, without the one block that has
        nothing to overlap with.
        """
        for back, sent in enumerate((Feature.BEFORE, Feature.SUMS)):
            for r in range(s.ranks):
                every = starts(s, r, back=bool(back))
                slow = self._at(self.groups[r])[0].slow
                out = np.zeros((s.stages, len(Feature)))
                out[[x.stage for x in every], sent] = slow
                out[:, Feature.AFTER] = back * (np.array(s.rank_of) == r)
                yield back, r, out
                for x in every if slow < 1 else ():
                    out = out.copy()  # earlier stages stay in the sum
                    out[x.stage, sent] = 1.0
                    hidden = x.before.copy()
                    hidden[x.kind, x.stage] += 1
                    yield back, r, out - _worked(hidden)

    def _search(self, role: StageRole, weights: np.ndarray) -> None:
        """Find the half-space of a direction and add it to the known ones."""
        weights = weights / np.abs(weights * self.unit).max()
        free = not weights[Feature.STATIC :].any()  # if only seconds count, the first tables have the least
        tables = self._at(role.group)[: 1 if free and not slower_may_weigh_less(weights) else None]
        touched = list[tuple[StageTables, np.ndarray]]()

        def least(blocks: float) -> float:
            best, nearest = np.inf, None
            priced = [(t, t.weighted(role, blocks, weights)) for t in tables]
            for least, t, priced_ in sorted(((p.least_sum, t, p) for t, p in priced), key=lambda x: x[0]):
                if least >= best:
                    break
                found = t.found(priced_)
                if found.bound < best:
                    best, nearest = float(found.bound), (t, found.choice)
            if nearest is not None:
                touched.append(nearest)
            return best

        if not role.ends:  # without the ends, everything is proportional to the blocks
            base, slope = 0.0, least(self.blocks) / self.blocks
        else:  # the least over splits is concave in the blocks, so it is at least its chord
            low, high = 1, max(self.blocks - self.ranks + 1, 2)
            at_low, at_high = least(low), least(high)
            slope = (at_high - at_low) / (high - low)
            base = at_low - slope * low
        self.known[role].append(_HalfSpace(weights=weights, base=base, slope=slope, touched=tuple(touched)))

    def _program(self, c: Climb, steps: StepRows) -> _Relaxation:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, hstack, vstack

        s, active, scale = c.schedule, c.active, self._scale()
        many = s.stages
        # The columns are the blocks of each stage, its features, and the columns of the schedule's rows.
        features = many * len(Feature)
        width, step = many + features + steps.columns, many + features + len(Kind) * many + 2 * s.ranks
        taken, held = c.taken, c.moments
        rows = [
            hstack([csr_array((steps.rows.shape[0], many + features)), steps.rows]),
            hstack(
                [csr_array((taken.shape[0], many)), taken, csr_array((taken.shape[0], width - step))],
                format="csr",
            ),
        ]
        send = np.broadcast_to(np.array(self.send_s)[:, None], (2, many - 1))
        tops = [steps.tops(send) / scale[0], np.zeros(taken.shape[0] - held), np.ones(held)]
        spaces, bases, owners = _spaces(c.roles, active, scale, width)
        rows, tops = [*rows, *spaces], [*tops, *bases]
        every = vstack(rows, format="csr")
        self.tables[0].spent.cells += every.nnz
        found = linprog(  # type: ignore[call-overload]  # its stub does not allow sparse rows
            (np.arange(width) == step).astype(float),
            A_ub=every,
            b_ub=np.concatenate(tops),
            A_eq=(np.arange(width) < many).astype(float)[None],
            b_eq=[float(self.blocks)],
            bounds=[(1.0, float(self.blocks))] * many + [(0.0, np.inf)] * (width - many),
            method="highs-ipm",  # three times as fast as the simplex method for large programs
        )
        if found.status == 2:
            raise Infeasible(
                "no blocks fit in memory",
                where=f"schedule '{s.name}'",
                fix="use more devices or a smaller batch",
            )
        if found.status != 0 or found.x is None or found.fun is None:
            raise PaseError(f"the linear program of a pipeline's bound was not solved: {found.message}")
        prices = -found.ineqlin.marginals
        _, paid, rest = np.split(prices, np.cumsum([steps.rows.shape[0], taken.shape[0]]))
        worth = (rows[1].T @ paid)[many : many + features].reshape(many, len(Feature))
        used = set[int]()
        for role, count in owners:
            mine, rest = np.split(rest, [count])
            on = np.flatnonzero(mine.reshape(-1, len(active[role])).any(axis=0))
            used |= {id(active[role][int(i)]) for i in on}
        return _Relaxation(
            step_s=float(found.fun) * scale[0],
            stages=found.x[many : many + features].reshape(many, len(Feature)) * scale,
            directions=worth * scale[0] / scale,
            used=frozenset(used),
        )

    def _taken(self, s: Schedule, moments: np.ndarray, scale: np.ndarray) -> csr_array:
        """Return the rows of what actions take, what ranks do before and after them, and last what each rank holds.

        The columns are the stages' features, scaled, and the schedule's columns up to the step. Bytes are at most 1,
        seconds at most 0.
        """
        from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

        of_kind = np.zeros((len(Kind), len(Feature)))
        for kind, row in zip(Kind, of_kind, strict=True):
            row[:] = _worked(np.eye(len(Kind))[:, [kind]])[0]
            row[Feature.FORWARD_SENT : Feature.BEFORE] = row[: Feature.FORWARD_SENT]
        actions = vstack([kron(eye_array(s.stages), row[None]) for row in of_kind])
        exposed, held = list(self._exposed(s)), csr_array(moments.reshape(len(moments), scale.size) * scale)
        ends = np.array([back * s.ranks + r for back, r, _ in exposed])
        taken = [actions, -eye_array(len(Kind) * s.stages), csr_array((actions.shape[0], 2 * s.ranks))]
        around = [
            csr_array(np.array([w.ravel() for _, _, w in exposed])),
            csr_array((len(exposed), len(Kind) * s.stages)),
            -csr_array(np.eye(2 * s.ranks)[ends]),
        ]
        rows = [hstack(taken, format="csr"), hstack(around, format="csr")]
        if len(moments):
            none = csr_array((len(moments), actions.shape[0] + 2 * s.ranks))
            rows.append(hstack([held, none], format="csr"))
        return vstack(rows, format="csr")

    def _scale(self) -> np.ndarray:
        """Return the scale of the features in the program: a rank's step for seconds, the limit for bytes."""
        role = next(iter(self.known))
        first = self.known[role][0]
        unit = abs(first.base) + first.slope * self.blocks / self.ranks
        unit /= float(np.abs(first.weights).max())
        return np.where(np.arange(len(Feature)) < Feature.STATIC, max(unit, 1e-12), self.unit)

    def _moments(self, s: Schedule) -> np.ndarray:
        """Return the weights of each stage's features in a rank's bytes at each moment at which it may hold most.

        They are fractions of the rank's limit minus the least that its ops need, float64 [moments, stages, features].
        """
        rank, least = np.array(s.rank_of), [self._least_buffers(role) for role in roles_of(s, self.groups)]
        room = self.limits - [
            max(x for x, at in zip(least, rank, strict=True) if at == r) for r in range(s.ranks)
        ]
        of, held = moments(s)
        of, held = (x[np.isfinite(room[of])] for x in (of, held))
        out = np.zeros((len(of), s.stages, len(Feature)))
        out[:, :, Feature.STATIC] = rank == of[:, None]
        out[:, :, Feature.KEPT], out[:, :, Feature.WAITING] = held[:, 0], held[:, 1]
        parts: np.ndarray = out / np.maximum(room[of], 1.0)[:, None, None]
        return parts


def _spaces(
    roles: Sequence[StageRole],
    active: Mapping[StageRole, Sequence[_HalfSpace]],
    scale: np.ndarray,
    width: int,
) -> tuple[list[csr_array], list[np.ndarray], list[tuple[StageRole, int]]]:
    """Return the program's rows of half-spaces, their right sides, and how many each role has.

    scale: the scale of the features.
    """
    from scipy.sparse import csr_array

    rows, tops, owners = list[csr_array](), list[np.ndarray](), list[tuple[StageRole, int]]()
    many, line = len(roles), 1 + len(Feature)
    for role, hs in ((role, hs) for role, hs in active.items() if hs):
        at = np.array([k for k, r in enumerate(roles) if r == role])
        weights = np.array([h.weights for h in hs]) * scale
        size = np.abs(weights).max(axis=1)
        lines = np.hstack([np.array([[h.slope] for h in hs]), -weights]) / size[:, None]
        columns = np.hstack([at[:, None], many + at[:, None] * len(Feature) + np.arange(len(Feature))])
        count = len(hs) * len(at)
        data = np.broadcast_to(lines, (len(at), *lines.shape)).ravel()
        where = np.broadcast_to(columns[:, None], (len(at), len(hs), line)).ravel()
        rows.append(csr_array((data, where, np.arange(count + 1) * line), shape=(count, width)))
        tops.append(np.tile(-np.array([h.base for h in hs]) / size, len(at)))
        owners.append((role, count))
    return rows, tops, owners


def _worked(runs: np.ndarray) -> np.ndarray:
    """Return how often actions run, float64 [kinds, stages], as weights of their compute, [stages, features]."""
    out = np.zeros((runs.shape[1], len(Feature)))
    whole = runs[Kind.BACKWARD]
    out[:, Feature.FORWARD] = runs[Kind.FORWARD]
    out[:, Feature.INPUT] = runs[Kind.INPUT] + whole
    out[:, Feature.WEIGHT] = runs[Kind.WEIGHT] + whole
    return out
