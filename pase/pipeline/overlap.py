"""What of a rank's collectives once a step is not hidden: gathers beside its first forwards, sums beside its last
backwards.

A stage gathers the weights of its units (what comes before its blocks, each block, what comes after them) one after
another, and each unit's forward waits for its own. This is a flow shop of two machines (Johnson 1954): the work then
ends later, than without gathers, by

    max over units u:  gathers up to u  -  compute before u  +  slow * gathers after u

since gathers slow the compute that they run beside by the part of the device that they occupy. Sums of gradients are
the same backwards in time, from the end of the step. With ``slow`` 1 nothing overlaps: the result is all gathers.

Blocks are equal, so only the first and the last of them can be that unit: each line is linear in their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.pipeline.types import Kind, Schedule

__all__ = ["HoistedCollectives", "Lines", "Start", "exposed_lines", "exposed_s", "starts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """The largest of some lines in the stages' numbers of blocks. base: float64 [lines]; slope: [lines, stages]."""

    base: np.ndarray
    slope: np.ndarray

    def at(self, counts: np.ndarray) -> tuple[float, int]:
        """(the value with these numbers of blocks, which line has it)."""
        values = self.base + self.slope @ counts
        k = int(values.argmax())
        return float(values[k]), k


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """The first action of a stage that waits for its gathers; or, back in time, the last that its sums wait for.

    before: how often each kind of action of each stage precedes it on its rank, float64 [kinds, stages].
    """

    stage: int
    kind: Kind
    before: np.ndarray


@lru_cache(maxsize=4096)
def starts(schedule: Schedule, rank: int, *, back: bool) -> tuple[Start, ...]:
    """Those of a rank's stages, in order. back: of the sums, in reversed time."""
    order = schedule.orders[rank][::-1] if back else schedule.orders[rank]
    kinds = (Kind.BACKWARD, Kind.WEIGHT) if back else (Kind.FORWARD,)
    found = dict[int, Start]()
    ahead = np.zeros((len(Kind), schedule.stages))
    for a in order:
        if a.kind in kinds and a.stage not in found:
            found[a.stage] = Start(stage=a.stage, kind=a.kind, before=ahead.copy())
        ahead[a.kind, a.stage] += 1
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class HoistedCollectives:
    """What each stage sends once a step, and the compute beside it, by unit: what comes before the stage's equal blocks
    (one unit or several), one block, what comes after them.

    gathers, sums: seconds, float64 [units, stages], the last but one of a block. compute: seconds of one micro-batch,
    float64 [kinds, units, stages]. slow: the part of a device that collectives occupy, 1 if nothing overlaps, float64
    [ranks].
    """

    gathers: np.ndarray
    sums: np.ndarray
    compute: np.ndarray
    slow: np.ndarray

    def exposed(self, schedule: Schedule, rank: int, *, back: bool) -> Lines:
        """By how many seconds the rank begins later because of its gathers; or, back, ends later because of its
        sums."""
        mine = np.flatnonzero(np.array(schedule.rank_of) == rank)
        sent = np.ascontiguousarray((self.sums if back else self.gathers)[:, mine])
        compute = np.ascontiguousarray(self.compute[:, :, mine])
        base, slope = _lines(
            schedule, rank, back, float(self.slow[rank]), len(sent), sent.tobytes(), compute.tobytes()
        )
        whole = np.zeros((len(base), schedule.stages))
        whole[:, mine] = slope
        return Lines(base=base, slope=whole)


@lru_cache(maxsize=4096)
def _lines(
    schedule: Schedule, rank: int, back: bool, slow: float, many: int, moved_: bytes, compute_: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """Base and slope of ``Lines``, for the rank's stages alone. A search meets the same stages of a rank many times.

    many: units. moved_: float64 [units, stages]; compute_: float64 [kinds, units, stages]."""
    mine = [k for k, r in enumerate(schedule.rank_of) if r == rank]
    sent_s = np.frombuffer(moved_).reshape(many, len(mine))
    compute = np.frombuffer(compute_).reshape(len(Kind), many, len(mine))
    every = starts(schedule, rank, back=back)
    whole = np.stack([sent_s[:-2].sum(axis=0) + sent_s[-1], sent_s[-2]])  # without blocks, of each block
    fixed, each = compute[:, :-2].sum(axis=1) + compute[:, -1], compute[:, -2]
    sent, base, slope = np.zeros_like(whole), list[float](), list[np.ndarray]()
    for s in every:
        k, ahead = mine.index(s.stage), s.before[:, mine]
        for g, c in units(sent_s[:, k], compute[s.kind, :, k]):
            up_to = sent.copy()
            up_to[:, k] += g
            line = up_to + slow * (whole - up_to)
            line[:, k] -= c
            base.append(float(line[0].sum() - (ahead * fixed).sum()))
            slope.append(line[1] - (ahead * each).sum(axis=0))
        sent[:, k] = whole[:, k]
    return np.array(base), np.array(slope)


def units(exposable: np.ndarray, compute: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each unit that may decide: what is sent up to it, and what is computed before it, as seconds (without blocks,
    of each block), float64 [2]. exposable, compute: float64 [units], the last but one of a block."""
    sent = done = 0.0
    for g, c in zip(exposable[:-2], compute[:-2], strict=True):
        sent += g
        yield np.array([sent, 0.0]), np.array([done, 0.0])
        done += c
    (g1, g2), (c1, _) = exposable[-2:], compute[-2:]
    yield np.array([sent + g1, 0.0]), np.array([done, 0.0])
    yield np.array([sent, g1]), np.array([done - c1, c1])
    yield np.array([sent + g2, g1]), np.array([done, c1])


def exposed_s(sent: np.ndarray, compute: np.ndarray, blocks: float, slow: float) -> float:
    """Of one stage on its own. sent, compute: float64 [units], the last but one of a block.

    >>> exposed_s(np.array([0, 1.0, 0]), np.array([0, 3.0, 0]), 4, 0.0)
    1.0
    >>> exposed_s(np.array([0, 1.0, 0]), np.array([0, 3.0, 0]), 4, 1.0)
    4.0
    """
    return float((exposed_lines(sent, compute, slow) @ np.array([1.0, blocks])).max())


def exposed_lines(sent: np.ndarray, compute: np.ndarray, slow: float) -> np.ndarray:
    """What ``exposed_s`` is the largest of: (seconds without blocks, seconds of each block), float64 [lines, 2]."""
    total = np.array([sent[:-2].sum() + sent[-1], sent[-2]])
    return np.array([g - c + slow * (total - g) for g, c in units(sent, compute)])
