"""The event simulation in plain Python, to which the compiled one is compared."""

from __future__ import annotations

import heapq
from unittest.mock import patch

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.simulation import _kernels
from pase.replay.simulation.simulate import Replay, Tasks, replay_graph


def simulate(
    tasks: Tasks,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """As ``_kernels.simulate``."""
    device, duration, priority, release, gang, gang_size, ptr, dst, lag, device_free = tasks
    n = len(device)
    start, finish = np.full(n, np.nan), np.full(n, np.nan)
    ready = release.astype(float)
    ready_cause, cause = [-1] * n, np.full(n, -1, dtype=np.int64)
    missing = np.bincount(dst, minlength=n)
    free, last = device_free.astype(float), [-1] * len(device_free)
    blocked = [False] * len(device_free)
    # For each device: tasks whose ready time is known, and tasks whose ready time has come.
    waiting: list[list[tuple[float, int]]] = [[] for _ in device_free]
    choice: list[list[tuple[int, float, int]]] = [[] for _ in device_free]
    members: list[list[int]] = [[] for _ in gang_size]
    latest = np.full(len(gang_size), -1, dtype=np.int64)
    order: list[int] = []
    for i in np.flatnonzero(missing == 0).tolist():
        heapq.heappush(waiting[device[i]], (ready[i], i))

    def next_start(d: int) -> float:
        if blocked[d]:
            return np.inf
        if choice[d]:
            return float(free[d])
        return max(float(free[d]), waiting[d][0][0]) if waiting[d] else np.inf

    turns = [(next_start(d), d) for d in range(len(device_free))]
    heapq.heapify(turns)
    while turns:
        now, d = heapq.heappop(turns)
        if now == np.inf or now != next_start(d):
            continue
        while waiting[d] and waiting[d][0][0] <= now:
            r, i = heapq.heappop(waiting[d])
            heapq.heappush(choice[d], (int(priority[i]), r, i))
        i = heapq.heappop(choice[d])[2]
        start[i] = now
        cause[i] = last[d] if last[d] >= 0 and free[d] >= ready[i] else ready_cause[i]
        last[d] = i
        order.append(i)
        g = int(gang[i])
        ended = [i]
        if g < 0:
            finish[i] = now + duration[i]
        else:
            members[g].append(i)
            blocked[d] = True
            if latest[g] < 0 or start[latest[g]] < now:
                latest[g] = i
            ended = members[g][::-1] if len(members[g]) == gang_size[g] else []
            for j in ended:
                finish[j] = start[latest[g]] + duration[j]
                blocked[device[j]] = False
        touched = {int(device[j]) for j in ended}
        for j in ended:
            free[device[j]] = finish[j]
        for j in ended:
            for e in range(ptr[j], ptr[j + 1]):
                t = int(dst[e])
                when = finish[j] + lag[e]
                if when > ready[t] or (ready_cause[t] < 0 and when >= ready[t]):
                    ready[t], ready_cause[t] = when, j
                missing[t] -= 1
                if missing[t] == 0:
                    heapq.heappush(waiting[device[t]], (ready[t], t))
                    touched.add(int(device[t]))
        for x in touched:
            heapq.heappush(turns, (next_start(x), x))
    return start, finish, ready, cause, latest, np.array(order, dtype=np.int64), len(order)


def replayed(g: DataflowGraph) -> Replay:
    """The replay of a graph by the simulation in plain Python."""
    with patch.object(_kernels, "simulate", simulate):
        return replay_graph(g)
