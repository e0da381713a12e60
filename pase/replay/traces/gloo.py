"""Models gloo's collectives of PyTorch on CPUs as ops on separate queues, which a thread launches and waits for.

Kineto records a collective twice: ``c10d::allreduce_`` on the calling thread, which returns at once, and
``gloo:all_reduce`` on the worker thread that runs it. Only their order connects the two: a process group gives its work
to its workers in order. A wait has no event, either. It is a gap on the calling thread that ends when a collective
ends. Only functional collectives (of DTensor and FSDP2) record the wait, as an op of the thread.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np

from pase.replay.types import COLLECTIVE, KINDS, Lane, Problem, Timeline

__all__ = ["ASKED", "WAIT", "tie_gloo"]

ASKED = re.compile(r"^c10d::_?(all_?reduce|all_?gather|reduce_scatter|broadcast|all_?to_?all|reduce|barrier)")
WAIT = "gloo wait"
"""The name of the calls that are inserted where a thread waits. ``program`` recognizes it as a waiting call."""
_RECORDED = re.compile(r"^_?c10d_functional::wait_tensor$")
_HOST, _RUNTIME = KINDS.index("host"), KINDS.index("runtime")
_LEAST_NS, _RETURN_NS = 20_000, 10_000_000
"""The shortest gap that counts as a wait, and how long after the collective the gap may end. (Threads on a busy machine
wake late.)"""
_EARLY_NS, _NOTED_NS = 100_000, 5_000_000
"""A worker records a collective's end after it has woken the waiting thread, so a wait may end before the collective's
recorded end: by how much in general, and by how much at the last wait."""


def tie_gloo(t: Timeline) -> Timeline:
    """Returns one rank's timeline in which gloo's collectives are connected with the calls that launched them.

    The k-th collective of an iteration is put on queue k mod workers, because its real worker is random. A timeline
    without gloo is unchanged. Iterations with different numbers of calls and collectives are reported and not
    connected.
    """
    work = np.flatnonzero((t["kind"] == COLLECTIVE) & t.named(lambda name: name.startswith("gloo:")))
    if not len(work):
        return t
    asked = np.flatnonzero((t["kind"] == _HOST) & t.named(ASKED.search))
    work = work[np.argsort(t["start_ns"][work], kind="stable")]
    asked = asked[np.argsort(t["start_ns"][asked], kind="stable")]
    lane, kind, correlation = t["lane"].copy(), t["kind"].copy(), t["correlation"].copy()
    workers = len({int(x) for x in t["lane"][work]})
    rank = int(t.rank_of[work[0]])
    lanes = [*t.lanes, *(Lane(rank=rank, name=f"gloo {k}", device=True) for k in range(workers))]
    uneven = 0
    spans = [(m.start_ns, m.end_ns) for m in t.marks] or [(-(1 << 62), 1 << 62)]
    tied: list[tuple[int, int]] = []
    for start, end in spans:
        calls = _within(t, asked, start, end)
        done = _within(t, work, start, end)
        lane[done] = len(t.lanes) + np.arange(len(done)) % workers
        if len(calls) != len(done):
            uneven += 1
            continue
        tied.extend(zip(calls.tolist(), done.tolist(), strict=True))
    outside = work[lane[work] < len(t.lanes)]
    lane[outside] = len(t.lanes)
    for number, (call, op) in enumerate(tied):
        kind[call] = _RUNTIME
        correlation[call] = correlation[op] = number
    names = t.names if WAIT in t.names else (*t.names, WAIT)
    waited, name = (t["kind"] == _HOST) & t.named(_RECORDED.search), t["name"].copy()
    kind[waited], name[waited] = _RUNTIME, names.index(WAIT)
    length = t["duration_ns"].copy()
    for op, end in _noted_late(t, tied, np.flatnonzero(waited)).items():
        length[op] = end - int(t["start_ns"][op])
    columns = {**t.columns, "lane": lane, "kind": kind, "correlation": correlation, "name": name}
    columns["duration_ns"] = length
    out = replace(t, columns=columns, lanes=tuple(lanes), names=names)
    if uneven:
        what = f"in {uneven} iterations, calls and gloo's collectives differ in number, so they are not connected"
        out = replace(out, problems=(*t.problems, Problem(where=f"rank {rank}", what=what)))
    return _with_waits(out, tied, spans)


def _within(t: Timeline, events: np.ndarray, start: int, end: int) -> np.ndarray:
    at = t["start_ns"][events]
    return events[(at >= start) & (at < end)]


def _noted_late(t: Timeline, tied: list[tuple[int, int]], waits: np.ndarray) -> dict[int, int]:
    """Returns collective → the end of the recorded wait for it, if the collective's own end is recorded later.

    A wait does not record its collective. If only one collective was running, it is that one. Otherwise, it is all
    collectives that end at about the same time.
    """
    if not tied:
        return {}
    begun, ends = (
        np.array(x) for x in (t["start_ns"][[c for c, _ in tied]], t.end_ns[[op for _, op in tied]])
    )
    out: dict[int, int] = {}
    for w in waits.tolist():
        low, high = int(t["start_ns"][w]), int(t.end_ns[w])
        open_then = np.flatnonzero((begun < low) & (ends > low))
        late = ends[open_then] - high
        within = open_then[(late > 0) & (late <= (_NOTED_NS if len(open_then) == 1 else _EARLY_NS))]
        ends[within] = high
        out |= {tied[i][1]: high for i in within.tolist()}
    return out


def _with_waits(t: Timeline, tied: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Timeline:
    """Inserts waiting calls where the calling thread idles until an earlier collective has ended.

    A wait is inserted after the k-th call of an iteration if most iterations have one there. It lasts from the first to
    the last such gap before the next call. If the collectives have already ended, it takes no time.
    """
    found: list[dict[tuple[int, int], tuple[int, int]]] = []
    early: dict[int, int] = {}
    for start, end in spans:
        mine = [(c, op) for c, op in tied if start <= int(t["start_ns"][c]) < end]
        if mine:
            found.append(_waits(t, mine, end, early))
    seen = Counter(place for waits in found for place, (low, high) in waits.items() if high > low)
    rows = [
        (place[0], low, high)
        for waits in found
        for place, (low, high) in waits.items()
        if 2 * seen[place] > len(found)
    ]
    if not rows:
        return t
    fill = {
        "kind": _RUNTIME,
        "name": t.names.index(WAIT),
        "correlation": -1,
        "nbytes": -1,
        "operation": 0,
        "group": -1,
        "shape": -1,
    }
    more = {k: np.full(len(rows), v) for k, v in (fill | {"iteration": -1}).items()}
    more["lane"] = np.array([r[0] for r in rows])
    more["start_ns"] = np.array([r[1] for r in rows])
    more["duration_ns"] = np.array([r[2] - r[1] for r in rows])
    columns = {k: np.concatenate([v, more[k]]).astype(v.dtype) for k, v in t.columns.items()}
    for op, at in early.items():
        columns["duration_ns"][op] = at - columns["start_ns"][op]
    order = np.lexsort((-columns["duration_ns"], columns["start_ns"], columns["lane"]))
    return replace(t, columns={k: v[order] for k, v in columns.items()})


def _waits(
    t: Timeline, tied: list[tuple[int, int]], stop: int, early: dict[int, int]
) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns (lane, index of the previous call on it) → the span of the wait; empty if the thread need not wait.

    early: the function adds corrected ends of collectives that were recorded late.
    """
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for lane in sorted({int(t["lane"][c]) for c, _ in tied}):
        mine = [(c, op) for c, op in tied if t["lane"][c] == lane]
        begun = [int(t["start_ns"][c]) for c, _ in mine]
        ends = np.array([int(t.end_ns[op]) for _, op in mine])
        busy = np.flatnonzero((t["lane"] == lane) & np.isin(t["kind"], (_HOST, _RUNTIME)))
        busy = busy[(t["start_ns"][busy] >= begun[0]) & (t["start_ns"][busy] < stop)]
        busy = busy[np.argsort(t["start_ns"][busy], kind="stable")]
        begin, reach = t["start_ns"][busy], np.maximum.accumulate(t.end_ns[busy])
        for k, after in enumerate([*begun[1:], stop]):
            # The events between this call and the next one. The first gap begins at the call's own end.
            here = np.flatnonzero((begin > begun[k]) & (begin <= after))
            gaps = []
            for i in here.tolist():
                low, high = int(reach[i - 1]), int(begin[i])
                due = np.flatnonzero((ends[: k + 1] > low) & (ends[: k + 1] <= high + _EARLY_NS))
                if high - low >= _LEAST_NS and len(due) and high - int(ends[due].max()) <= _RETURN_NS:
                    gaps.append((low, high))
            if not gaps and after == stop:
                # All ends were recorded late. After the last call, the longest gap before them is the wait.
                idle = [(int(reach[i - 1]), int(begin[i])) for i in here.tolist()]
                idle = [x for x in idle if x[1] - x[0] >= _LEAST_NS and x[0] < int(ends.max())]
                gaps = sorted(idle, key=lambda x: x[0] - x[1])[:1]
            if gaps:
                high = gaps[-1][1]
                for n in np.flatnonzero(
                    (ends[: k + 1] > high) & (ends[: k + 1] <= high + _NOTED_NS)
                ).tolist():
                    ends[n] = early[mine[n][1]] = high
            done = int(ends[: k + 1].max())
            at = next(
                (int(begin[i]) for i in here.tolist() if begin[i] >= max(done, int(reach[i - 1]))), None
            )
            if gaps:
                out[lane, k] = (gaps[0][0], gaps[-1][1])
            elif at is not None:
                out[lane, k] = (at, at)
    return out
