"""Reshard steps of many canonical cases: in Python until the compiled kernel pays off."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from pase.compiled import BreakEven, compiled_copies, is_compiled
from pase.tables import reshard_walk

__all__ = ["expect_alike", "walked"]

_CHUNK = 1 << 12
"""Cases per task of a thread."""

_ROOM = 3
"""The initial number of steps per axis for which there is room."""


_CASE_S = 1e-4
"""About how long Python takes for a case."""


class _Expected:
    """alike: how many more calls of the same size are expected after the next one."""

    alike = 0


def expect_alike(times: int) -> None:
    """Announce how many meshes of the same graph follow the next one, each with about as many new cases.

    If all of them together justify the kernel, it is loaded right away.
    """
    _Expected.alike = times


def walked(cases: np.ndarray) -> np.ndarray:
    """The steps of cases [U, 3, axes] (ways, src, dst): kind (as in COLLECTIVES), axes and split of each step.

    Returns int32 [3, U, most steps], padded with -1. Free steps (slices) are left out.
    """
    seconds = len(cases) * _CASE_S
    return compiled(cases) if KERNEL.pays(seconds, seconds * _Expected.alike) else in_python(cases)


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
    return compiled_copies(reshard_walk)["walk_cases"]


KERNEL = BreakEven(load_s=1.2, compile_s=16.0, cached=lambda: is_compiled(_kernel()))
