"""What device ops and blocked calls of an iteration wait for: their stream, other streams, launches, each other.

What an op waits for may belong to the iteration before, where the CPU runs ahead of the device: such edges stand in
``RankProgram.carried``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from pase.replay.graph import EDGES
from pase.replay.measurement.tasks import RankProgram, Thread
from pase.replay.types import COLLECTIVE, Timeline

__all__ = ["BLOCKED_NS", "SYNC", "WAIT", "Launches", "add_waits"]

SYNC = re.compile(
    r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip)Memcpy$|^cuMemcpy[DH]to[DH](_v2)?$"
    r"|^gloo wait$"
)
"""Driver calls that return when the device has done something."""
WAIT = re.compile(r"StreamWaitEvent")
BLOCKED_NS = 20_000
"""A call that launches and lasts longer than this may be waiting for what it launched."""
_PAUSE_NS = 30_000
_RESUME_NS = 15_000
"""An op resumes within this time of the event that its stream waited for."""
_QUEUE = 256
"""Fewest outstanding device ops at which a slow launch is taken for a full launch queue."""

_E = {k: i for i, k in enumerate(EDGES)}


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What a rank's threads launched in an iteration. Ops are numbered in the order in which they start."""

    threads: list[Thread]
    ops: np.ndarray
    """Event of each op."""
    task: list[int]
    """Task of each op."""
    of_call: dict[int, list[int]]
    """Correlation id → ops."""
    call_task: dict[int, int]
    work_task: dict[int, int]
    """Call event → task of the call, and of the work before it."""


@dataclass(frozen=True, kw_only=True)
class _Before:
    """Ops of the iteration before, on the clock of this one: sorted by end."""

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
    """All edges into device ops, and those into calls that wait for them."""
    old = _before(p, before)
    _stream_edges(t, p, x, old)
    _launch_edges(t, p, x)
    _stream_waits(t, p, x, old)
    _unexplained_waits(p, x, old)
    _sync_edges(t, p, x, old)
    _queue_depth(t, p, x)
    _between_executions(p, x, old)


def _stream_edges(t: Timeline, p: RankProgram, x: Launches, old: _Before) -> None:
    last: dict[int, int] = {}
    ended = old.last_on()
    for e, task in zip(t["lane"][x.ops].tolist(), x.task, strict=True):
        if e in last:
            p.edge(last[e], task, "stream")
        elif p.root < 0 and p.tail < 0 and old.keys:
            # No thread marks the steps: an iteration is an execution of a program, which begins when all has ended.
            p.carried[old.keys[-1], task] = _E["stream"]
        elif p.device[task][0] in ended:
            p.carried[old.keys[ended[p.device[task][0]]], task] = _E["stream"]
        last[e] = task


def _launch_edges(t: Timeline, p: RankProgram, x: Launches) -> None:
    """An op may start once its launch has begun, so it hangs on the work before the call.

    Of a CUDA graph the first op of each stream hangs on the launch, the others on their stream.
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
    """Cross-stream edges: from stated data flow, or from StreamWaitEvent calls."""
    names = [t.names[n] for n in t["name"][x.ops].tolist()]
    if t.dataflow and any(n in t.dataflow for n in names):
        _dataflow_waits(t, p, x, names)
        return
    ended = old.last_on()
    for thread in x.threads:
        # A wait binds the stream of the next launch to what the other streams were last given.
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
                        p.carried.setdefault((old.keys[i], first), _E["wait"])
            waiting = False
            for op in ops:
                last_on[p.device[x.task[op]][0]] = x.task[op]


def _unexplained_waits(p: RankProgram, x: Launches, old: _Before) -> None:
    """An op that starts after a pause which nothing known explains, just as one on another stream ends, waited."""
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
            p.carried.setdefault((old.keys[k], i), _E["wait"])


def _just_ended(ends: np.ndarray, stream: list[str], start: int, own: str) -> int:
    """The op on another stream that ended just before ``start``, −1 where none did."""
    k = int(np.searchsorted(ends, start, side="right")) - 1
    while k >= 0 and start - int(ends[k]) < _RESUME_NS:
        if stream[k] != own:
            return k
        k -= 1
    return -1


def _dataflow_waits(t: Timeline, p: RankProgram, x: Launches, names: list[str]) -> None:
    """XLA: a collective stream waits for all compute launched before; compute waits where data flow says."""
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
    """Edges from device ops to the calls that waited for them; the call then keeps only its own work."""
    by_end = sorted(x.task, key=lambda i: p.end[i])
    ends = np.array([p.end[i] for i in by_end], dtype=np.int64)
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
                    p.carried[old.keys[j], call] = _E["sync"]
                    p.blocked[call] = int(old.end[j])
                elif k >= 0 and p.start[by_end[k]] <= end:
                    _blocks(p, by_end[k], call)
                    if text == "gloo wait":  # for all that were asked for, whichever is last this time
                        for i in by_end[: k + 1]:
                            p.edge(i, call, "sync")


def _blocks(p: RankProgram, op: int, call: int) -> None:
    p.edge(op, call, "sync")
    if p.start[call] < p.end[op] <= p.end[call]:
        p.blocked[call] = p.end[op]


def _queue_depth(t: Timeline, p: RankProgram, x: Launches) -> None:
    """A full launch queue: a slow launch with many ops outstanding waits until the op ``depth`` before is done."""
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
    """Where no thread marks the steps, a thread that begins when all of the execution before has ended awaited it."""
    if p.root >= 0 or p.tail >= 0 or not old.keys:
        return
    for thread in x.threads:
        head = x.work_task[int(thread.calls[0])]
        if p.start[head] >= int(old.end[-1]):
            p.carried.setdefault((old.keys[-1], head), _E["handoff"])
