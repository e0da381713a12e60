"""Reshard steps of many canonical cases: in Python until importing numba pays off, then with a compiled kernel."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pase.machine import COLLECTIVES
from pase.tables.reshard_path import canonical_collectives

__all__ = ["expect_alike", "walked"]

_KIND = {kind: k for k, kind in enumerate(COLLECTIVES)}
_IMPORT_CASES = 12_000
"""Python handles this many cases in the time numba takes to import and load its kernel (0.8 s, at 30 to 110 us)."""
_CHUNK = 1 << 12
"""Cases per task of a thread."""

_ROOM = 3
"""The initial number of steps per axis for which there is room."""


class _Walked:
    """Counters that decide when to import numba. Both implementations give the same steps.

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
    loaded = "pase.tables.kernels_walk" in sys.modules
    if not loaded and _Walked.cases + len(cases) * (1 + _Walked.alike) < _IMPORT_CASES:
        _Walked.cases += len(cases)
        return one_by_one(cases)
    return compiled(cases)


def one_by_one(cases: np.ndarray) -> np.ndarray:
    """Reference implementation of ``walked``, in Python."""
    plans = [canonical_collectives(tuple(zip(*case, strict=True))) for case in cases.tolist()]
    out = np.full((3, len(cases), max(map(len, plans), default=0)), -1, dtype=np.int32)
    for u, plan in enumerate(plans):
        for i, (kind, axes, split) in enumerate(plan):
            out[:, u, i] = _KIND[kind], axes, split
    return out


def compiled(cases: np.ndarray) -> np.ndarray:
    """``walked`` with the compiled kernel, on all cores."""
    cases = np.ascontiguousarray(cases, dtype=np.int64)
    room = _ROOM * cases.shape[2]
    while True:
        done, most = _compiled(cases, room)
        if most <= room:
            return done[:, :most].transpose(2, 0, 1)
        room = most


def _compiled(cases: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """The steps, int32 [U, room, 3], cut off after ``room`` steps, and the largest number of steps of any case."""
    from pase.tables.kernels_walk import walk_cases

    done, count = np.empty((len(cases), room, 3), np.int32), np.empty(len(cases), np.int64)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        starts = range(0, len(cases), _CHUNK)
        list(pool.map(lambda i: walk_cases(cases, i, min(i + _CHUNK, len(cases)), done, count), starts))
    return done, int(count.max(initial=0))
