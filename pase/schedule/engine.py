"""The event loop of the evaluator: jobs on exclusive resources, given as plain arrays.

One function runs either compiled by numba or as ordinary Python. A test checks that both give the same result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pase.compiled import BreakEven, compiled_copies, is_compiled
from pase.schedule import engine_loop

__all__ = ["run_jobs"]

_JOB_S = 2e-6
"""About how long Python takes for a job."""


def run_jobs(*, kernel: str = "auto", **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start and the end of every job, float64 [jobs]; nan for a job that never becomes ready.

    seconds: float64 [J], the duration.
    resource: int64 [J], the resource that the job takes; -1 for none.
    rank: int64 [J], distinct; lower ranks go first.
    npred: int64 [J], the number of predecessors.
    succ_ptr, succ: the successors as compressed sparse rows (CSR).
    hold: float64 [J], seconds from ready to startable.
    size: float64 [J], counted against credit, float64 [R].
    strict: bool [R]. A strict resource runs its jobs strictly by rank, one at a time. Any other resource runs the first
        ready job.

    Resource 0 is dispatched before the others, so that they see a tensor that a block of zero length makes.
    """
    if kernel == "auto":
        kernel = "numba" if KERNEL.pays(arrays["seconds"].size * _JOB_S) else "python"
    loop = _loop(kernel)
    order = np.lexsort((arrays["rank"], arrays["resource"]))
    first = np.searchsorted(arrays["resource"][order], np.arange(arrays["strict"].size + 1))
    names = ("seconds", "resource", "rank", "npred", "succ_ptr", "succ", "hold", "size", "credit", "strict")
    a: list[np.ndarray] = [arrays[k] for k in names] + [order.astype(np.int64), first.astype(np.int64)]
    if kernel == "python":  # Python indexes lists several times faster than arrays
        jobs = arrays["seconds"].size
        start, end = [float("nan")] * jobs, [float("nan")] * jobs
        loop(*(x.tolist() for x in a), start, end)
        return np.asarray(start), np.asarray(end)
    out_start, out_end = np.full(arrays["seconds"].size, np.nan), np.full(arrays["seconds"].size, np.nan)
    a[3] = a[3].copy()
    loop(*a, out_start, out_end)
    return out_start, out_end


@cache
def _loop(kernel: str) -> Any:
    return compiled_copies(engine_loop)["loop"] if kernel == "numba" else engine_loop.loop


KERNEL = BreakEven(load_s=0.6, compile_s=2.0, cached=lambda: is_compiled(_loop("numba")))
