"""The exposed time of a rank's once-per-step collectives: all-gathers of weights and reductions of gradients.

All-gathers overlap with the first forwards, and reductions with the last backwards. A stage gathers the weights of its
units one after another (the part before its blocks, each block, the part after them). The forward of each unit waits
for the all-gather of its own weights. This is a flow shop with two machines (Johnson 1954). Compared with a step
without all-gathers, the work ends later by

    max over units u:  gathers up to u  -  compute before u  +  slow * gathers after u

because all-gathers slow down the compute that they overlap with by the fraction of the device that they occupy.
Reductions of gradients are the same in reversed time, from the end of the step. If ``slow`` is 1, nothing overlaps and
the result is the time of all gathers.

Blocks are equal, so among them only the first and the last can have the maximum. Each line is therefore linear in their
number.
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
    """The maximum of linear functions of the stages' numbers of blocks.

    base: float64 [lines]. slope: float64 [lines, stages].
    """

    base: np.ndarray
    slope: np.ndarray

    def at(self, counts: np.ndarray) -> tuple[float, int]:
        """(the maximum for these numbers of blocks, the index of the line that has it)."""
        values = self.base + self.slope @ counts
        k = int(values.argmax())
        return float(values[k]), k


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """The first action of a stage, which waits for its all-gathers, or the last one, for which its reductions wait.

    before: how often each kind of action of each stage precedes it on its rank (or follows it, for the last action),
    float64 [kinds, stages].
    """

    stage: int
    kind: Kind
    before: np.ndarray


@lru_cache(maxsize=4096)
def starts(schedule: Schedule, rank: int, *, back: bool) -> tuple[Start, ...]:
    """The starts of a rank's stages, in order. back: those of the reductions, in reversed time."""
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
    """The once-per-step collectives of each stage, and the compute that they overlap with, by unit.

    The units are the part before the stage's equal blocks (one unit or several), one block, and the part after them.

    gathers, sums: seconds of all-gathers and of reductions, float64 [units, stages]; the last unit but one is a block.
    compute: seconds of one micro-batch, float64 [kinds, units, stages]. slow: the fraction of a device that collectives
    occupy, 1 if nothing overlaps, float64 [ranks].
    """

    gathers: np.ndarray
    sums: np.ndarray
    compute: np.ndarray
    slow: np.ndarray

    def exposed(self, schedule: Schedule, rank: int, *, back: bool) -> Lines:
        """The seconds by which all-gathers delay the rank's start or, if ``back``, reductions delay its end."""
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
    """(base, slope) of ``Lines`` for the rank's stages only. Cached, because a search asks for the same stages often.

    many: the number of units. moved_: bytes of float64 [units, stages]. compute_: bytes of float64 [kinds, units,
    stages].
    """
    mine = [k for k, r in enumerate(schedule.rank_of) if r == rank]
    sent_s = np.frombuffer(moved_).reshape(many, len(mine))
    compute = np.frombuffer(compute_).reshape(len(Kind), many, len(mine))
    every = starts(schedule, rank, back=back)
    whole = np.stack([sent_s[:-2].sum(axis=0) + sent_s[-1], sent_s[-2]])  # (without blocks, per block)
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
    """For each unit that may have the maximum: (seconds of collectives up to it, seconds of compute before it).

    Both are float64 [2]: the seconds without blocks, and the seconds per block. exposable, compute: float64 [units];
    the last unit but one is a block.
    """
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
    """The exposed seconds of the collectives of a single stage.

    sent, compute: seconds, float64 [units]; the last unit but one is a block.

    >>> exposed_s(np.array([0, 1.0, 0]), np.array([0, 3.0, 0]), 4, 0.0)
    1.0
    >>> exposed_s(np.array([0, 1.0, 0]), np.array([0, 3.0, 0]), 4, 1.0)
    4.0
    """
    return float((exposed_lines(sent, compute, slow) @ np.array([1.0, blocks])).max())


def exposed_lines(sent: np.ndarray, compute: np.ndarray, slow: float) -> np.ndarray:
    """The lines whose maximum is ``exposed_s``: (seconds without blocks, seconds per block), float64 [lines, 2]."""
    total = np.array([sent[:-2].sum() + sent[-1], sent[-2]])
    return np.array([g - c + slow * (total - g) for g, c in units(sent, compute)])
