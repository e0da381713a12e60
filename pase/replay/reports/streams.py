"""Summarizes a trace's device streams as Holistic Trace Analysis (HTA) does: busy, overlapped, idle and queued time.

``breakdown`` explains an iteration. The sums here are over the whole trace of a rank and by stream, as users of HTA
know them, so that both tools can be compared (``bench/replay/hta.py``). Times are in ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.measurement.breakdown import union
from pase.replay.traces.ingest import launch_of
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, Timeline

__all__ = ["Streams", "copies", "queue_courses", "queue_lengths", "stream_idle", "streams"]

_CONSECUTIVE_NS = 30_000
"""A shorter gap between queued kernels is due to the device. This is HTA's consecutive_kernel_delay of 30, which HTA
compares with times in µs."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Sums of one rank, from the start of the first device op to the end of the last one."""

    total_ns: int
    idle_ns: int
    """Time in which no device op runs."""
    compute_ns: int
    """Time in which a kernel runs that is neither a collective nor a copy."""
    communication_ns: int
    overlapped_ns: int
    """Time in which both a collective and such a kernel run."""


def _device(t: Timeline, rank: int, kinds: tuple[int, ...] = GPU_KINDS) -> np.ndarray:
    mine = np.flatnonzero(np.isin(t["kind"], kinds) & (t.rank_of == rank))
    return mine[np.argsort(t["start_ns"][mine], kind="stable")]


def _length(spans: np.ndarray) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def streams(t: Timeline, rank: int) -> Streams:
    """Returns HTA's temporal breakdown, and its overlap of communication with computation."""

    def busy(kinds: tuple[int, ...]) -> np.ndarray:
        e = _device(t, rank, kinds)
        return union(t["start_ns"][e], t.end_ns[e])

    every, compute, comm = busy(GPU_KINDS), busy((KINDS.index("kernel"),)), busy((COLLECTIVE,))
    both = np.concatenate([compute, comm])
    total = int(every[-1, 1] - every[0, 0]) if len(every) else 0
    return Streams(
        total_ns=total,
        idle_ns=total - _length(every),
        compute_ns=_length(compute),
        communication_ns=_length(comm),
        overlapped_ns=_length(compute) + _length(comm) - _length(union(both[:, 0], both[:, 1])),
    )


def _calls(t: Timeline, rank: int, ops: np.ndarray) -> np.ndarray:
    runtime = (t["kind"] == KINDS.index("runtime")) & (t.rank_of == rank) & (t["correlation"] >= 0)
    return launch_of(t, np.flatnonzero(runtime), ops)


def stream_idle(t: Timeline, rank: int) -> dict[str, dict[str, int]]:
    """Returns stream → total gaps between its ops, by cause.

    "host": the next op was launched after the previous one had ended. "kernel": the gap is due to the device. "other":
    something else delayed the op.
    """
    out: dict[str, dict[str, int]] = {}
    ops = _device(t, rank)
    call = _calls(t, rank, ops)
    for lane in np.unique(t["lane"][ops]).tolist():
        here = t["lane"][ops] == lane
        mine, by = ops[here], call[here]
        start, ended = t["start_ns"][mine][1:], t.end_ns[mine][:-1]
        launched = np.where(by[1:] >= 0, t["start_ns"][np.maximum(by[1:], 0)], np.iinfo(np.int64).min)
        gap = start - ended
        host = launched > ended
        kernel = ~host & (gap < _CONSECUTIVE_NS)
        out[t.lanes[lane].name] = {
            "host": int(gap[host].sum()),
            "kernel": int(gap[kernel].sum()),
            "other": int(gap[~host & ~kernel].sum()),
        }
    return out


def queue_courses(t: Timeline, rank: int, launches_first: bool = True) -> dict[str, np.ndarray]:
    """Returns stream → the number of ops that are launched but not begun, after each change; int64 [changes].

    An op whose launch is not in the trace does not count.

    launches_first: whether launches count before begins in the same ns. (No op begins before its launch.)
    """
    ops = _device(t, rank)
    call = _calls(t, rank, ops)
    ops, call = ops[call >= 0], call[call >= 0]
    out = {}
    for lane in np.unique(t["lane"][ops]).tolist():
        here = t["lane"][ops] == lane
        at = np.concatenate([t["start_ns"][call[here]], t["start_ns"][ops[here]]])
        change = np.repeat([1, -1], int(here.sum()))
        out[t.lanes[lane].name] = np.cumsum(change[np.lexsort((-change if launches_first else change, at))])
    return out


def queue_lengths(t: Timeline, rank: int) -> dict[str, tuple[int, float]]:
    """Returns stream → (maximum, mean over the changes) of the number of ops that are launched but not begun."""
    courses = queue_courses(t, rank)
    return {stream: (int(length.max()), float(length.mean())) for stream, length in courses.items()}


def copies(t: Timeline, rank: int) -> dict[str, tuple[int, float]]:
    """Returns kind of copy or memset ("Memcpy HtoD", …) → (their number, their mean bandwidth in GB/s).

    A copy that takes less than 1 µs counts as 1 µs. The bandwidth is NaN if the bytes are not in the trace.
    """
    ops = _device(t, rank, (KINDS.index("memcpy"), KINDS.index("memset")))
    rates: dict[str, list[float]] = {}
    for e in ops.tolist():
        name = " ".join(t.names[int(t["name"][e])].partition("(")[0].split())
        moved = int(t["nbytes"][e])
        rate = moved / max(int(t["duration_ns"][e]), 1000) if moved >= 0 else float("nan")
        rates.setdefault(name, []).append(rate)
    return {k: (len(v), float(np.mean(v))) for k, v in rates.items()}
