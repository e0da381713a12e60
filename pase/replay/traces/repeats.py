"""Finds the iterations of a run in what its device executes: a training loop launches one sequence of ops again and
again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pase.replay.types import COLLECTIVE, KINDS, Mark, Timeline

__all__ = ["Repeats", "found_iterations", "repeats"]

_SAME = 0.98
"""The least fraction of ops that are the same one period later. The others depend on data, or run now and then."""
_CANDIDATES = 64


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Places in a sequence at which a repeated part begins. complete: whether the sequence has all of that part."""

    starts: tuple[int, ...]
    complete: tuple[bool, ...]


def repeats(ops: np.ndarray, start_ns: np.ndarray) -> Repeats | None:
    """Returns where each repetition of a sequence of ops begins; None if the whole is not one part repeated.

    ops: a number for each op, int [ops], in the order in which a stream runs them. start_ns: when they start, int
    [ops]. If the sequence is not a whole number of parts (the profiler was started within an iteration), a part begins
    after the longest pause.

    The layers of a model repeat, too, but what comes before the first and after the last of them does not, so they are
    not taken for iterations: the first op of the sequence has to be the first op of the second part as well, and the
    last op the last op of the part before.

    >>> repeats(np.array([1, 2, 2, 3, 1, 2, 2, 3]), np.arange(8)).starts
    (0, 4)
    >>> repeats(np.array([9, 1, 2, 1, 2, 1, 2, 8]), np.arange(8)) is None
    True
    """
    n = len(ops)
    for period in _periods(ops):
        if period < 2 or ops[0] != ops[period] or ops[-1] != ops[-1 - period]:
            continue
        if float(np.mean(ops[period:] == ops[:-period])) < _SAME:
            continue
        ragged = n % period
        phase = _after_the_pause(start_ns, period) if ragged else 0
        first = ([0] if phase else []) + list(range(phase, n, period))
        ends = [*first[1:], n]
        return Repeats(
            starts=tuple(first),
            complete=tuple(b - a == period for a, b in zip(first, ends, strict=True)),
        )
    return None


def _periods(ops: np.ndarray) -> list[int]:
    """Returns possible lengths of a part, shortest first: the distances between its rarest ops."""
    _, symbol, count = np.unique(ops, return_inverse=True, return_counts=True)
    found: set[int] = set()
    # Ops that occur once are strays, if anything repeats at all.
    for rare in np.argsort(count, kind="stable").tolist():
        if count[rare] < 2:
            continue
        places = np.flatnonzero(symbol == rare)
        distances = np.diff(places)
        # The rarest ops may be twice in a part, as those of a forward and a backward pass.
        found.update(distances[:3].tolist())
        found.update((places[2:] - places[:-2])[:3].tolist())
        if len(found) >= _CANDIDATES:
            break
    return sorted(p for p in found if 2 * p <= len(ops))


def _after_the_pause(start_ns: np.ndarray, period: int) -> int:
    """Returns the place within a part before which the device pauses longest, in the median over the parts."""
    gaps = np.diff(start_ns, prepend=start_ns[0])
    whole = len(gaps) // period * period
    return int(np.median(gaps[:whole].reshape(-1, period)[1:], axis=0).argmax())


def found_iterations(t: Timeline, rank: int) -> tuple[list[Mark], str]:
    """Returns the iterations of a rank that marks none, and how they were found; none if nothing repeats.

    They are repetitions of the kernels on the stream that is busy longest or, if the kernels differ between
    iterations, the calls of the optimizer that PyTorch annotates.
    """
    mine = t.rank_of == rank
    kernels = mine & np.isin(t["kind"], (KINDS.index("kernel"), COLLECTIVE))
    if not kernels.any():
        return [], ""
    busy = np.bincount(t["lane"][kernels], weights=t["duration_ns"][kernels])
    ops = np.flatnonzero(kernels & (t["lane"] == int(busy.argmax())))
    start = t["start_ns"][ops]
    found = repeats(t["name"][ops], start)
    if found is not None:
        end = int(t.end_ns[kernels].max())
        begins = start[list(found.starts)].tolist()
        return _marks(rank, begins, [*begins[1:], end], found.complete), "repetition of its kernels"
    steps = t.named(lambda name: name.startswith("Optimizer.step#"))
    steps = np.flatnonzero(mine & steps & (t["kind"] == KINDS.index("annotation")))
    if len(steps) < 2:
        return [], ""
    name = Counter(t["name"][steps].tolist()).most_common(1)[0][0]
    ends = np.sort(t.end_ns[steps[t["name"][steps] == name]]).tolist()
    begins = [int(t["start_ns"][mine].min()), *ends[:-1]]
    return _marks(rank, begins, ends, (False, *[True] * (len(ends) - 1))), "calls of its optimizer"


def _marks(rank: int, begins: list[int], ends: list[int], complete: tuple[bool, ...]) -> list[Mark]:
    return [
        Mark(rank=rank, iteration=i, start_ns=a, end_ns=max(b, a + 1), complete=whole)
        for i, (a, b, whole) in enumerate(zip(begins, ends, complete, strict=True))
    ]
