"""The event loop under the evaluator: jobs on exclusive resources, as plain arrays.

One function, run by numba or as ordinary Python; a test holds the two to the same answer.
"""

from __future__ import annotations

import heapq
from functools import cache
from typing import Any

import numpy as np

__all__ = ["run_jobs"]

NUMBA_FROM_JOBS = 20_000
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
    loop = _compiled() if kernel == "numba" else _loop
    order = np.lexsort((arrays["rank"], arrays["resource"]))
    first = np.searchsorted(arrays["resource"][order], np.arange(arrays["strict"].size + 1))
    names = ("seconds", "resource", "rank", "npred", "succ_ptr", "succ", "hold", "size", "credit", "strict")
    a: list[Any] = [arrays[k] for k in names] + [order.astype(np.int64), first.astype(np.int64)]
    if kernel == "python":  # lists are several times faster to index than arrays
        jobs = arrays["seconds"].size
        start, end = [float("nan")] * jobs, [float("nan")] * jobs
        loop(*(x.tolist() for x in a), start, end)
        return np.asarray(start), np.asarray(end)
    out_start, out_end = np.full(arrays["seconds"].size, np.nan), np.full(arrays["seconds"].size, np.nan)
    a[3] = a[3].copy()
    loop(*a, out_start, out_end)
    return out_start, out_end


@cache
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True)(_loop)


def _loop(
    seconds: Any,
    resource: Any,
    rank: Any,
    npred: Any,
    succ_ptr: Any,
    succ: Any,
    hold: Any,
    size: Any,
    credit: Any,
    strict: Any,
    order: Any,
    first: Any,
    start: Any,
    end: Any,
) -> None:
    """Fill start and end. ``order[first[r]:first[r + 1]]`` are the jobs of resource r by rank."""
    resources = len(strict)
    jobs = len(seconds)
    is_ready = [False for _ in range(jobs)]
    pointer = [first[r] for r in range(resources)]
    queues = [[(rank[0], 0)] for _ in range(resources)]
    fifos = [[0] for _ in range(resources)]
    head = [1 for _ in range(resources)]
    in_flight = [0.0 for _ in range(resources)]
    running = [-1 for _ in range(resources)]
    for r in range(resources):
        queues[r].pop()
    # events: (time, 0 = done | 1 = startable, job)
    events = [(0.0, 1, j) for j in range(jobs) if npred[j] == 0]
    for i in range(len(events)):
        events[i] = (hold[events[i][2]], 1, events[i][2])
    heapq.heapify(events)

    while len(events) > 0:
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            _, what, job = heapq.heappop(events)
            r = resource[job]
            if what == 1:
                if r < 0:
                    start[job] = now
                    heapq.heappush(events, (now + seconds[job], 0, job))
                else:
                    is_ready[job] = True
                    if not strict[r]:
                        heapq.heappush(queues[r], (rank[job], job))
                continue
            end[job] = now
            if r >= 0:
                running[r] = -1
                in_flight[r] -= size[job]
            for k in range(succ_ptr[job], succ_ptr[job + 1]):
                s = succ[k]
                npred[s] -= 1
                if npred[s] == 0:
                    heapq.heappush(events, (now + hold[s], 1, s))
        for r in range(resources):
            if r == 1 and len(events) > 0 and events[0][0] == now:
                break  # something more becomes ready at this very moment: look before a link commits
            if strict[r]:
                if running[r] < 0 and pointer[r] < first[r + 1] and is_ready[order[pointer[r]]]:
                    job = order[pointer[r]]
                    pointer[r] += 1
                    running[r] = job
                    start[job] = now
                    heapq.heappush(events, (now + seconds[job], 0, job))
                continue
            while len(queues[r]) > 0 and in_flight[r] < credit[r]:
                _, job = heapq.heappop(queues[r])
                in_flight[r] += size[job]
                fifos[r].append(job)
            if running[r] < 0 and head[r] < len(fifos[r]):
                job = fifos[r][head[r]]
                head[r] += 1
                running[r] = job
                start[job] = now
                heapq.heappush(events, (now + seconds[job], 0, job))
