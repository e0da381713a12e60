"""Finds equal runs in a list of equations: layers that a program writes out one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

__all__ = ["crossing", "equal_runs"]

_FEWEST = 3
"""The smallest number of equal runs of equations that counts as a repeated block."""
_LONGEST = 20_000

Crossing = TypeVar("Crossing")


def equal_runs(
    tokens: Sequence[object], heavy: Callable[[int, int], bool], alive: Callable[[], np.ndarray]
) -> list[tuple[int, int]]:
    """The longest sequence of equal runs, as (start, stop) of each; empty if there is none.

    tokens: values that are equal for equal equations.
    heavy(start, stop): whether these equations contain enough work.
    alive(): the bytes that are live before each equation (``crossing``). Runs are cut where they are fewest.
    """
    n = len(tokens)
    if not 2 * _FEWEST <= n <= _LONGEST or not heavy(0, n):
        return []
    numbers: dict[object, int] = {}
    token = np.array([numbers.setdefault(t, len(numbers)) for t in tokens])
    best = (0, 0, 0)  # (equations covered, start, period)
    for period in range(1, n // _FEWEST + 1):
        equal = np.append(token[:-period] == token[period:], False)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
        counts = (edges[1::2] - edges[::2]) // period + 1
        for run in np.flatnonzero((counts >= _FEWEST) & (counts * period > best[0])).tolist():
            start, covered = int(edges[2 * run]), int(counts[run]) * period
            if covered > best[0] and heavy(start, start + period):
                best = (covered, start, period)
    covered, start, period = best
    if not covered:
        return []
    cut = alive()
    shift = min(range(period), key=lambda o: (cut[start + o], o))
    count = covered // period - (shift > 0)
    return [(start + shift + k * period, start + shift + (k + 1) * period) for k in range(count)]


def crossing(
    made: Mapping[Crossing, int], last: Mapping[Crossing, int], nbytes: Callable[[Crossing], int], n: int
) -> np.ndarray:
    """The bytes made before equation i and used from there on, as int64 [equations + 1].

    made, last: value -> the equation that makes it, and the last equation that reads it.
    """
    out = np.zeros(n + 2, dtype=np.int64)
    for v, i in made.items():
        if v in last:
            out[i + 1] += nbytes(v)
            out[last[v] + 1] -= nbytes(v)
    return np.cumsum(out)[: n + 1]
