"""The event loop under the evaluator: jobs on exclusive resources, as plain arrays.

One function, run by numba or as ordinary Python; a test holds the two to the same answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["run_jobs"]

NUMBA_FROM_JOBS = 200_000
"""Below this many jobs plain Python takes less than loading the compiled loop."""


def run_jobs(*, kernel: str = "auto", **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every job, float64 [jobs]; nan for a job that never became ready.

    seconds: float64 [J]; resource: int64 [J], -1 = takes none; rank: int64 [J], distinct: lower goes first;
    npred: int64 [J]; succ_ptr, succ: CSR of successors; hold: float64 [J], seconds from ready to startable;
    size: float64 [J], counted against credit: float64 [R];
    strict: bool [R]: jobs strictly by rank, else the first ready one; strict resources take one at a time.
    Resource 0 is dispatched before the others, so that a tensor made by a block of no length is seen.
    """
    if kernel == "auto":
        kernel = "numba" if arrays["seconds"].size >= NUMBA_FROM_JOBS else "python"
    loop = _loop(kernel)
    order = np.lexsort((arrays["rank"], arrays["resource"]))
    first = np.searchsorted(arrays["resource"][order], np.arange(arrays["strict"].size + 1))
    names = ("seconds", "resource", "rank", "npred", "succ_ptr", "succ", "hold", "size", "credit", "strict")
    a: list[np.ndarray] = [arrays[k] for k in names] + [order.astype(np.int64), first.astype(np.int64)]
    if kernel == "python":  # lists are several times faster to index than arrays
        jobs = arrays["seconds"].size
        start, end = [float("nan")] * jobs, [float("nan")] * jobs
        loop(*(x.tolist() for x in a), start, end)
        return np.asarray(start), np.asarray(end)
    out_start, out_end = np.full(arrays["seconds"].size, np.nan), np.full(arrays["seconds"].size, np.nan)
    a[3] = a[3].copy()
    loop(*a, out_start, out_end)
    return out_start, out_end


def _loop(kernel: str) -> Any:
    if kernel == "numba":
        from pase.schedule import kernels_engine

        return kernels_engine.loop
    from pase.schedule import engine_loop

    return engine_loop.loop
