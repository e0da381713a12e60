"""Extracts one iteration of one rank as tasks with edges: launching threads, streams, waits and hand-offs.

A CPU thread becomes a chain of tasks that alternates between the work between two driver calls and a call. Calls that
neither launch nor wait (queries, polls) are part of the work. A blocked call becomes a wait (an edge from the task it
waits for) and the call's own work.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from pase.replay.measurement.handoff import add_handoffs, main_lane
from pase.replay.measurement.tasks import RankProgram, Thread
from pase.replay.measurement.waits import SYNC, WAIT, Launches, add_waits
from pase.replay.types import BESIDE, KINDS, Mark, Timeline, on_stream

__all__ = ["RankProgram", "extract"]

HOST = KINDS.index("host")
RUNTIME = KINDS.index("runtime")


def extract(t: Timeline, mark: Mark, before: RankProgram | None = None) -> RankProgram:
    """Returns the program of one rank and iteration. before: the previous iteration's, whose ops it may wait for."""
    p = RankProgram(rank=mark.rank, iteration=mark.iteration, zero_ns=mark.start_ns)
    here = np.flatnonzero((t.rank_of == mark.rank) & (t["iteration"] == mark.iteration))
    kind = t["kind"][here]
    ops = here[on_stream(kind)]
    ops = ops[np.argsort(t["start_ns"][ops], kind="stable")]
    calls = here[(kind == RUNTIME)]
    op_task = _device_tasks(t, p, ops, mark.start_ns)
    of_op = _launched(t, ops)
    threads = _threads(t, here, calls, of_op)
    call_task, work_task = _host_tasks(t, p, threads, mark, of_op, ops)
    add_handoffs(t, p, threads, call_task, work_task, mark)
    launches = Launches(
        threads=threads, ops=ops, task=op_task, of_call=of_op, call_task=call_task, work_task=work_task
    )
    _previous_backlog(t, p, mark, ops)
    add_waits(t, p, launches, before)
    return p


def _launched(t: Timeline, ops: np.ndarray) -> dict[int, list[int]]:
    """Returns correlation id → the ops that the call launched, in order of time: one op, or all of a CUDA graph."""
    out: dict[int, list[int]] = {}
    for i, c in enumerate(t["correlation"][ops].tolist()):
        if c >= 0:
            out.setdefault(c, []).append(i)
    return out


def _device_tasks(t: Timeline, p: RankProgram, ops: np.ndarray, zero: int) -> list[int]:
    seen: dict[tuple[str, int], int] = defaultdict(int)
    names, kinds = t["name"][ops].tolist(), t["kind"][ops].tolist()
    starts, ends = (t["start_ns"][ops] - zero).tolist(), (t.end_ns[ops] - zero).tolist()
    queues = _queues(t, ops, starts, ends)
    out = []
    for e, queue, name, s, f, k in zip(ops.tolist(), queues, names, starts, ends, kinds, strict=True):
        stream, text = queue.partition(BESIDE)[0], t.names[name]
        n = seen[(stream, name)] = seen[(stream, name)] + 1
        out.append(p.task(("op", p.rank, stream, text, n), (queue, "stream"), text, k, s, f, e))
    return out


def _queues(t: Timeline, ops: np.ndarray, starts: list[int], ends: list[int]) -> list[str]:
    """Returns the queue of each op, and shortens ops in ``ends`` that overlap with their successor.

    The ops that are launched on one stream of a GPU run in order, but the next one may begin while the last blocks of
    an op still run (programmatic dependent launch, tails of CUDA graphs). That time counts for the next op. An op that
    ends within another one runs beside it, as branches of CUDA graphs do.
    """
    shared = {(x.rank, x.stream) for x in t.lanes if x.device and BESIDE in x.name}
    out = []
    last: dict[tuple[int, str], int] = {}
    beside: dict[tuple[int, str], list[int]] = {}
    launched = (t["correlation"][ops] >= 0).tolist()
    for i, lane in enumerate(t["lane"][ops].tolist()):
        info = t.lanes[lane]
        stream = (info.rank, info.stream)
        if stream not in shared or not launched[i]:
            out.append(info.name)
            continue
        before = last.get(stream, -1)
        if before >= 0 and ends[i] < ends[before]:
            # It gets the first queue beside the stream that is free.
            busy = beside.setdefault(stream, [])
            slot = next((k for k, end in enumerate(busy) if end <= starts[i]), len(busy))
            busy[slot : slot + 1] = [ends[i]]
            out.append(f"{info.stream}{BESIDE}{slot + 2}")
            continue
        if before >= 0:
            ends[before] = min(ends[before], max(starts[i], starts[before]))
        last[stream] = i
        out.append(info.stream)
    return out


def _threads(t: Timeline, here: np.ndarray, calls: np.ndarray, of_op: dict[int, list[int]]) -> list[Thread]:
    relevant = t.named(SYNC.search, calls) | t.named(WAIT.search, calls)
    relevant |= np.fromiter(
        (c in of_op for c in t["correlation"][calls].tolist()), dtype=bool, count=len(calls)
    )
    launching = {int(x) for x in np.unique(t["lane"][calls[relevant]])}
    active = here[np.isin(t["kind"][here], (HOST, RUNTIME))]
    out = []
    for lane in sorted(launching):
        mine = calls[relevant & (t["lane"][calls] == lane)]
        mine = mine[np.argsort(t["start_ns"][mine], kind="stable")]
        events = active[t["lane"][active] == lane]
        busy = _merge(t["start_ns"][events], t.end_ns[events])
        out.append(Thread(lane=lane, label="", calls=mine, busy=busy))
    # Thread ids differ between runs and ranks, so name threads by their number of calls, most first.
    out.sort(key=lambda x: (-len(x.calls), int(t["start_ns"][x.calls[0]])))
    return [Thread(lane=x.lane, label=f"thread {i}", calls=x.calls, busy=x.busy) for i, x in enumerate(out)]


def _merge(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns the union of intervals, sorted, int64 [k, 2]."""
    if not len(start):
        return np.zeros((0, 2), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    s, reach = start[order], np.maximum.accumulate(end[order])
    first = np.r_[True, s[1:] > reach[:-1]]
    last = np.r_[first[1:], True]
    return np.stack([s[first], reach[last]], axis=1)


def _host_tasks(
    t: Timeline,
    p: RankProgram,
    threads: list[Thread],
    mark: Mark,
    of_op: dict[int, list[int]],
    ops: np.ndarray,
) -> tuple[dict[int, int], dict[int, int]]:
    """Adds each thread's chain of work and call tasks. Returns call event → call task, and call event → the work task
    before it."""
    call_task: dict[int, int] = {}
    work_task: dict[int, int] = {}
    main = main_lane(t, mark)
    for thread in threads:
        device = (thread.label, "thread")
        seen: dict[str, int] = defaultdict(int)
        owner = thread.lane == main
        at = mark.start_ns if owner else int(thread.busy[0, 0])
        previous = -1
        for c in thread.calls.tolist():
            text = t.names[int(t["name"][c])]
            op = of_op.get(int(t["correlation"][c]))
            label = text if op is None else f"{text} {t.names[int(t['name'][ops[op[0]]])]}"
            n = seen[label] = seen[label] + 1
            start, end = int(t["start_ns"][c]), int(t.end_ns[c])
            key = (thread.label, p.rank, label, n)
            s0 = mark.start_ns
            work = p.task(("work", *key), device, f"before {text}", HOST, min(at, start) - s0, start - s0)
            call = p.task(("call", *key), device, text, RUNTIME, start - s0, end - s0, c)
            p.edge(previous, work, "program")
            p.edge(work, call, "program")
            if previous < 0 and owner:
                p.root = work
            work_task[c], call_task[c] = work, call
            at, previous = end, call
        stop = mark.end_ns if owner else int(thread.busy[-1, 1])
        s0 = mark.start_ns
        tail = p.task(
            ("tail", thread.label, p.rank), device, "after the last call", HOST, at - s0, max(at, stop) - s0
        )
        p.edge(previous, tail, "program")
        if owner:
            p.tail = tail
    return call_task, work_task


def _previous_backlog(t: Timeline, p: RankProgram, mark: Mark, ops: np.ndarray) -> None:
    earlier = on_stream(t["kind"]) & (t.rank_of == mark.rank)
    if not len(ops):
        return
    mine = t["start_ns"][ops]
    for lane in np.unique(t["lane"][ops]).tolist():
        first = int(mine[t["lane"][ops] == lane].min())
        before = earlier & (t["lane"] == lane) & (t["start_ns"] < first) & (t.end_ns > mark.start_ns)
        if before.any():
            p.busy_until[t.lanes[lane].name] = int(t.end_ns[before].max()) - mark.start_ns
