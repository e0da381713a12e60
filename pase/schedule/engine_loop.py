"""The event loop of `engine`. The same source runs as Python and compiled."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np

__all__ = ["JobColumns", "ResourceColumns", "loop"]

WholeColumn: TypeAlias = "list[int] | np.ndarray"
"""Integers, one for each job or resource: a list if the loop runs as Python, an array if it is compiled."""
RealColumn: TypeAlias = "list[float] | np.ndarray"


class JobColumns(NamedTuple):
    """What `engine.run_jobs` is told of jobs. npred is counted down to 0 while the loop runs."""

    seconds: RealColumn
    resource: WholeColumn
    rank: WholeColumn
    npred: WholeColumn
    succ_ptr: WholeColumn
    succ: WholeColumn
    hold: WholeColumn
    size: RealColumn


class ResourceColumns(NamedTuple):
    """What `engine.run_jobs` is told of resources. ``order[first[r]:first[r + 1]]`` are the jobs of resource r by
    rank."""

    credit: RealColumn
    strict: WholeColumn
    order: WholeColumn
    first: WholeColumn


def loop(jobs: JobColumns, resources: ResourceColumns, start: RealColumn, end: RealColumn) -> None:
    """Fill start and end."""
    seconds, resource, rank, npred, succ_ptr, succ, hold, size = jobs
    credit, strict, order, first = resources
    is_ready = [False for _ in range(len(seconds))]
    pointer = [first[r] for r in range(len(strict))]
    queues = [[(rank[0], 0)] for _ in range(len(strict))]
    fifos = [[0] for _ in range(len(strict))]
    head = [1 for _ in range(len(strict))]
    in_flight = [0.0 for _ in range(len(strict))]
    running = [-1 for _ in range(len(strict))]
    for r in range(len(strict)):
        queues[r].pop()
    # events: (time, 0 = done | 1 = startable, job)
    events = [(0.0, 1, j) for j in range(len(seconds)) if npred[j] == 0]
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
        for r in range(len(strict)):
            if r == 1 and len(events) > 0 and events[0][0] == now:
                break  # another event happens at this time: process it before a link chooses a message
            job = -1
            if strict[r]:
                if running[r] < 0 and pointer[r] < first[r + 1] and is_ready[order[pointer[r]]]:
                    job = order[pointer[r]]
                    pointer[r] += 1
            else:
                while len(queues[r]) > 0 and in_flight[r] < credit[r]:
                    _, sent = heapq.heappop(queues[r])
                    in_flight[r] += size[sent]
                    fifos[r].append(sent)
                if running[r] < 0 and head[r] < len(fifos[r]):
                    job = fifos[r][head[r]]
                    head[r] += 1
            if job >= 0:
                running[r] = job
                start[job] = now
                heapq.heappush(events, (now + seconds[job], 0, job))
