"""The event loop of the evaluator: jobs on exclusive resources, given as plain arrays.

One function runs either compiled by numba or as ordinary Python. A test checks that both give the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from pase.compiled import BreakEven, compiled_copies, is_compiled
from pase.schedule import engine_loop
from pase.schedule.engine_loop import JobColumns, RealColumn, ResourceColumns, WholeColumn

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
    arrays |= {
        "npred": arrays["npred"].copy(),
        "order": order.astype(np.int64),
        "first": first.astype(np.int64),
    }
    start, end = (np.full(arrays["seconds"].size, np.nan) for _ in range(2))
    if kernel == "python":  # Python indexes lists several times faster than arrays
        lists = {name: x.tolist() for name, x in arrays.items()}
        out = start.tolist(), end.tolist()
        loop(*_grouped(lists), *out)
        return np.asarray(out[0]), np.asarray(out[1])
    loop(*_grouped(arrays), start, end)
    return start, end


def _grouped(columns: Mapping[str, WholeColumn | RealColumn]) -> tuple[JobColumns, ResourceColumns]:
    return (
        JobColumns(*(columns[name] for name in JobColumns._fields)),  # type: ignore[arg-type]
        ResourceColumns(*(columns[name] for name in ResourceColumns._fields)),  # type: ignore[arg-type]
    )


@cache
def _loop(kernel: str) -> Any:
    return compiled_copies(engine_loop)["loop"] if kernel == "numba" else engine_loop.loop


KERNEL = BreakEven(load_s=0.6, compile_s=2.0, cached=lambda: is_compiled(_loop("numba")))
