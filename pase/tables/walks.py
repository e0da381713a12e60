"""Reshard steps of many canonical cases: in Python until importing numba pays off, then compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from pase.tables import reshard_walk

__all__ = ["expect_alike", "walked"]

_IMPORT_CASES = 12_000
"""Python handles this many cases in the time numba takes to import and load its kernel (0.8 s, at 30 to 110 us)."""
_CHUNK = 1 << 12
"""Cases per task of a thread."""

_ROOM = 3
"""The initial number of steps per axis for which there is room."""


class _Walked:
    """Counters that decide when to import numba. Both ways run the same source.

    cases: the cases that Python has handled in this process. alike: how many more calls of the same size are expected
    after the next one.
    """

    cases = 0
    alike = 0


def expect_alike(times: int) -> None:
    """Announce how many meshes of the same graph follow the next one, each with about as many new cases.

    If all of them together justify the import of numba, it is imported right away.
    """
    _Walked.alike = times


def walked(cases: np.ndarray) -> np.ndarray:
    """The steps of cases [U, 3, axes] (ways, src, dst): kind (as in COLLECTIVES), axes and split of each step.

    Returns int32 [3, U, most steps], padded with -1. Free steps (slices) are left out.
    """
    loaded = _kernel.cache_info().currsize > 0
    if not loaded and _Walked.cases + len(cases) * (1 + _Walked.alike) < _IMPORT_CASES:
        _Walked.cases += len(cases)
        return in_python(cases)
    return compiled(cases)


def in_python(cases: np.ndarray) -> np.ndarray:
    """``walked`` in Python."""
    state, count = reshard_walk.begun(cases.shape[2]), [0] * len(cases)

    def run(room: int) -> np.ndarray:
        done = [[[-1] * 3 for _ in range(room)] for _ in count]
        reshard_walk.walk_cases(cases.tolist(), 0, len(cases), *state, done, count)
        return np.array(done, np.int32).reshape(len(cases), room, 3)

    return _with_room(run, count, cases.shape[2])


def compiled(cases: np.ndarray) -> np.ndarray:
    """``walked`` with the compiled source, on all cores."""
    cases = np.ascontiguousarray(cases, dtype=np.int64)
    state, count = list(map(np.array, reshard_walk.begun(cases.shape[2]))), np.zeros(len(cases), np.int64)
    kernel, starts = _kernel(), range(0, len(cases), _CHUNK)

    def run(room: int) -> np.ndarray:
        done = np.empty((len(cases), room, 3), np.int32)

        def chunk(first: int) -> None:
            kernel(cases, first, min(first + _CHUNK, len(cases)), *(x.copy() for x in state), done, count)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(chunk, starts))
        return done

    return _with_room(run, count, cases.shape[2])


def _with_room(run: Callable[[int], np.ndarray], count: list[int] | np.ndarray, axes: int) -> np.ndarray:
    """The steps [3, U, most steps] that a run finds with enough room. run: from the room for steps to the steps, int32
    [U, room, 3], cut off after ``room``; it sets ``count`` to the number of steps of each case."""
    done = run(room := _ROOM * axes)
    most = max(count, default=0)
    return (done if most <= room else run(most))[:, :most].transpose(2, 0, 1)


@cache
def _kernel() -> Callable[..., None]:
    """The compiled ``reshard_walk.walk_cases``."""
    from pase.compiled import compiled_copies

    return compiled_copies(reshard_walk)["walk_cases"]
