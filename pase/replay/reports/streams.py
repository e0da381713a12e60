"""A trace's device streams in the terms of Holistic Trace Analysis: what ran, overlapped, idled and queued, in all.

``breakdown`` says where an iteration went and why; these are the sums that users of HTA know, over the whole trace of a
rank and by stream, so that the two can be laid side by side (``bench/replay/hta.py``). Times in ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.measurement.breakdown import union
from pase.replay.traces.ingest import launch_of
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS, Timeline

__all__ = ["Streams", "copies", "queue_courses", "queue_lengths", "stream_idle", "streams"]

_CONSECUTIVE_NS = 30_000
"""A gap shorter than this between queued kernels is the device's own: HTA's consecutive_kernel_delay of 30, which it
compares with times in µs."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Of one rank, from the first device op to the end of the last."""

    total_ns: int
    idle_ns: int
    """No device op runs."""
    compute_ns: int
    """A kernel runs that is neither a collective nor a copy."""
    communication_ns: int
    overlapped_ns: int
    """Communication while such a kernel runs."""


def _device(t: Timeline, rank: int, kinds: tuple[int, ...] = GPU_KINDS) -> np.ndarray:
    mine = np.flatnonzero(np.isin(t["kind"], kinds) & (t.rank_of == rank))
    return mine[np.argsort(t["start_ns"][mine], kind="stable")]


def _length(spans: np.ndarray) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def streams(t: Timeline, rank: int) -> Streams:
    """HTA's temporal breakdown and its overlap of communication with computation."""

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
    """Stream → gaps between its ops: "host" where the next was launched after the one before had ended, "kernel" where
    the gap is too short to have a cause, "other" where something else held it back."""
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
    """Stream → after each change, how many ops are launched and have not begun; int64 [launches and begins]. An op
    whose launch is not in the trace does not count.

    launches_first: which of a launch and a begin in the same ns counts first. No op begins before its launch.
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
    """Stream → (most, mean over the changes) of the ops that are launched and have not begun."""
    courses = queue_courses(t, rank)
    return {stream: (int(length.max()), float(length.mean())) for stream, length in courses.items()}


def copies(t: Timeline, rank: int) -> dict[str, tuple[int, float]]:
    """Kind of copy or memset ("Memcpy HtoD", …) → how many, and the mean of their bandwidths in GB/s.

    One that takes less than a µs counts as one of a µs; NaN where the trace does not say how many bytes.
    """
    ops = _device(t, rank, (KINDS.index("memcpy"), KINDS.index("memset")))
    rates: dict[str, list[float]] = {}
    for e in ops.tolist():
        name = " ".join(t.names[int(t["name"][e])].partition("(")[0].split())
        moved = int(t["nbytes"][e])
        rate = moved / max(int(t["duration_ns"][e]), 1000) if moved >= 0 else float("nan")
        rates.setdefault(name, []).append(rate)
    return {k: (len(v), float(np.mean(v))) for k, v in rates.items()}
