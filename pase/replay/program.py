"""One iteration of one rank as tasks with edges, from its events: launching threads, streams, waits, hand-offs.

A CPU thread becomes a chain of tasks: the work between two driver calls, the call, the next work …; calls that
neither launch nor wait (queries, polls) are part of the work. A blocked call becomes its wait (an edge from
what it waits for) and its own work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from pase.replay.graph import EDGES
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, Mark, Timeline

__all__ = ["Program", "extract"]

HOST = KINDS.index("host")
RUNTIME = KINDS.index("runtime")
ANNOTATION = KINDS.index("annotation")

_SYNC = re.compile(
    r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip)Memcpy$|^cuMemcpy[DH]to[DH](_v2)?$"
    r"|^gloo wait$"
)
_WAIT = re.compile(r"StreamWaitEvent")
_IDLE_NS = 200_000
"""A thread without any event for this long may be waiting for another thread."""
_RETURN_NS = 60_000
"""A call that ends within this time after a device op has probably waited for it."""
_BLOCKED_NS = 20_000
_PAUSE_NS = 30_000
_RESUME_NS = 15_000
"""An op resumes within this time of the event that its stream waited for."""
_QUEUE = 256
"""Fewest outstanding device ops at which a slow launch is taken for a full launch queue."""

_E = {k: i for i, k in enumerate(EDGES)}


@dataclass(kw_only=True)
class Program:
    """Tasks of one rank and iteration. Times in ns relative to the iteration's start on the rank's clock."""

    rank: int
    iteration: int
    keys: list[tuple[object, ...]] = field(default_factory=list)
    device: list[tuple[str, str]] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
    edges: dict[tuple[int, int], int] = field(default_factory=dict)
    blocked: dict[int, int] = field(default_factory=dict)
    """Call task → task that it was seen to wait for, in this iteration."""
    root: int = -1
    tail: int = -1
    _taken: set[tuple[object, ...]] = field(default_factory=set)
    busy_until: dict[str, int] = field(default_factory=dict)
    """Stream → when the previous iteration's last op on it ended, where that is after this one's start."""

    def task(
        self,
        key: tuple[object, ...],
        device: tuple[str, str],
        name: str,
        kind: int,
        start: int,
        end: int,
        event: int = -1,
    ) -> int:
        while key in self._taken:
            key = (*key, "again")
        self._taken.add(key)
        self.keys.append(key)
        self.device.append(device)
        self.name.append(name)
        self.kind.append(kind)
        self.start.append(start)
        self.end.append(max(start, end))
        self.event.append(event)
        return len(self.keys) - 1

    def edge(self, src: int, dst: int, kind: str) -> None:
        if src >= 0 and dst >= 0 and src != dst:
            self.edges.setdefault((src, dst), _E[kind])


@dataclass(frozen=True, kw_only=True)
class _Thread:
    lane: int
    label: str
    calls: np.ndarray
    """Events of relevant calls, in time order."""
    busy: np.ndarray
    """Merged intervals of activity, int64 [k, 2]."""


def extract(t: Timeline, mark: Mark, scratch: dict[str, object] | None = None) -> Program:
    """The program of one rank and iteration."""
    p = Program(rank=mark.rank, iteration=mark.iteration)
    zero = mark.start_ns
    here = np.flatnonzero((t.rank_of == mark.rank) & (t["iteration"] == mark.iteration))
    kind = t["kind"][here]
    ops = here[np.isin(kind, GPU_KINDS)]
    ops = ops[np.argsort(t["start_ns"][ops], kind="stable")]
    calls = here[(kind == RUNTIME)]
    of_op = dict(zip(t["correlation"][ops].tolist(), range(len(ops)), strict=True))
    of_op.pop(-1, None)
    op_task = _device_tasks(t, p, ops, zero)
    threads = _threads(t, here, calls, of_op)
    call_task, work_task = _host_tasks(t, p, threads, mark, of_op, ops)
    _handoffs(t, p, threads, call_task, work_task, mark)
    _stream_edges(t, p, ops, op_task)
    launched = _launch_edges(t, p, threads, work_task, of_op, op_task)
    _stream_waits(t, p, ops, op_task, threads, of_op, launched)
    _unexplained_waits(p, op_task)
    _sync_edges(t, p, threads, call_task, of_op, op_task, ops)
    _queue_depth(t, p, threads, call_task, of_op, op_task)
    _previous_backlog(t, p, mark, ops)
    return p


def _device_tasks(t: Timeline, p: Program, ops: np.ndarray, zero: int) -> list[int]:
    seen: dict[tuple[int, int], int] = defaultdict(int)
    lanes, names = t["lane"][ops].tolist(), t["name"][ops].tolist()
    starts, ends = (t["start_ns"][ops] - zero).tolist(), (t.end_ns[ops] - zero).tolist()
    kinds = t["kind"][ops].tolist()
    out = []
    for e, lane, name, s, f, k in zip(ops.tolist(), lanes, names, starts, ends, kinds, strict=True):
        label, text = t.lanes[lane].name, t.names[name]
        n = seen[(lane, name)] = seen[(lane, name)] + 1
        out.append(p.task(("op", p.rank, label, text, n), (label, "stream"), text, k, s, f, e))
    return out


def _threads(t: Timeline, here: np.ndarray, calls: np.ndarray, of_op: dict[int, int]) -> list[_Thread]:
    names = [bool(_SYNC.search(n)) or bool(_WAIT.search(n)) for n in t.names]
    relevant = np.array(names, dtype=bool)[t["name"][calls]] if len(calls) else np.zeros(0, bool)
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
        out.append(_Thread(lane=lane, label="", calls=mine, busy=busy))
    # Thread numbers differ between runs and ranks: name them by their share of calls, most first.
    out.sort(key=lambda x: (-len(x.calls), int(t["start_ns"][x.calls[0]])))
    return [_Thread(lane=x.lane, label=f"thread {i}", calls=x.calls, busy=x.busy) for i, x in enumerate(out)]


def _merge(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Union of intervals, sorted, [k, 2]."""
    if not len(start):
        return np.zeros((0, 2), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    s, reach = start[order], np.maximum.accumulate(end[order])
    first = np.r_[True, s[1:] > reach[:-1]]
    last = np.r_[first[1:], True]
    return np.stack([s[first], reach[last]], axis=1)


def _host_tasks(
    t: Timeline, p: Program, threads: list[_Thread], mark: Mark, of_op: dict[int, int], ops: np.ndarray
) -> tuple[dict[int, int], dict[int, int]]:
    """Work and call tasks in a chain; call event → call task, and → the work task before it."""
    call_task: dict[int, int] = {}
    work_task: dict[int, int] = {}
    main = _main_lane(t, mark)
    for thread in threads:
        device = (thread.label, "thread")
        seen: dict[str, int] = defaultdict(int)
        owner = thread.lane == main
        at = mark.start_ns if owner else int(thread.busy[0, 0])
        previous = -1
        for c in thread.calls.tolist():
            text = t.names[int(t["name"][c])]
            op = of_op.get(int(t["correlation"][c]))
            label = text if op is None else f"{text} {t.names[int(t['name'][ops[op]])]}"
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


def _main_lane(t: Timeline, mark: Mark) -> int:
    """The thread that the step is marked on, −1 where the mark is not an annotation."""
    found = (t["start_ns"] == mark.start_ns) & (t["kind"] == ANNOTATION)
    lanes = [int(x) for x in t["lane"][found] if t.lanes[int(x)].rank == mark.rank]
    return lanes[0] if lanes else -1


def _handoffs(
    t: Timeline,
    p: Program,
    threads: list[_Thread],
    call_task: dict[int, int],
    work_task: dict[int, int],
    mark: Mark,
) -> None:
    """Where a thread idles while another works from start to end of the gap, it started and awaited that work."""
    s0 = mark.start_ns
    main = _main_lane(t, mark)
    if main < 0 and threads:
        main = min(threads, key=lambda x: int(x.busy[0, 0])).lane
    for a in threads:
        # Seen from the thread that starts the others; seen from them, the same alternation would close a circle.
        begins = np.r_[mark.start_ns, t.end_ns[a.calls]] if len(a.calls) else np.zeros(0, np.int64)
        for k, c in enumerate([*a.calls.tolist(), -1]):
            # The idle stretch before call c (or after the last call).
            low = int(begins[k])
            high = int(t["start_ns"][c]) if c >= 0 else int(max(low, mark.end_ns))
            gap = _longest_gap(a.busy, low, high)
            if gap is None:
                continue
            for b in threads:
                if b.lane == a.lane or b.lane == main or (a.lane != main and (k == 0 or c < 0)):
                    continue
                inside = b.calls[(t["start_ns"][b.calls] >= gap[0]) & (t.end_ns[b.calls] <= gap[1])]
                if not len(inside):
                    continue
                spans = b.busy[(b.busy[:, 1] > gap[0]) & (b.busy[:, 0] < gap[1])]
                first, last = int(spans[0, 0]), int(spans[-1, 1])
                covered = int(np.minimum(spans[:, 1], gap[1]).sum() - np.maximum(spans[:, 0], gap[0]).sum())
                if first < gap[0] or last > gap[1] or covered < 0.5 * (gap[1] - gap[0]):
                    continue
                after = work_task[c] if c >= 0 else _tail(p, a)
                device = (a.label, "thread")
                key = p.keys[after]
                start = p.start[after]
                before = p.task(("before hand-off", *key), device, "hand over", HOST, start, int(gap[0]) - s0)
                for (x, y), kind in list(p.edges.items()):
                    if y == after:
                        del p.edges[(x, y)]
                        p.edges[(x, before)] = kind
                if p.root == after:
                    p.root = before
                p.start[after] = int(gap[1]) - s0
                p.edge(before, after, "program")
                head, final = work_task[int(inside[0])], call_task[int(inside[-1])]
                p.start[head] = first - s0
                # Work of the other thread after its last call in the gap is its own; the gap ends with it.
                ending = p.task(
                    ("hand back", *p.keys[final]),
                    (b.label, "thread"),
                    "finish",
                    HOST,
                    p.end[final],
                    last - s0,
                )
                p.edge(before, head, "handoff")
                for (x, y), kind in list(p.edges.items()):
                    # What followed the last call on its own thread now follows the task that hands back.
                    if x == final and kind == _E["program"]:
                        del p.edges[(x, y)]
                        p.edges[(ending, y)] = kind
                        p.start[y] = max(p.start[y], last - s0)
                        p.end[y] = max(p.end[y], p.start[y])
                p.edge(final, ending, "program")
                p.edge(ending, after, "handoff")
                break


def _tail(p: Program, a: _Thread) -> int:
    return p.keys.index(("tail", a.label, p.rank))


def _longest_gap(busy: np.ndarray, low: int, high: int) -> tuple[int, int] | None:
    """The longest idle stretch of a thread within [low, high), None where it is short."""
    if high - low < _IDLE_NS:
        return None
    inside = busy[(busy[:, 1] > low) & (busy[:, 0] < high)]
    edges = np.r_[low, inside.ravel(), high].reshape(-1, 2)
    length = edges[:, 1] - edges[:, 0]
    i = int(length.argmax())
    return (int(edges[i, 0]), int(edges[i, 1])) if length[i] >= _IDLE_NS else None


def _stream_edges(t: Timeline, p: Program, ops: np.ndarray, op_task: list[int]) -> None:
    last: dict[int, int] = {}
    for e, task in zip(t["lane"][ops].tolist(), op_task, strict=True):
        if e in last:
            p.edge(last[e], task, "stream")
        last[e] = task


def _launch_edges(
    t: Timeline,
    p: Program,
    threads: list[_Thread],
    work_task: dict[int, int],
    of_op: dict[int, int],
    op_task: list[int],
) -> dict[int, int]:
    """An op may start once its launch has begun, so it hangs on the work before the call; op → call event."""
    launched: dict[int, int] = {}
    for thread in threads:
        for c in thread.calls.tolist():
            op = of_op.get(int(t["correlation"][c]))
            if op is not None:
                p.edge(work_task[c], op_task[op], "launch")
                launched[op] = c
    return launched


def _stream_waits(
    t: Timeline,
    p: Program,
    ops: np.ndarray,
    op_task: list[int],
    threads: list[_Thread],
    of_op: dict[int, int],
    launched: dict[int, int],
) -> None:
    """Cross-stream edges: from stated data flow, from StreamWaitEvent calls, or from times alone."""
    lane = t["lane"][ops].tolist()
    names = [t.names[n] for n in t["name"][ops].tolist()]
    start, end = t["start_ns"][ops].tolist(), t.end_ns[ops].tolist()
    if t.dataflow and any(n in t.dataflow for n in names):
        _dataflow_waits(t, p, op_task, lane, names, end, start)
        return
    if launched:
        for thread in threads:
            # A wait binds the stream of the next launch to what the other streams were last given.
            waiting = False
            last_on: dict[int, int] = {}
            for c in thread.calls.tolist():
                if _WAIT.search(t.names[int(t["name"][c])]):
                    waiting = True
                    continue
                op = of_op.get(int(t["correlation"][c]))
                if op is None:
                    continue
                if waiting:
                    for other, before in last_on.items():
                        if other != lane[op] and end[before] <= start[op] + 1000:
                            p.edge(op_task[before], op_task[op], "wait")
                waiting = False
                last_on[lane[op]] = op
        return


def _unexplained_waits(p: Program, op_task: list[int]) -> None:
    """An op that starts after a pause which nothing known explains, just as one on another stream ends, waited."""
    if not op_task:
        return
    bound = dict.fromkeys(op_task, -(1 << 62))
    for a, b in p.edges:
        if b in bound:
            bound[b] = max(bound[b], p.end[a])
    by_end = sorted(op_task, key=lambda i: p.end[i])
    ends = np.array([p.end[i] for i in by_end])
    for i in op_task:
        if p.start[i] - bound[i] < _PAUSE_NS:
            continue
        k = int(np.searchsorted(ends, p.start[i], side="right")) - 1
        while k >= 0 and p.start[i] - int(ends[k]) < _RESUME_NS:
            if p.device[by_end[k]] != p.device[i]:
                p.edge(by_end[k], i, "wait")
                break
            k -= 1


def _dataflow_waits(
    t: Timeline,
    p: Program,
    op_task: list[int],
    lane: list[int],
    names: list[str],
    end: list[int],
    start: list[int],
) -> None:
    """XLA: a collective stream waits for all compute launched before; compute waits where data flow says."""
    seen: dict[str, int] = {}
    last_on: dict[int, int] = {}
    for i, n in enumerate(names):
        if int(p.kind[op_task[i]]) == COLLECTIVE:
            for other, before in last_on.items():
                if other != lane[i] and end[before] <= start[i] + 1000:
                    p.edge(op_task[before], op_task[i], "wait")
        for source in t.dataflow.get(n, ()):
            j = seen.get(source)
            if j is not None and lane[j] != lane[i] and end[j] <= start[i] + 1000:
                p.edge(op_task[j], op_task[i], "wait")
        seen[n] = i
        last_on[lane[i]] = i


def _sync_edges(
    t: Timeline,
    p: Program,
    threads: list[_Thread],
    call_task: dict[int, int],
    of_op: dict[int, int],
    op_task: list[int],
    ops: np.ndarray,
) -> None:
    """Edges from device ops to the calls that waited for them; the call then keeps only its own work."""
    if not len(ops):
        return
    ends = t.end_ns[ops]
    by_end = np.argsort(ends, kind="stable")
    sorted_ends = ends[by_end]
    for thread in threads:
        for c in thread.calls.tolist():
            text = t.names[int(t["name"][c])]
            start, end = int(t["start_ns"][c]), int(t.end_ns[c])
            op = of_op.get(int(t["correlation"][c]))
            waits: int | None = None
            if op is not None and int(ends[op]) <= end and end - start > _BLOCKED_NS:
                waits = op
            elif _SYNC.search(text):
                k = int(np.searchsorted(sorted_ends, end, side="right")) - 1
                waits = int(by_end[k]) if k >= 0 else None
            if waits is None:
                continue
            done = int(ends[waits])
            if waits != op and int(t["start_ns"][ops[waits]]) > end:
                continue
            task = call_task[c]
            p.edge(op_task[waits], task, "sync")
            if text == "gloo wait":  # for all that were asked for, whichever is last this time
                for k in by_end[: int(np.searchsorted(sorted_ends, end, side="right"))].tolist():
                    p.edge(op_task[k], task, "sync")
            if start < done <= end:
                p.blocked[task] = op_task[waits]


def _queue_depth(
    t: Timeline,
    p: Program,
    threads: list[_Thread],
    call_task: dict[int, int],
    of_op: dict[int, int],
    op_task: list[int],
) -> None:
    """A full launch queue: a slow launch with many ops outstanding waits until the op ``depth`` before is done."""
    for thread in threads:
        launches = [c for c in thread.calls.tolist() if int(t["correlation"][c]) in of_op]
        if len(launches) < 2 * _QUEUE:
            continue
        op = [op_task[of_op[int(t["correlation"][c])]] for c in launches]
        length = t.end_ns[launches] - t["start_ns"][launches]
        slow = length > max(10 * float(np.median(length)), _BLOCKED_NS)
        finished = np.sort(np.array([p.end[i] for i in op]))
        call = [call_task[c] for c in launches]
        outstanding = np.arange(1, len(op) + 1) - np.searchsorted(
            finished, [p.end[i] for i in call], side="right"
        )
        deep = slow & (outstanding > _QUEUE)
        if deep.sum() < 8:
            continue
        depth = int(np.median(outstanding[deep]))
        for k in range(depth, len(op)):
            if abs(int(outstanding[k]) - depth) <= depth // 8 and deep[k]:
                p.blocked[call[k]] = op[k - depth]
            p.edge(op[k - depth], call[k], "depth")


def _previous_backlog(t: Timeline, p: Program, mark: Mark, ops: np.ndarray) -> None:
    earlier = np.isin(t["kind"], GPU_KINDS) & (t.rank_of == mark.rank)
    if not len(ops):
        return
    mine = t["start_ns"][ops]
    for lane in np.unique(t["lane"][ops]).tolist():
        first = int(mine[t["lane"][ops] == lane].min())
        before = earlier & (t["lane"] == lane) & (t["start_ns"] < first) & (t.end_ns > mark.start_ns)
        if before.any():
            p.busy_until[t.lanes[lane].name] = int(t.end_ns[before].max()) - mark.start_ns
