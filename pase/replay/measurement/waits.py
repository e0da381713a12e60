"""Finds what device ops and blocked calls of an iteration wait for: launches, their stream, other streams, ops.

If the CPU runs ahead of the device, an op may wait for an op of the previous iteration. Such edges are in
``RankProgram.carried``.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

import numpy as np

from pase.replay.graph import EDGE
from pase.replay.measurement.tasks import RankProgram, Thread
from pase.replay.types import BESIDE, COLLECTIVE, Timeline

__all__ = ["BLOCKED_NS", "SYNC", "WAIT", "Launches", "add_waits"]

SYNC = re.compile(
    r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip)Memcpy$|^cuMemcpy[DH]to[DH](_v2)?$"
    r"|^gloo wait$"
)
"""Driver calls that return when the device has finished some work."""
WAIT = re.compile(r"StreamWaitEvent")
BLOCKED_NS = 20_000
"""A launching call that takes longer than this may be waiting for the op that it launched."""
_PAUSE_NS = 30_000
_RESUME_NS = 15_000
"""A waiting op starts within this time of the event that its stream waited for."""
_QUEUE = 256
"""The smallest number of outstanding device ops at which a slow launch is attributed to a full launch queue."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The ops that a rank's threads launched in an iteration, numbered in the order in which they start."""

    threads: list[Thread]
    ops: np.ndarray
    """Event of each op."""
    task: list[int]
    """Task of each op."""
    of_call: dict[int, list[int]]
    """Correlation id → ops."""
    call_task: dict[int, int]
    """Call event → task of the call."""
    work_task: dict[int, int]
    """Call event → task of the work before the call."""


@dataclass(frozen=True, kw_only=True)
class _Before:
    """Ops of the previous iteration, with times relative to this one's start, sorted by end."""

    keys: list[tuple[object, ...]]
    stream: list[str]
    end: np.ndarray

    def last_on(self) -> dict[str, int]:
        return {s: i for i, s in enumerate(self.stream)}


def _before(p: RankProgram, before: RankProgram | None) -> _Before:
    if before is None:
        return _Before(keys=[], stream=[], end=np.zeros(0, np.int64))
    ops = [i for i, d in enumerate(before.device) if d[1] == "stream"]
    ops.sort(key=lambda i: before.end[i])
    shift = before.zero_ns - p.zero_ns
    return _Before(
        keys=[before.keys[i] for i in ops],
        stream=[before.device[i][0] for i in ops],
        end=np.array([before.end[i] + shift for i in ops], dtype=np.int64),
    )


def add_waits(t: Timeline, p: RankProgram, x: Launches, before: RankProgram | None) -> None:
    """Adds all edges into device ops, and the edges into calls that wait for device ops."""
    old = _before(p, before)
    _stream_edges(t, p, x, old)
    _launch_edges(t, p, x)
    _stream_waits(t, p, x, old)
    _unexplained_waits(p, x, old)
    _sync_edges(t, p, x, old)
    _queue_depth(t, p, x)
    _between_executions(p, x, old)


def _stream_edges(t: Timeline, p: RankProgram, x: Launches, old: _Before) -> None:
    last: dict[str, int] = {}
    ended = old.last_on()
    finished = _Finished(p)
    launched = (t["correlation"][x.ops] >= 0).tolist()
    for e, task, is_launched in zip(t["lane"][x.ops].tolist(), x.task, launched, strict=True):
        queue, stream = p.device[task][0], t.lanes[e].stream
        before = finished.before(stream, task)
        if is_launched and BESIDE in queue and before >= 0:
            # It runs while another op of its stream does (CUDA graphs have branches), so it does not wait for that.
            p.edge(before, task, "stream")
        elif queue in last:
            p.edge(last[queue], task, "stream")
        elif p.root < 0 and p.tail < 0 and old.keys:
            # If no thread marks the steps, an iteration is one execution of a compiled program. It begins when the
            # previous execution has ended completely.
            p.carried[old.keys[-1], task] = EDGE["stream"]
        elif queue in ended:
            p.carried[old.keys[ended[queue]], task] = EDGE["stream"]
        last[queue] = task


class _Finished:
    """The op that ended last on each stream, as one goes through the ops by their starts."""

    def __init__(self, p: RankProgram) -> None:
        self.p = p
        self.running: dict[str, list[tuple[int, int]]] = {}
        self.last: dict[str, tuple[int, int]] = {}

    def before(self, stream: str, task: int) -> int:
        """Returns the op of the stream that ended last before a task begins, −1 for none, and adds the task."""
        running = self.running.setdefault(stream, [])
        while running and running[0][0] <= self.p.start[task]:
            self.last[stream] = max(self.last.get(stream, (-1 << 62, -1)), heapq.heappop(running))
        heapq.heappush(running, (self.p.end[task], task))
        return self.last.get(stream, (0, -1))[1]


def _launch_edges(t: Timeline, p: RankProgram, x: Launches) -> None:
    """Adds launch edges. An op depends on the work before its call, because it may start once the call has begun.

    In a CUDA graph, only the first op of each stream depends on the launch; the others depend on their stream.
    """
    for thread in x.threads:
        for c in thread.calls.tolist():
            streams: set[tuple[str, str]] = set()
            for op in x.of_call.get(int(t["correlation"][c]), ()):
                task = x.task[op]
                if p.device[task] not in streams:
                    streams.add(p.device[task])
                    p.edge(x.work_task[c], task, "launch")


def _stream_waits(t: Timeline, p: RankProgram, x: Launches, old: _Before) -> None:
    """Adds cross-stream edges, from the data flow in the timeline or from StreamWaitEvent calls."""
    names = [t.names[n] for n in t["name"][x.ops].tolist()]
    if t.dataflow and any(n in t.dataflow for n in names):
        _dataflow_waits(t, p, x, names)
        return
    ended = old.last_on()
    for thread in x.threads:
        # A wait makes the stream of the next launch wait for the last ops launched on the other streams.
        waiting = False
        last_on: dict[str, int] = {}
        for c in thread.calls.tolist():
            if WAIT.search(t.names[int(t["name"][c])]):
                waiting = True
                continue
            ops = x.of_call.get(int(t["correlation"][c]))
            if not ops:
                continue
            first = x.task[ops[0]]
            stream = p.device[first][0]
            if waiting:
                for other, task in last_on.items():
                    if other != stream and p.end[task] <= p.start[first] + 1000:
                        p.edge(task, first, "wait")
                for other, i in ended.items():
                    if other != stream and other not in last_on and old.end[i] <= p.start[first] + 1000:
                        p.carried.setdefault((old.keys[i], first), EDGE["wait"])
            waiting = False
            for op in ops:
                last_on[p.device[x.task[op]][0]] = x.task[op]


def _unexplained_waits(p: RankProgram, x: Launches, old: _Before) -> None:
    """Adds an edge if an op starts after an unexplained pause, just when an op on another stream ends."""
    bound = dict.fromkeys(x.task, -(1 << 62))
    for a, b in p.edges:
        if b in bound:
            bound[b] = max(bound[b], p.end[a])
    end_of = {k: int(e) for k, e in zip(old.keys, old.end.tolist(), strict=True)}
    for key, b in p.carried:
        bound[b] = max(bound[b], end_of[key])
    by_end = sorted(x.task, key=lambda i: p.end[i])
    ends = np.array([p.end[i] for i in by_end], dtype=np.int64)
    for i in x.task:
        if p.start[i] - bound[i] < _PAUSE_NS:
            continue
        k = _just_ended(ends, [p.device[j][0] for j in by_end], p.start[i], p.device[i][0])
        if k >= 0:
            p.edge(by_end[k], i, "wait")
            continue
        k = _just_ended(old.end, old.stream, p.start[i], p.device[i][0])
        if k >= 0:
            p.carried.setdefault((old.keys[k], i), EDGE["wait"])


def _just_ended(ends: np.ndarray, stream: list[str], start: int, own: str) -> int:
    """Returns the op on another stream that ended just before ``start``; −1 if there is none."""
    k = int(np.searchsorted(ends, start, side="right")) - 1
    while k >= 0 and start - int(ends[k]) < _RESUME_NS:
        if stream[k] != own:
            return k
        k -= 1
    return -1


def _dataflow_waits(t: Timeline, p: RankProgram, x: Launches, names: list[str]) -> None:
    """Adds the waits of XLA programs: collectives wait for all earlier ops, and compute waits for its operands."""
    seen: dict[str, int] = {}
    last_on: dict[str, int] = {}
    for i, n in zip(x.task, names, strict=True):
        stream = p.device[i][0]
        if p.kind[i] == COLLECTIVE:
            for other, before in last_on.items():
                if other != stream and p.end[before] <= p.start[i] + 1000:
                    p.edge(before, i, "wait")
        for source in t.dataflow.get(n, ()):
            j = seen.get(source)
            if j is not None and p.device[j][0] != stream and p.end[j] <= p.start[i] + 1000:
                p.edge(j, i, "wait")
        seen[n] = i
        last_on[stream] = i


def _sync_edges(t: Timeline, p: RankProgram, x: Launches, old: _Before) -> None:
    """Adds edges from device ops to the calls that waited for them. The wait is then no longer part of the call's
    duration."""
    by_end = sorted(x.task, key=lambda i: p.end[i])
    ends = np.array([p.end[i] for i in by_end], dtype=np.int64)
    backlog = max(p.busy_until.values(), default=-(1 << 62))
    for thread in x.threads:
        for c in thread.calls.tolist():
            text, call = t.names[int(t["name"][c])], x.call_task[c]
            start, end = p.start[call], p.end[call]
            own = [x.task[i] for i in x.of_call.get(int(t["correlation"][c]), ())]
            if own and p.end[own[-1]] <= end and end - start > BLOCKED_NS:
                _blocks(p, own[-1], call)
            elif SYNC.search(text):
                k = int(np.searchsorted(ends, end, side="right")) - 1
                done = int(ends[k]) if k >= 0 else -(1 << 62)
                j = int(np.searchsorted(old.end, end, side="right")) - 1
                if j >= 0 and int(old.end[j]) > max(done, start):
                    p.carried[old.keys[j], call] = EDGE["sync"]
                    p.blocked[call] = int(old.end[j])
                elif not old.keys and max(done, start) < backlog <= end:
                    # It waited for ops that were launched before the trace began.
                    p.blocked[call] = backlog
                elif k >= 0 and p.start[by_end[k]] <= end:
                    _blocks(p, by_end[k], call)
                    if text == "gloo wait":  # it waits for all of them; which one is last varies
                        for i in by_end[: k + 1]:
                            p.edge(i, call, "sync")


def _blocks(p: RankProgram, op: int, call: int) -> None:
    p.edge(op, call, "sync")
    if p.start[call] < p.end[op] <= p.end[call]:
        p.blocked[call] = p.end[op]


def _queue_depth(t: Timeline, p: RankProgram, x: Launches) -> None:
    """Adds waits due to a full launch queue: a slow launch waits for the op that was launched ``depth`` before it."""
    for thread in x.threads:
        launches = [c for c in thread.calls.tolist() if int(t["correlation"][c]) in x.of_call]
        if len(launches) < 2 * _QUEUE:
            continue
        op = [x.task[x.of_call[int(t["correlation"][c])][0]] for c in launches]
        length = t.end_ns[launches] - t["start_ns"][launches]
        slow = length > max(10 * float(np.median(length)), BLOCKED_NS)
        finished = np.sort(np.array([p.end[i] for i in op]))
        call = [x.call_task[c] for c in launches]
        outstanding = np.arange(1, len(op) + 1) - np.searchsorted(
            finished, [p.end[i] for i in call], side="right"
        )
        deep = slow & (outstanding > _QUEUE)
        if deep.sum() < 8:
            continue
        depth = int(np.median(outstanding[deep]))
        for k in range(depth, len(op)):
            if abs(int(outstanding[k]) - depth) <= depth // 8 and deep[k]:
                p.blocked[call[k]] = p.end[op[k - depth]]
            p.edge(op[k - depth], call[k], "depth")


def _between_executions(p: RankProgram, x: Launches, old: _Before) -> None:
    """If no thread marks the steps, adds an edge to each thread that begins after the previous execution has ended."""
    if p.root >= 0 or p.tail >= 0 or not old.keys:
        return
    for thread in x.threads:
        head = x.work_task[int(thread.calls[0])]
        if p.start[head] >= int(old.end[-1]):
            p.carried.setdefault((old.keys[-1], head), EDGE["handoff"])
