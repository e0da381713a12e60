"""Breaks measured iterations down into compute, communication, waiting, and idle time by cause.

Nothing is replayed. The trace is divided into the iterations found by ``iterations``, and the parts of an iteration add
up to its length, to the nanosecond. Communication is exposed while the rank computes nothing. It is compared with
kernels for NCCL, with XLA's ops for XLA's collectives, and with the ops of the threads for gloo.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from pase.replay.measurement.iterations import Iteration
from pase.replay.measurement.model import Measured
from pase.replay.measurement.waits import BLOCKED_NS, SYNC
from pase.replay.types import COLLECTIVE, KINDS, Timeline, on_stream

__all__ = ["CAUSES", "Blocked", "Breakdown", "breakdowns"]

CAUSES = {
    "compute": "computing",
    "communication": "communicating, while nothing computes",
    "rank": "waiting in a collective for another rank",
    "launch": "idle: the CPU had not launched the next op yet",
    "blocking": "idle: the CPU was held up by a blocking copy or a synchronisation and had nothing queued",
    "allocator": "idle: the CPU was in the driver's memory allocator",
    "data": "idle: the CPU was loading data",
    "stream": "idle: between ops that were queued, event and stream latencies included",
    "unexplained": "idle: nothing in the trace shows why the next op had not begun",
}
"""The causes, with their descriptions. Every moment of an iteration has the first cause that applies, in this order."""

_HOST, _RUNTIME, _ANNOTATION, _MEMCPY = (KINDS.index(k) for k in ("host", "runtime", "annotation", "memcpy"))
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free)(Async|Host|Managed|Pitch)?$|^cu(Mem(Alloc|Free)|MemCreate|MemMap)"
)
_DATA = re.compile(r"DataLoader|enumerate\(|dataloader|next_batch|data_iter", re.IGNORECASE)
_PLAIN_NS = 50_000
"""If a queued op begins within this time of the previous one, the gap needs no other cause."""


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """Calls of one name and place that blocked their thread. where: the user's line or the framework's op."""

    name: str
    where: str
    count: int
    total_ns: int
    longest_ns: int
    nbytes: int
    """Bytes that the longest call copies; −1 if it copies nothing or the size is not in the trace."""
    event: int
    """Event index of the longest call."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """One rank's steady iterations. total_ns: the sum of their lengths. parts: (cause, detail) → ns, with that sum."""

    rank: int
    iterations: tuple[int, ...]
    total_ns: int
    parts: dict[tuple[str, str], int]
    blocked: tuple[Blocked, ...]
    communication_ns: int
    """Total time in which collectives run, exposed or not. Overlapping collectives count once."""

    def mean_ns(self, cause: str) -> float:
        """Mean time of a cause per iteration, in ns."""
        return sum(v for (k, _), v in self.parts.items() if k == cause) / len(self.iterations)

    @property
    def iteration_ns(self) -> float:
        return self.total_ns / len(self.iterations)

    @property
    def idle_ns(self) -> float:
        """Mean time per iteration in which no device op runs, in ns."""
        return sum(self.mean_ns(c) for c in list(CAUSES)[3:])

    @property
    def exposed_ns(self) -> float:
        """Mean exposed communication per iteration, including waiting for other ranks, in ns."""
        return self.mean_ns("communication") + self.mean_ns("rank")


def breakdowns(m: Measured) -> list[Breakdown]:
    """Returns a breakdown of the steady iterations for each rank."""
    t, rank_of = m.timeline, m.timeline.rank_of
    last = _last_of_gang(m)
    out = []
    for rank in sorted({r for r, _ in m.programs}):
        here = np.flatnonzero(rank_of == rank)
        view = _RankView(t, rank, here)
        parts: Counter[tuple[str, str]] = Counter()
        spans = [m.iteration_of[rank, i] for i in m.steady() if (rank, i) in m.iteration_of]
        for span in spans:
            view.add(span, m.wait_ns, last, parts)
        out.append(
            Breakdown(
                rank=rank,
                iterations=tuple(s.number for s in spans),
                total_ns=sum(s.end_ns - s.begin_ns for s in spans),
                parts=dict(parts),
                blocked=view.blocked(spans),
                communication_ns=sum(view.communication(s) for s in spans),
            )
        )
    return [b for b in out if b.iterations]


def _last_of_gang(m: Measured) -> dict[int, int]:
    """Returns event of a shared collective → the rank that arrived last."""
    t = m.timeline
    start = t.global_start_ns()
    out = {}
    for match in m.matches:
        latest = max(match.members, key=lambda r: float(start[match.members[r]]))
        out.update(dict.fromkeys(match.members.values(), latest))
    return out


def union(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns the union of intervals as sorted disjoint intervals, int64 [k, 2]."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.zeros((0, 2), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    s, reach = start[order], np.maximum.accumulate(end[order])
    first = np.r_[True, s[1:] > reach[:-1]]
    return np.stack([s[first], reach[np.r_[first[1:], True]]], axis=1)


def _inside(at: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Returns a mask of the times that lie in one of the disjoint sorted intervals."""
    if not len(spans):
        return np.zeros(len(at), dtype=bool)
    k = np.searchsorted(spans[:, 0], at, side="right") - 1
    return (k >= 0) & (at < spans[np.maximum(k, 0), 1])


class _RankView:
    """The events of one rank, indexed by kind."""

    def __init__(self, t: Timeline, rank: int, here: np.ndarray) -> None:
        self.t, self.rank = t, rank
        kind = t["kind"][here]
        device = here[on_stream(kind)]
        self.device = device[np.argsort(t["start_ns"][device], kind="stable")]
        self.comm = self.device[t["kind"][self.device] == COLLECTIVE]
        self.work = self.device[t["kind"][self.device] != COLLECTIVE]
        calls = here[kind == _RUNTIME]
        self.calls = calls[np.argsort(t["start_ns"][calls], kind="stable")]
        self.call_of = dict(zip(t["correlation"][self.calls].tolist(), self.calls.tolist(), strict=True))
        self.op_of = dict(zip(t["correlation"][self.device].tolist(), self.device.tolist(), strict=True))
        self.on_host = here[np.isin(kind, (_HOST, _ANNOTATION))]
        blocking = [c for c in self.calls.tolist() if self._blocks(c)]
        self.blocking, self.is_blocking = np.array(blocking, dtype=np.int64), set(blocking)
        self.earlier = self._earlier()
        graphs = t.named(lambda name: "GraphLaunch" in name, self.calls)
        self.graphs = self.calls[
            graphs & ~np.isin(t["correlation"][self.calls], t["correlation"][self.device])
        ]
        self.computing = self._computing(here[kind == _HOST])
        alloc = self.calls[t.named(_ALLOCATOR.search, self.calls)]
        self.allocating = union(t["start_ns"][alloc], t.end_ns[alloc])
        data = self.on_host[t.named(_DATA.search, self.on_host)]
        self.loading = union(t["start_ns"][data], t.end_ns[data])

    def _blocks(self, call: int) -> bool:
        """Whether a call blocks its thread until the device has finished some work."""
        t = self.t
        if SYNC.search(t.names[int(t["name"][call])]):
            return True
        op = self.op_of.get(int(t["correlation"][call]), -1)
        if op < 0 or int(t["kind"][op]) != _MEMCPY or int(t["duration_ns"][call]) <= BLOCKED_NS:
            return False
        return int(t.end_ns[op]) <= int(t.end_ns[call])

    def _earlier(self) -> dict[int, int]:
        """Returns call → the latest call before it on its thread that launched something or blocked."""
        t = self.t
        last: dict[int, int] = {}
        out: dict[int, int] = {}
        for c, lane, correlation in zip(
            self.calls.tolist(),
            t["lane"][self.calls].tolist(),
            t["correlation"][self.calls].tolist(),
            strict=True,
        ):
            out[c] = last.get(lane, -1)
            if correlation in self.op_of or c in self.is_blocking:
                last[lane] = c
        return out

    def _computing(self, host: np.ndarray) -> np.ndarray:
        """Returns when the rank computes: its kernels and copies or, without a device, the ops of its threads."""
        t = self.t
        if len(self.work):
            return union(t["start_ns"][self.work], t.end_ns[self.work])
        asking = np.unique(t["lane"][self.calls])
        host = host[np.isin(t["lane"][host], asking)]
        busy = union(t["start_ns"][host], t.end_ns[host])
        waits = union(t["start_ns"][self.blocking], t.end_ns[self.blocking])
        cuts = np.unique(np.r_[busy.ravel(), waits.ravel()])
        if len(cuts) < 2:
            return busy
        keep = _inside(cuts[:-1], busy) & ~_inside(cuts[:-1], waits)
        return union(cuts[:-1][keep], cuts[1:][keep])

    def communication(self, span: Iteration) -> int:
        t = self.t
        spans = union(
            np.maximum(t["start_ns"][self.comm], span.begin_ns), np.minimum(t.end_ns[self.comm], span.end_ns)
        )
        return int((spans[:, 1] - spans[:, 0]).sum())

    def add(
        self,
        span: Iteration,
        wait_ns: dict[int, float],
        last: dict[int, int],
        parts: Counter[tuple[str, str]],
    ) -> None:
        """Adds every moment of the iteration to ``parts``."""
        t, low, high = self.t, span.begin_ns, span.end_ns
        comm = self.comm[(t["start_ns"][self.comm] < high) & (t.end_ns[self.comm] > low)]
        start, end = t["start_ns"][comm], t.end_ns[comm]
        arrived = start + np.array([round(wait_ns.get(e, 0.0)) for e in comm.tolist()], dtype=np.int64)
        moving = union(arrived, end)
        cuts = np.r_[self.computing.ravel(), start, arrived, end, low, high]
        cuts = np.unique(cuts[(cuts >= low) & (cuts <= high)])
        at, length = cuts[:-1], np.diff(cuts)
        computing = _inside(at, self.computing)
        moves = ~computing & _inside(at, moving)
        waits = ~computing & ~moves & _inside(at, union(start, arrived))
        parts["compute", ""] += int(length[computing].sum())
        parts["communication", ""] += int(length[moves].sum())
        for x, n in zip(at[waits].tolist(), length[waits].tolist(), strict=True):
            in_it = comm[(start <= x) & (arrived > x)]
            parts["rank", f"rank {last[int(in_it[0])]}"] += n
        idle = ~computing & ~moves & ~waits
        for a, b in union(cuts[:-1][idle], cuts[1:][idle]).tolist():
            self._idle(a, b, parts)

    def _idle(self, a: int, b: int, parts: Counter[tuple[str, str]]) -> None:
        """Adds an interval without any device op to ``parts``, by what the next op was waiting for."""
        t = self.t
        k = int(np.searchsorted(t["start_ns"][self.device], b, side="left"))
        op = int(self.device[k]) if k < len(self.device) else -1
        call = self.call_of.get(int(t["correlation"][op]), -1) if op >= 0 else -1
        # The launching call itself may take long, if the driver loads a module or allocates memory.
        at = 0 if call < 0 else int((t["start_ns"] if call in self.is_blocking else t.end_ns)[call])
        # The trace of a compiled program has ops but no launches, so no launch can be found to be late.
        launched = min(max(at, a), b) if call >= 0 else (b if len(self.calls) else a)
        if launched > a:
            self._not_launched(a, launched, call, parts)
        if b - launched > _PLAIN_NS:
            if call in self.is_blocking:
                parts["blocking", self._title(call)] += b - launched
            else:
                parts["unexplained", self._unseen(call, op)] += b - launched
        elif b > launched:
            parts["stream", ""] += b - launched

    def _not_launched(self, a: int, b: int, call: int, parts: Counter[tuple[str, str]]) -> None:
        """Adds the interval before a launch to ``parts``, by what its thread was doing."""
        t = self.t
        held = self._held_up_by(call, b)
        if held >= 0:
            parts["blocking", self._title(held)] += b - a
            return
        cuts = np.r_[self.allocating.ravel(), self.loading.ravel(), a, b]
        cuts = np.unique(cuts[(cuts >= a) & (cuts <= b)])
        at, length = cuts[:-1], np.diff(cuts)
        allocating = _inside(at, self.allocating)
        loading = ~allocating & _inside(at, self.loading)
        rest = ~allocating & ~loading
        what = t.names[int(t["name"][call])] if call >= 0 else ""
        for cause, mask, title in (
            ("allocator", allocating, ""),
            ("data", loading, ""),
            ("launch", rest, what),
        ):
            if mask.any():
                parts[cause, title] += int(length[mask].sum())

    def _held_up_by(self, call: int, end: int) -> int:
        """Returns the blocking call after which ``call`` is the first launch; −1 if there is none.

        If nothing more is launched (``call`` is −1), returns the last call before ``end``, if it blocked.
        """
        if call < 0:
            k = int(np.searchsorted(self.t["start_ns"][self.calls], end)) - 1
            before = int(self.calls[k]) if k >= 0 else -1
        else:
            before = self.earlier.get(call, -1)
        return before if before in self.is_blocking else -1

    def _unseen(self, call: int, op: int) -> str:
        """Returns why the trace does not show what a launched op waited for; empty if the reason is unknown."""
        t = self.t
        if call < 0:
            return ""
        if "GraphLaunch" in t.names[int(t["name"][call])]:
            return "inside a CUDA graph: the trace does not contain all of its ops"
        mine = self.device[t["lane"][self.device] == t["lane"][op]]
        k = int(np.searchsorted(t["start_ns"][mine], t["start_ns"][op]))
        earlier = self.call_of.get(int(t["correlation"][mine[k - 1]]), -1) if k else -1
        low = int(t["start_ns"][earlier]) if earlier >= 0 else -(1 << 62)
        a, b = np.searchsorted(t["start_ns"][self.graphs], [low, int(t["start_ns"][call])])
        return "behind a CUDA graph whose ops are not in the trace" if b > a else ""

    def _title(self, call: int) -> str:
        t = self.t
        name = t.names[int(t["name"][call])]
        op = self.op_of.get(int(t["correlation"][call]), -1)
        if op < 0:
            return name
        size = f" of {int(t['nbytes'][op]):,} bytes" if t["nbytes"][op] >= 0 else ""
        return f"{name} ({t.names[int(t['name'][op])]}{size})"

    def _where(self, call: int) -> str:
        """Returns the innermost framework op and user's line around a call; empty if the trace has neither."""
        t = self.t
        at, end = int(t["start_ns"][call]), int(t.end_ns[call])
        host = self.on_host[t["lane"][self.on_host] == t["lane"][call]]
        around = host[(t["start_ns"][host] <= at) & (t.end_ns[host] >= end)]
        names = [
            t.names[int(n)] for n in t["name"][around[np.argsort(-t["start_ns"][around], kind="stable")]]
        ]
        names = [n for n in names if not n.startswith("ProfilerStep")]
        line = next((n for n in names if ".py" in n), "")
        op = next((n for n in names if ".py" not in n), "")
        return ", ".join(x for x in (op, line) if x)

    def blocked(self, spans: list[Iteration]) -> tuple[Blocked, ...]:
        """Returns the calls that blocked their thread for longer than a launch takes, largest total time first."""
        t = self.t
        found: dict[tuple[str, str], list[int]] = {}
        steps = np.isin(t["iteration"][self.blocking], [s.number for s in spans])
        for c in self.blocking[steps].tolist():
            if t["duration_ns"][c] > BLOCKED_NS:
                found.setdefault((self._title(c), self._where(c)), []).append(c)
        out = []
        for (name, where), calls in found.items():
            length = t["duration_ns"][calls]
            longest = calls[int(length.argmax())]
            op = self.op_of.get(int(t["correlation"][longest]), -1)
            out.append(
                Blocked(
                    name=name,
                    where=where,
                    count=len(calls),
                    total_ns=int(length.sum()),
                    longest_ns=int(length.max()),
                    nbytes=int(t["nbytes"][op]) if op >= 0 else -1,
                    event=longest,
                )
            )
        return tuple(sorted(out, key=lambda x: -x.total_ns))
