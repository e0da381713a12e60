"""Chooses a split and a number of blocks for each stage of a schedule, so that the busiest rank has the least work.

The splits are those that the bound's searches found (``bounds``), because each price of seconds and bytes has its own
best split. The ranks interact only through their numbers of blocks. For each rank, partial choices are extended stage
by stage. Of the choices with equally many blocks, those are kept that no other one undercuts in both seconds and
bytes. The numbers of blocks of the ranks are then those for which the longest rank is shortest. Because ranks that
differ wait for each other, each rank's stages are then tried on the other ranks, in simulations of the whole schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.menu import StageSplit
from pase.pipeline.cuts import CutProblem, most_held
from pase.pipeline.simulate import simulate
from pase.pipeline.types import Schedule

__all__ = ["StageChoice", "aligned", "choose_stages", "even_stages"]

_NEAR = 2
"""The numbers of blocks to try for a rank differ from its share by at most this many."""
_STATES = 48
"""How many partial choices with equally many blocks are kept."""
_PATTERNS = 4
"""How many of the most frequent choices of a rank are tried on other ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageChoice:
    """The split and the number of blocks of each stage."""

    splits: tuple[StageSplit, ...]
    counts: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Column:
    """One stage with one number of blocks.

    ways: the numbers of the ways to split it.
    seconds: their seconds per step [ways].
    nbytes: their bytes at each moment [ways, moments].
    buffers: the bytes of their largest ops [ways].
    """

    blocks: int
    ways: np.ndarray
    seconds: np.ndarray
    nbytes: np.ndarray
    buffers: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Choices:
    """Partial choices.

    seconds: [n]. nbytes: at each moment [n, moments].
    picked: the way and the number of blocks of each stage so far, int [n, stages, 2].
    """

    seconds: np.ndarray
    nbytes: np.ndarray
    picked: np.ndarray

    def kept(self) -> _Choices:
        """Return the choices that no other one undercuts in both seconds and bytes at the fullest moment."""
        peak = self.nbytes.max(axis=1, initial=0.0)
        order = np.lexsort((peak, self.seconds))
        least = np.minimum.accumulate(peak[order])
        lower = order[np.append(True, least[1:] < least[:-1])]
        if len(lower) > _STATES:
            lower = lower[np.unique(np.linspace(0, len(lower) - 1, _STATES).astype(int))]
        return _Choices(seconds=self.seconds[lower], nbytes=self.nbytes[lower], picked=self.picked[lower])


def choose_stages(
    s: Schedule, ways: Sequence[Sequence[StageSplit]], shares: np.ndarray, blocks: int, limits: np.ndarray
) -> StageChoice | None:
    """Return the choice whose busiest rank has the least work, within each rank's bytes; None if none was found.

    ways: the ways to split each stage.
    shares: the approximate fraction of the blocks of each rank.
    limits: float64 [ranks].
    """
    distinct = {id(some): _Ways.of(some, s.micro_batches) for some in ways}
    of = [distinct[id(some)] for some in ways]
    most = [_most_blocks(s, r, _on(s, r, of), float(limits[r])) for r in range(s.ranks)]
    if sum(most) < blocks:
        return None
    centres, near, best = blocks * shares, _NEAR, np.inf
    while True:
        tried = [_near(s, r, float(centres[r]), near) for r in range(s.ranks)]
        found = [_of_rank(s, r, _on(s, r, of), *tried[r], float(limits[r])) for r in range(s.ranks)]
        counts = _shared(found, blocks)
        if counts is None:
            if near >= blocks:
                return None
            near = 3 * _NEAR if near == _NEAR else blocks
            continue
        longest = max(f[n][0] for f, n in zip(found, counts, strict=True))
        if longest >= best or not _at_edge(counts, tried):
            return _picked(s, ways, found, counts)
        centres, best = np.array(counts, float), longest


def _at_edge(counts: Sequence[int], tried: Sequence[tuple[list[range], int, int]]) -> bool:
    """Whether a rank has the fewest or the most blocks that were tried for it, so that others may be better."""
    return any(
        n in (max(low, sum(of[0] for of in each)), min(high, sum(of[-1] for of in each))) and n > len(each)
        for n, (each, low, high) in zip(counts, tried, strict=True)
    )


def even_stages(
    s: Schedule, ways: Sequence[Sequence[StageSplit]], blocks: int, limits: np.ndarray
) -> StageChoice | None:
    """Return the best choice if stages have equal numbers of blocks.

    If the blocks do not divide evenly, the stages nearest to both ends have one block fewer. Equal stages matter
    because every stage waits for the longest one in its chain, however little work its rank has.
    """
    distinct = {id(some): _Ways.of(some, s.micro_batches) for some in ways}
    of = [distinct[id(some)] for some in ways]
    most = -(-blocks // s.stages)
    number = np.full(s.stages, most)
    inwards = np.argsort(np.minimum(np.arange(s.stages), np.arange(s.stages)[::-1] - 0.5), kind="stable")
    number[inwards[: most * s.stages - blocks]] -= 1
    rank = np.array(s.rank_of)
    counts = [int(number[rank == r].sum()) for r in range(s.ranks)]
    found = [
        _of_rank(s, r, _on(s, r, of), [[int(n)] for n in number[rank == r]], n, n, float(limits[r]))
        for r, n in enumerate(counts)
    ]
    return _picked(s, ways, found, counts) if all(found) else None


def _picked(
    s: Schedule,
    ways: Sequence[Sequence[StageSplit]],
    found: Sequence[dict[int, tuple[float, np.ndarray]]],
    counts: Sequence[int],
) -> StageChoice:
    """Return the choice with these numbers of blocks of the ranks."""
    splits, many = dict[int, StageSplit](), np.zeros(s.stages, np.int64)
    for r, n in enumerate(counts):
        mine = [k for k, rank in enumerate(s.rank_of) if rank == r]
        for k, (way, of_stage) in zip(mine, found[r][n][1], strict=True):
            splits[k], many[k] = ways[k][int(way)], of_stage
    return StageChoice(
        splits=tuple(splits[k] for k in range(s.stages)),
        counts=many,
    )


def aligned(
    choice: StageChoice, made: Callable[[tuple[StageSplit, ...]], CutProblem]
) -> tuple[float, StageChoice]:
    """Return (seconds of the step, infinite if it does not fit; the choice).

    In the choice, stages of one rank may be copied to other ranks if the schedule is then shorter.

    made: splits of all stages -> the problem of their cuts.
    """

    def seconds(c: StageChoice) -> float:
        problem = made(c.splits)
        rows, room = problem.memory_rows
        if len(rows) and (rows @ c.counts > room * (1 + 1e-9)).any():
            return np.inf
        return simulate(problem.schedule, problem.times(c.counts)).step_s

    s = made(choice.splits).schedule
    best = seconds(choice)
    for more in _moves(s, choice):
        tried = more(choice)
        now = best if tried is None else seconds(tried)
        if tried is not None and now < best:
            choice, best = tried, now
    return best, choice


def _moves(s: Schedule, choice: StageChoice) -> Iterator[Callable[[StageChoice], StageChoice | None]]:
    """Yield changes of a choice: one rank's splits and numbers of blocks on all inner ranks, then on single ones."""
    of = [[k for k, at in enumerate(s.rank_of) if at == r] for r in range(s.ranks)]
    inner = [r for r in range(s.ranks) if r not in (s.rank_of[0], s.rank_of[-1])]

    def pattern(c: StageChoice, r: int) -> tuple[tuple[int, int], ...]:
        return tuple((id(c.splits[k]), int(c.counts[k])) for k in of[r])

    seen = Counter(pattern(choice, r) for r in inner)
    common = [next(r for r in inner if pattern(choice, r) == p) for p, _ in seen.most_common(_PATTERNS)]

    def onto(source: int, ranks: Sequence[int], c: StageChoice) -> StageChoice | None:
        """Copy the first choice's stages of one rank to those of these ranks that have equally many blocks."""
        splits, counts = list(c.splits), c.counts.copy()
        many = choice.counts[of[source]].sum()
        for r in ranks:
            if c.counts[of[r]].sum() == many:
                for k, like in zip(of[r], of[source], strict=True):
                    splits[k], counts[k] = choice.splits[like], choice.counts[like]
        made = StageChoice(splits=tuple(splits), counts=counts)
        return made if any(pattern(made, r) != pattern(c, r) for r in ranks) else None

    for source in common:
        for ranks in (inner, *([r] for r in inner)):
            yield lambda c, source=source, ranks=ranks: onto(source, ranks, c)  # type: ignore[misc]


def _on(s: Schedule, rank: int, of: Sequence[_Ways]) -> list[_Ways]:
    """Return the items of the rank's stages."""
    return [x for x, at in zip(of, s.rank_of, strict=True) if at == rank]


def _shared(found: Sequence[dict[int, tuple[float, np.ndarray]]], blocks: int) -> list[int] | None:
    """Return each rank's number of blocks, so that the longest rank is shortest.

    found: for each rank, blocks -> (seconds, choice).
    """
    if not all(found):
        return None
    for top in sorted({t for f in found for t, _ in f.values()}):
        counts = [max((n for n, (t, _) in f.items() if t <= top), default=0) for f in found]
        if min(counts) and sum(counts) >= blocks:
            break
    else:
        return None
    while sum(counts) > blocks:  # take a block from the busiest rank that has one to spare
        spare = [r for r, n in enumerate(counts) if n - 1 in found[r]]
        if not spare:
            return None
        counts[max(spare, key=lambda r: found[r][counts[r]][0])] -= 1
    return counts


def _near(s: Schedule, rank: int, share: float, more: int) -> tuple[list[range], int, int]:
    """Return (numbers of blocks to try for each of the rank's stages, the least and the most of all together)."""
    mine = [k for k, at in enumerate(s.rank_of) if at == rank]
    each = share / len(mine)
    low, high = max(math.floor(share) - more, len(mine)), math.ceil(share) + more
    ends = rank in (s.rank_of[0], s.rank_of[-1])
    of_stage = (
        more if len(mine) == 1 else more - _NEAR
    )  # several stages of a rank wait for the longest of them
    near = range(max(math.floor(each) - of_stage - ends, 1), math.floor(each) + of_stage + 2)
    return [near] * len(mine), low, high


def _of_rank(
    s: Schedule,
    rank: int,
    ways: Sequence[_Ways],
    near: Sequence[Sequence[int]],
    low: int,
    high: int,
    limit: float,
) -> dict[int, tuple[float, np.ndarray]]:
    """Return number of blocks -> (seconds per step, the way and blocks of each stage int [stages, 2]).

    near: the numbers of blocks to try for each stage.
    low, high: the least and the most blocks of all stages.
    """
    mine = [k for k, at in enumerate(s.rank_of) if at == rank]
    flying = most_held(s, rank)[:, :, mine] if np.isfinite(limit) else np.zeros((1, 2, len(mine)))
    columns = [
        [_column(some, n, flying[:, :, i], limit) for n in numbers]
        for i, (some, numbers) in enumerate(zip(ways, near, strict=True))
    ]
    best: dict[int, tuple[float, np.ndarray]] = {}
    tried = (
        sorted({float(b) for of in columns for c in of for b in c.buffers}) if np.isfinite(limit) else [0.0]
    )
    for most in tried:  # bytes of the largest op, of which only one exists at a time
        room = limit - most if np.isfinite(limit) else np.inf
        for n, c in _extended(columns, room, most if np.isfinite(limit) else np.inf, low, high).items():
            if n not in best or c[0] < best[n][0]:
                best[n] = c
    return best


def _most_blocks(s: Schedule, rank: int, ways: Sequence[_Ways], limit: float) -> float:
    """Return a number of blocks of which no more fit on a rank, whatever its ways.

    At each moment, each stage is assumed to hold the least that any of its ways holds.
    """
    if np.isinf(limit):
        return np.inf
    mine = [k for k, at in enumerate(s.rank_of) if at == rank]
    flying = most_held(s, rank)[:, :, mine]
    held = [
        np.tensordot(np.stack([np.ones(len(flying)), *flying[:, :, i].T]), w.nbytes, (0, 0)).min(axis=1)
        for i, w in enumerate(ways)
    ]
    fixed, each = np.sum([x[:, 0] for x in held], axis=0), np.min([x[:, 1] for x in held], axis=0)
    room = limit - min(float(w.buffers.min()) for w in ways) - fixed
    if (room < 0).any():
        return 0.0
    return float(np.floor(np.divide(room, each, out=np.full_like(room, np.inf), where=each > 0) + 1e-9).min())


def _column(of: _Ways, blocks: int, flying: np.ndarray, limit: float) -> _Column:
    """Return a stage's column. flying: micro-batches that it holds, and those that wait for weights' gradients,
    [moments, 2]."""
    ways, seconds, (static, kept, waiting), buffers = of.at(blocks)
    held = static[:, None] + kept[:, None] * flying[None, :, 0] + waiting[:, None] * flying[None, :, 1]
    return _Column(
        blocks=blocks,
        ways=ways,
        seconds=seconds,
        nbytes=held if np.isfinite(limit) else np.zeros((len(static), 1)),
        buffers=buffers,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ways:
    """The ways to split a stage, as pairs (without blocks, per block).

    seconds: the lines of their seconds per step [ways, lines, 2].
    nbytes: their bytes throughout, of a micro-batch until its backward, and until its weights' gradients [3, ways, 2].
    buffers: the bytes of their largest ops [ways].
    columns: the results of ``at`` so far, by number of blocks.
    """

    seconds: np.ndarray
    nbytes: np.ndarray
    buffers: np.ndarray
    columns: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, ways: Sequence[StageSplit], micro_batches: int) -> _Ways:
        lines = [w.step_lines(micro_batches) for w in ways]
        most = max(map(len, lines))
        waiting = (w.waiting for w in ways)
        static, kept = ([[w.fixed(b), w.of_block(b)] for w in ways] for b in (CostKind.STATIC, CostKind.KEPT))
        return cls(
            seconds=np.stack([np.concatenate([x, np.repeat(x[:1], most - len(x), axis=0)]) for x in lines]),
            nbytes=np.array([static, kept, list(waiting)]),
            buffers=np.array([w.buffers for w in ways]),
            columns={},
        )

    def at(self, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the ways that no other one undercuts in everything with this many blocks.

        The result is their numbers, seconds, bytes [3, ways], and the bytes of their largest ops.
        """
        if blocks not in self.columns:
            at = np.array([1.0, blocks])
            seconds, nbytes = (self.seconds @ at).max(axis=1), self.nbytes @ at
            every = np.vstack([seconds, nbytes, self.buffers])
            # These are sorted by seconds, so a way comes after those that undercut it.
            first, lower = np.unique(every, axis=1, return_index=True)
            least = (first[:, :, None] <= first[:, None]).all(axis=0).sum(axis=0) == 1
            some = lower[least]
            self.columns[blocks] = some, seconds[some], nbytes[:, some], self.buffers[some]
        return self.columns[blocks]


def _extended(
    columns: Sequence[Sequence[_Column]], room: float, most: float, low: int, high: int
) -> dict[int, tuple[float, np.ndarray]]:
    """Return a rank's best choices per number of blocks, within ``room`` bytes and with ops of at most ``most``."""
    moments = columns[0][0].nbytes.shape[1]
    so_far = {
        0: _Choices(seconds=np.zeros(1), nbytes=np.zeros((1, moments)), picked=np.zeros((1, 0, 2), np.int64))
    }
    fewest = [c[0].blocks for c in columns]
    for i, of_stage in enumerate(columns):
        after = dict[int, list[_Choices]]()
        rest = sum(fewest[i + 1 :])
        for n, c in so_far.items():
            for column in of_stage:
                if n + column.blocks + rest <= high:
                    more = _joined(c, column, room, most)
                    if len(more.seconds):
                        after.setdefault(n + column.blocks, []).append(more)
        so_far = {
            n: _Choices(
                seconds=np.concatenate([c.seconds for c in some]),
                nbytes=np.concatenate([c.nbytes for c in some]),
                picked=np.concatenate([c.picked for c in some]),
            ).kept()
            for n, some in after.items()
        }
    return {n: (float(c.seconds[0]), c.picked[0]) for n, c in so_far.items() if n >= low}


def _joined(c: _Choices, column: _Column, room: float, most: float) -> _Choices:
    """Return each choice combined with each way of one more stage, as far as they fit."""
    some = np.flatnonzero(column.buffers <= most)
    nbytes = c.nbytes[:, None] + column.nbytes[None, some]
    at, way = np.nonzero((nbytes <= room).all(axis=2))
    mine = np.stack([column.ways[some[way]], np.full(len(way), column.blocks)], axis=1)
    return _Choices(
        seconds=c.seconds[at] + column.seconds[some[way]],
        nbytes=nbytes[at, way],
        picked=np.concatenate([c.picked[at], mine[:, None]], axis=1),
    )
