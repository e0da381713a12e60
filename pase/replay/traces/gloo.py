"""PyTorch on CPUs: gloo's collectives as ops of queues of their own, that a thread asks for and waits for.

Kineto records a collective twice: ``c10d::allreduce_`` on the thread that asks, which returns at once, and
``gloo:all_reduce`` on the worker thread that does it. Nothing ties the two together but their order: a process group
hands its work to its workers one after the other. Waiting leaves no event either: it is a gap on the asking thread
that ends as a collective does. Functional collectives (DTensor's, FSDP2's) alone record it, as an op of the thread.
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
"""Name of the calls put where a thread waited; ``program`` knows it as a call that waits."""
_RECORDED = re.compile(r"^_?c10d_functional::wait_tensor$")
_HOST, _RUNTIME = KINDS.index("host"), KINDS.index("runtime")
_LEAST_NS, _RETURN_NS = 20_000, 10_000_000
"""Shortest gap taken for a wait; how long after the collective it may end: threads on a busy machine wake late."""
_EARLY_NS, _NOTED_NS = 100_000, 5_000_000
"""A worker notes a collective's end after it has woken who waits for it: how much later a gap that nothing else ends
may be over, and how late an end after the last such gap is still taken to have been awaited."""


def tie_gloo(t: Timeline) -> Timeline:
    """One rank's timeline in which gloo's collectives (kind collective, lane "gloo") hang on the calls that asked.

    The k-th collective of an iteration is put on worker k mod workers: which one took it is chance. Unchanged where
    there is none; iterations in which calls and collectives differ in number are left untied, and reported.
    """
    work = np.flatnonzero((t["kind"] == COLLECTIVE) & _named(t, r"^gloo:"))
    if not len(work):
        return t
    asked = np.flatnonzero((t["kind"] == _HOST) & _named(t, ASKED.pattern))
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
    waited, name = (t["kind"] == _HOST) & _named(t, _RECORDED.pattern), t["name"].copy()
    kind[waited], name[waited] = _RUNTIME, names.index(WAIT)
    length = t["duration_ns"].copy()
    for op, end in _noted_late(t, tied, np.flatnonzero(waited)).items():
        length[op] = end - int(t["start_ns"][op])
    columns = {**t.columns, "lane": lane, "kind": kind, "correlation": correlation, "name": name}
    columns["duration_ns"] = length
    out = replace(t, columns=columns, lanes=tuple(lanes), names=names)
    if uneven:
        what = f"calls and gloo's work differ in number in {uneven} iterations, which are left untied"
        out = replace(out, problems=(*t.problems, Problem(where=f"rank {rank}", what=what)))
    return _with_waits(out, tied, spans)


def _named(t: Timeline, pattern: str) -> np.ndarray:
    return np.array([bool(re.search(pattern, n)) for n in t.names], dtype=bool)[t["name"]]


def _within(t: Timeline, events: np.ndarray, start: int, end: int) -> np.ndarray:
    at = t["start_ns"][events]
    return events[(at >= start) & (at < end)]


def _noted_late(t: Timeline, tied: list[tuple[int, int]], waits: np.ndarray) -> dict[int, int]:
    """Collectives whose end is noted after a recorded wait for them is over → when that was.

    A wait does not say for what it is: if one collective alone was under way it is that one, else those that are noted
    at about the same time.
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
    """Calls where the asking thread idles until a collective that it asked for before has ended.

    A wait is placed after the k-th call of an iteration if most iterations show it there. It lasts from the first such
    gap before the next call to the last; where the collectives were done already, it takes no time.
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
    """(lane, calls of that lane so far) -> when the thread waits there; an empty span where it need not.

    early: filled with the ends of collectives that were noted late.
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
            # What lies between this call and the next; its own end bounds the first gap.
            here = np.flatnonzero((begin > begun[k]) & (begin <= after))
            gaps = []
            for i in here.tolist():
                low, high = int(reach[i - 1]), int(begin[i])
                due = np.flatnonzero((ends[: k + 1] > low) & (ends[: k + 1] <= high + _EARLY_NS))
                if high - low >= _LEAST_NS and len(due) and high - int(ends[due].max()) <= _RETURN_NS:
                    gaps.append((low, high))
            if not gaps and after == stop:
                # All ends were noted late: behind the last call the longest gap before them is the wait.
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
