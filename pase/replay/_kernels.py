"""The event simulation: one queue per device, in numba; _twin.py is the same algorithm in plain Python.

Conventions (both): tasks 0..n−1; device[i]; duration[i] ≥ 0; edges in CSR form by source (ptr, dst, lag ≥ 0);
a task is ready at the latest over its predecessors of finish + lag, and never before release[i]. Among the
ready tasks of a device the smallest (priority, ready time, number) runs first; a device runs one task at a
time and never idles while one is ready. Tasks with gang[i] = g ≥ 0 are one collective: each member occupies
its device from its own start until the latest member's start + its own duration.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["simulate"]


@njit(cache=True)
def _less(priority, ready, by_ready, a, b):  # type: ignore[no-untyped-def]
    """Order of tasks a and b in a queue: by ready time, or by (priority, ready time); then by number."""
    if not by_ready and priority[a] != priority[b]:
        return priority[a] < priority[b]
    if ready[a] != ready[b]:
        return ready[a] < ready[b]
    return a < b


@njit(cache=True)
def _push(heap, base, size, task, priority, ready, by_ready):  # type: ignore[no-untyped-def]
    i = size
    heap[base + i] = task
    while i > 0:
        up = (i - 1) // 2
        if not _less(priority, ready, by_ready, heap[base + i], heap[base + up]):
            break
        heap[base + i], heap[base + up] = heap[base + up], heap[base + i]
        i = up


@njit(cache=True)
def _pop(heap, base, size, priority, ready, by_ready):  # type: ignore[no-untyped-def]
    """Remove and return the first task of the queue that has ``size`` tasks."""
    top = heap[base]
    last = size - 1
    heap[base] = heap[base + last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        if child + 1 < last and _less(priority, ready, by_ready, heap[base + child + 1], heap[base + child]):
            child += 1
        if not _less(priority, ready, by_ready, heap[base + child], heap[base + i]):
            break
        heap[base + i], heap[base + child] = heap[base + child], heap[base + i]
        i = child
    return top


@njit(cache=True)
def _turn_push(times, who, size, time, device):  # type: ignore[no-untyped-def]
    i = size
    times[i] = time
    who[i] = device
    while i > 0:
        up = (i - 1) // 2
        if times[i] > times[up] or (times[i] == times[up] and who[i] >= who[up]):
            break
        times[i], times[up] = times[up], times[i]
        who[i], who[up] = who[up], who[i]
        i = up


@njit(cache=True)
def _turn_pop(times, who, size):  # type: ignore[no-untyped-def]
    last = size - 1
    times[0], who[0] = times[last], who[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (
            times[right] < times[child] or (times[right] == times[child] and who[right] < who[child])
        ):
            child = right
        if times[child] > times[i] or (times[child] == times[i] and who[child] >= who[i]):
            break
        times[i], times[child] = times[child], times[i]
        who[i], who[child] = who[child], who[i]
        i = child


@njit(cache=True)
def simulate(  # type: ignore[no-untyped-def]
    device, duration, priority, release, gang, gang_size, ptr, dst, lag, device_free
):
    """start, finish, ready [n] float64, cause [n] int64 (what fixed the start, −1 none), latest, order, done.

    device_free: float64 [devices], when each device is first free. order: tasks as they started, [done].
    ``done < n`` means a cycle, or collectives that wait for each other.
    """
    n = len(device)
    devices = len(device_free)
    start = np.full(n, np.nan)
    finish = np.full(n, np.nan)
    ready = release.copy()
    ready_cause = np.full(n, -1, np.int64)
    cause = np.full(n, -1, np.int64)
    missing = np.zeros(n, np.int64)
    for e in range(len(dst)):
        missing[dst[e]] += 1
    base = np.zeros(devices + 1, np.int64)
    for i in range(n):
        base[device[i] + 1] += 1
    for d in range(devices):
        base[d + 1] += base[d]
    waiting = np.empty(n, np.int64)
    open_ = np.empty(n, np.int64)
    waiting_size = np.zeros(devices, np.int64)
    open_size = np.zeros(devices, np.int64)
    free = device_free.copy()
    blocked = np.zeros(devices, np.bool_)
    last = np.full(devices, -1, np.int64)
    promised = np.full(devices, np.inf)
    arrived = np.zeros(len(gang_size), np.int64)
    latest = np.full(len(gang_size), -1, np.int64)
    # Members of each gang as they arrive, in a linked list.
    chain = np.full(n, -1, np.int64)
    head = np.full(len(gang_size), -1, np.int64)
    turn_time = np.empty(2 * n + 3 * devices + 8)
    turn_who = np.empty(2 * n + 3 * devices + 8, np.int64)
    turns = 0
    order = np.empty(n, np.int64)
    done = 0
    # A task that finished hands its time on; pending holds such tasks.
    pending = np.empty(n + 1, np.int64)
    for i in range(n):
        if missing[i] == 0:
            d = device[i]
            _push(waiting, base[d], waiting_size[d], i, priority, ready, True)
            waiting_size[d] += 1
    for d in range(devices):
        if waiting_size[d]:
            promised[d] = max(free[d], ready[waiting[base[d]]])
            _turn_push(turn_time, turn_who, turns, promised[d], d)
            turns += 1
    while turns:
        now = turn_time[0]
        d = turn_who[0]
        _turn_pop(turn_time, turn_who, turns)
        turns -= 1
        if blocked[d] or now != promised[d]:
            continue
        promised[d] = np.inf
        b = base[d]
        while waiting_size[d] and ready[waiting[b]] <= now:
            i = _pop(waiting, b, waiting_size[d], priority, ready, True)
            waiting_size[d] -= 1
            _push(open_, b, open_size[d], i, priority, ready, False)
            open_size[d] += 1
        i = _pop(open_, b, open_size[d], priority, ready, False)
        open_size[d] -= 1
        start[i] = now
        # What fixed the start: the device's previous task, or the last dependency.
        if last[d] >= 0 and free[d] >= ready[i]:
            cause[i] = last[d]
        else:
            cause[i] = ready_cause[i]
        order[done] = i
        done += 1
        last[d] = i
        ended = 0
        g = gang[i]
        if g < 0:
            finish[i] = now + duration[i]
            pending[0] = i
            ended = 1
        else:
            arrived[g] += 1
            chain[i] = head[g]
            head[g] = i
            blocked[d] = True
            if latest[g] < 0 or start[latest[g]] < now:
                latest[g] = i
            if arrived[g] == gang_size[g]:
                at = start[latest[g]]
                j = head[g]
                while j >= 0:
                    finish[j] = at + duration[j]
                    blocked[device[j]] = False
                    pending[ended] = j
                    ended += 1
                    j = chain[j]
        for k in range(ended):
            free[device[pending[k]]] = finish[pending[k]]
        for k in range(ended):
            j = pending[k]
            dj = device[j]
            for e in range(ptr[j], ptr[j + 1]):
                t = dst[e]
                when = finish[j] + lag[e]
                if when > ready[t] or (ready_cause[t] < 0 and when >= ready[t]):
                    ready[t] = when
                    ready_cause[t] = j
                missing[t] -= 1
                if missing[t] == 0:
                    dt = device[t]
                    _push(waiting, base[dt], waiting_size[dt], t, priority, ready, True)
                    waiting_size[dt] += 1
                    if not blocked[dt] and dt != dj:
                        when = max(free[dt], ready[waiting[base[dt]]])
                        if open_size[dt]:
                            when = free[dt]
                        if when < promised[dt]:
                            promised[dt] = when
                            _turn_push(turn_time, turn_who, turns, when, dt)
                            turns += 1
        for k in range(ended):
            dj = device[pending[k]]
            if not blocked[dj] and (waiting_size[dj] or open_size[dj]):
                when = free[dj]
                if not open_size[dj]:
                    when = max(when, ready[waiting[base[dj]]])
                if when < promised[dj]:
                    promised[dj] = when
                    _turn_push(turn_time, turn_who, turns, when, dj)
                    turns += 1
    return start, finish, ready, cause, latest, order, done
