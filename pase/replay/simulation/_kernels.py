"""The event simulation with one queue per device, compiled by numba.

Tasks have numbers 0..n−1, a device device[i] and a duration[i] ≥ 0. Edges are in CSR
form by source (ptr, dst, lag ≥ 0). A task is ready at the maximum of finish + lag over its predecessors, and not before
release[i]. Among the ready tasks of a device, the one with the smallest (priority, ready time, number) runs first. A
device runs one task at a time and never idles while a task is ready. Tasks with gang[i] = g ≥ 0 form one collective:
each member occupies its device from its own start until the start of the latest member plus its own duration.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase.compiled import jit

__all__ = ["simulate"]


@jit()
def _less(priority, ready, by_ready, a, b):
    """Whether task a is before task b in a queue: by ready time, or by (priority, ready time); then by number."""
    if not by_ready and priority[a] != priority[b]:
        return priority[a] < priority[b]
    if ready[a] != ready[b]:
        return ready[a] < ready[b]
    return a < b


@jit()
def _push(heap, base, size, task, priority, ready, by_ready):
    i = size
    heap[base + i] = task
    while i > 0:
        up = (i - 1) // 2
        if not _less(priority, ready, by_ready, heap[base + i], heap[base + up]):
            break
        heap[base + i], heap[base + up] = heap[base + up], heap[base + i]
        i = up


@jit()
def _pop(heap, base, size, priority, ready, by_ready):
    """Removes and returns the first task of a queue that has ``size`` tasks."""
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


@jit()
def _heap_push(times, who, size, time, device):
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


@jit()
def _heap_pop(times, who, size):
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


class Simulation(NamedTuple):
    """The tasks of ``simulate``, the results so far, and the queues.

    missing: int64 [n], the number of predecessors that have not finished.
    base: int64 [devices + 1], where each device's queues begin in ``waiting`` and ``open_``. A device has two queues of
    ``*_size`` tasks: ``waiting`` has tasks whose ready time is known, by that time; ``open_`` has tasks whose ready
    time has come.
    free: when each device becomes free. blocked: whether it is in a collective. last: its last task.
    promised: when its next scheduled start is.
    arrived, latest, head: for each gang, the number of started members, the latest of them, and the head of the linked
    list ``chain`` of its members.
    heap_time, heap_who: a heap of (time, device) of scheduled starts.
    pending: tasks that end together.
    counts: int64 [2], the number of scheduled starts in the heap and of started tasks.
    """

    device: np.ndarray
    duration: np.ndarray
    priority: np.ndarray
    gang: np.ndarray
    gang_size: np.ndarray
    ptr: np.ndarray
    dst: np.ndarray
    lag: np.ndarray
    start: np.ndarray
    finish: np.ndarray
    ready: np.ndarray
    ready_cause: np.ndarray
    cause: np.ndarray
    order: np.ndarray
    missing: np.ndarray
    base: np.ndarray
    waiting: np.ndarray
    waiting_size: np.ndarray
    open_: np.ndarray
    open_size: np.ndarray
    free: np.ndarray
    blocked: np.ndarray
    last: np.ndarray
    promised: np.ndarray
    arrived: np.ndarray
    latest: np.ndarray
    chain: np.ndarray
    head: np.ndarray
    heap_time: np.ndarray
    heap_who: np.ndarray
    pending: np.ndarray
    counts: np.ndarray


_TURNS, _DONE = 0, 1  # indices of ``counts``


# Inlined, because numba counts a reference for each array of a tuple that is passed to a call.
@jit(inline=True)
def _wait(s, i):
    """Queues task i, all of whose predecessors have finished, until its ready time."""
    d = s.device[i]
    _push(s.waiting, s.base[d], s.waiting_size[d], i, s.priority, s.ready, True)
    s.waiting_size[d] += 1


@jit(inline=True)
def _promise(s, d):
    """Schedules the next start on device d, which has a queued task, unless an earlier start is scheduled."""
    when = s.free[d]
    if not s.open_size[d]:
        when = max(when, s.ready[s.waiting[s.base[d]]])
    if when < s.promised[d]:
        s.promised[d] = when
        _heap_push(s.heap_time, s.heap_who, s.counts[_TURNS], when, d)
        s.counts[_TURNS] += 1


@jit(inline=True)
def _take(s, d, now):
    """Removes and returns the task that device d runs now."""
    b = s.base[d]
    while s.waiting_size[d] and s.ready[s.waiting[b]] <= now:
        i = _pop(s.waiting, b, s.waiting_size[d], s.priority, s.ready, True)
        s.waiting_size[d] -= 1
        _push(s.open_, b, s.open_size[d], i, s.priority, s.ready, False)
        s.open_size[d] += 1
    i = _pop(s.open_, b, s.open_size[d], s.priority, s.ready, False)
    s.open_size[d] -= 1
    return i


@jit(inline=True)
def _begin(s, i, now):
    """Starts task i, and records the cause of its start time: the device's previous task, or the last dependency."""
    d = s.device[i]
    s.start[i] = now
    if s.last[d] >= 0 and s.free[d] >= s.ready[i]:
        s.cause[i] = s.last[d]
    else:
        s.cause[i] = s.ready_cause[i]
    s.order[s.counts[_DONE]] = i
    s.counts[_DONE] += 1
    s.last[d] = i


@jit(inline=True)
def _end(s, i, now):
    """Puts the tasks whose end is now known into ``pending`` and returns their number.

    These are task i or, if it is the last member of a collective, all members.
    """
    g = s.gang[i]
    if g < 0:
        s.finish[i] = now + s.duration[i]
        s.pending[0] = i
        return 1
    s.arrived[g] += 1
    s.chain[i] = s.head[g]
    s.head[g] = i
    s.blocked[s.device[i]] = True
    if s.latest[g] < 0 or s.start[s.latest[g]] < now:
        s.latest[g] = i
    ended = 0
    if s.arrived[g] == s.gang_size[g]:
        at = s.start[s.latest[g]]
        j = s.head[g]
        while j >= 0:
            s.finish[j] = at + s.duration[j]
            s.blocked[s.device[j]] = False
            s.pending[ended] = j
            ended += 1
            j = s.chain[j]
    return ended


@jit(inline=True)
def _hand_on(s, j):
    """Updates the ready times of the successors of task j, whose end is known."""
    for e in range(s.ptr[j], s.ptr[j + 1]):
        t = s.dst[e]
        when = s.finish[j] + s.lag[e]
        if when > s.ready[t] or (s.ready_cause[t] < 0 and when >= s.ready[t]):
            s.ready[t] = when
            s.ready_cause[t] = j
        s.missing[t] -= 1
        if s.missing[t] == 0:
            _wait(s, t)
            if not s.blocked[s.device[t]] and s.device[t] != s.device[j]:
                _promise(s, s.device[t])


@jit()
def _new(tasks):
    """Returns the initial state, in which no task has started."""
    device, gang_size, dst = tasks.device, tasks.gang_size, tasks.dst
    n, devices = len(device), len(tasks.device_free)
    missing = np.zeros(n, np.int64)
    for t in dst:
        missing[t] += 1
    base = np.zeros(devices + 1, np.int64)
    for d in device:
        base[d + 1] += 1
    for d in range(devices):
        base[d + 1] += base[d]
    turns = 2 * n + 3 * devices + 8
    return Simulation(
        device=device,
        duration=tasks.duration,
        priority=tasks.priority,
        gang=tasks.gang,
        gang_size=gang_size,
        ptr=tasks.ptr,
        dst=dst,
        lag=tasks.lag,
        start=np.full(n, np.nan),
        finish=np.full(n, np.nan),
        ready=tasks.release.copy(),
        ready_cause=np.full(n, -1, np.int64),
        cause=np.full(n, -1, np.int64),
        order=np.empty(n, np.int64),
        missing=missing,
        base=base,
        waiting=np.empty(n, np.int64),
        waiting_size=np.zeros(devices, np.int64),
        open_=np.empty(n, np.int64),
        open_size=np.zeros(devices, np.int64),
        free=tasks.device_free.copy(),
        blocked=np.zeros(devices, np.bool_),
        last=np.full(devices, -1, np.int64),
        promised=np.full(devices, np.inf),
        arrived=np.zeros(len(gang_size), np.int64),
        latest=np.full(len(gang_size), -1, np.int64),
        chain=np.full(n, -1, np.int64),
        head=np.full(len(gang_size), -1, np.int64),
        heap_time=np.empty(turns),
        heap_who=np.empty(turns, np.int64),
        pending=np.empty(n + 1, np.int64),
        counts=np.zeros(2, np.int64),
    )


@jit()
def simulate(tasks):
    """Runs the simulation. Returns (start, finish, ready, cause, latest, order, done).

    start, finish, ready: float64 [n]. cause: int64 [n], the task that determines the start; −1 for none.
    latest: int64 [gangs], the last member of each collective to start. order: the first ``done`` entries are the tasks
    in the order in which they started. If ``done < n``, there is a cycle, or collectives wait for each other.
    """
    s = _new(tasks)
    for i in range(len(tasks.device)):
        if s.missing[i] == 0:
            _wait(s, i)
    for d in range(len(tasks.device_free)):
        if s.waiting_size[d]:
            _promise(s, d)
    while s.counts[_TURNS]:
        now, d = s.heap_time[0], s.heap_who[0]
        _heap_pop(s.heap_time, s.heap_who, s.counts[_TURNS])
        s.counts[_TURNS] -= 1
        if s.blocked[d] or now != s.promised[d]:
            continue
        s.promised[d] = np.inf
        i = _take(s, d, now)
        _begin(s, i, now)
        ended = _end(s, i, now)
        for k in range(ended):
            s.free[s.device[s.pending[k]]] = s.finish[s.pending[k]]
        for k in range(ended):
            _hand_on(s, s.pending[k])
        for k in range(ended):
            d = s.device[s.pending[k]]
            if not s.blocked[d] and (s.waiting_size[d] or s.open_size[d]):
                _promise(s, d)
    return s.start, s.finish, s.ready, s.cause, s.latest, s.order, s.counts[_DONE]
