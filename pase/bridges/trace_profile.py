"""Makes a scheduling problem from traces of a run: its compute, its collectives, and the speed of its links.

``pase.replay`` estimates one rank's steady iteration (medians over iterations). That iteration is replayed with
collectives that take no time, which leaves compute and the gaps due to the host. In that replay, each collective has a
time at which it is ready and a time at which the first op that reads it would start.

- A collective whose slack is at most a twentieth of its own duration is on the path between two ops (for example tensor
  parallelism, or a clipped norm). It cannot be moved; neither can broadcasts, barriers and similar collectives. The
  time that compute would wait for them counts as time on the compute stream.
- A reduction (all-reduce or reduce-scatter) that starts in backward and is first read after backward is a gradient: the
  optimizer waits for it, and forward waits for the optimizer. PyTorch's autograd thread shows what starts in backward.
  Without it, a gradient is a reduction that is first read after the last reduction is ready. A trace does not record
  which layer a gradient belongs to. Forward is assumed to mirror backward, so the gradient made last is needed first.
  The optimizer's time is spread over forward.
- Other collectives, such as the all-gather of a parameter, are needed within their iteration.

There is one link for each stream that carries collectives, because streams run concurrently. Its curve for a kind of
collective goes through the median of each size. The startup comes from a least-squares line through the medians or, for
a single size, from the shortest collective of the stream. Durations count from the start of the last rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import Infeasible, PaseError

if TYPE_CHECKING:
    from pase.replay.graph import DataflowGraph
    from pase.replay.types import Timeline
    from pase.schedule.types import AxisGroup, Link, ScheduleProblem, SendTime

__all__ = ["fit_curve", "is_trace", "problem_from_timeline", "problem_from_traces"]

AT_ONCE = 0.05
"""Slack, relative to its own length, up to which a collective counts as being on the path between two ops."""
MOVED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SUMS = ("all_reduce", "reduce_scatter")
FORWARD_SHARE = 1 / 3
BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
"""PyTorch's names of the host events that run an op's backward, on the thread that launches its kernels."""


@dataclass(frozen=True, kw_only=True)
class _SentCollective:
    """One collective of the iteration. Times are seconds from the iteration's start, if collectives take no time."""

    name: str
    kind: str
    axes: AxisGroup
    lane: str
    nbytes: int
    seconds: float
    ready_s: float
    need_s: float
    gradient: bool | None
    """Whether it starts in backward and is first read after backward; None if the trace does not show it."""


def is_trace(path: Path) -> bool:
    """Whether `pase schedule` should read this path as traces: a folder, a trace's suffix, or events in JSON."""
    if path.is_dir() or path.name.endswith((".json.gz", ".pb", ".zip")):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as f:
        head = f.read(4096)
    return b"pase.timeline/" in head or b'"traceEvents"' in head


def problem_from_traces(
    path: str | Path, *, links: Sequence[Link] = (), rank: int | None = None
) -> ScheduleProblem:
    """Returns the problem of a folder of traces, a trace, or a timeline. See ``problem_from_timeline``."""
    from pase.replay import align, load

    return problem_from_timeline(
        align(load(path)), links=links, rank=rank, name=Path(path).name, source=str(path)
    )


def problem_from_timeline(
    t: Timeline, *, links: Sequence[Link] = (), rank: int | None = None, name: str = "trace", source: str = ""
) -> ScheduleProblem:
    """Returns the problem of one rank of an aligned timeline.

    links: replace the links fitted to the trace. The first one also gives sizes that the trace lacks, from durations.
    rank: the rank; None takes the first that has collectives.

    Raises PaseError if there is nothing to replay or a size is unknown. Raises Infeasible if no collective can be
    scheduled differently.
    """
    from pase.replay import estimate, measure, replay_graph
    from pase.replay.types import COLLECTIVE

    m = measure(t)
    g = estimate(m, m.steady())
    sends = g.kind == COLLECTIVE
    if not sends.any():
        raise Infeasible(
            "an iteration has no collective, so there is nothing to schedule", where=source or name
        )
    ranks = sorted(set(g.rank[sends].tolist()))
    if rank is not None and rank not in ranks:
        raise PaseError(
            f"rank {rank} has no collectives", where=source or name, fix=f"choose a rank of {ranks}"
        )
    rank = ranks[0] if rank is None else rank
    free = replay_graph(replace(g, duration_ns=np.where(sends, 0.0, g.duration_ns)))
    mine = g.rank == rank
    zero = float(free.start_ns[mine].min())
    end_s = (float(free.finish_ns[mine].max()) - zero) / 1e9
    backward = _launched_in_backward(t)
    sent = _collectives(t, g, mine & sends, free.start_ns, zero, end_s, backward)
    last_s = max((s.ready_s for s in sent if s.kind in SUMS), default=end_s)
    summed = [
        s for s in sent if s.kind in SUMS and (s.need_s >= last_s if s.gradient is None else s.gradient)
    ]
    if all(s.gradient is None and _at_once(s) for s in summed):
        summed = []
    between = [s for s in sent if s.kind not in MOVED or (_at_once(s) and s not in summed)]
    kept = [_sized(s, links, source or name) for s in sent if s not in between]
    if not kept:
        raise Infeasible(
            "every collective is needed as soon as it is ready, so there is nothing to schedule",
            where=source or name,
        )
    gradients = [_sized(s, links, source or name) for s in summed]
    last_s = max((s.ready_s for s in gradients), default=last_s)
    forward_s = _forward_end_s(t, g, mine & ~sends, free.start_ns, zero, last_s, backward)
    forward_s = min([forward_s, *(s.ready_s for s in gradients)])
    return _problem(
        kept,
        between,
        gradients,
        _Ends(forward_s=forward_s, backward_s=last_s, end_s=end_s),
        links=tuple(links) or _links(kept),
        name=f"{name}, rank {rank}",
        source=source,
    )


def _collectives(
    t: Timeline,
    g: DataflowGraph,
    which: np.ndarray,
    start: np.ndarray,
    zero: float,
    end_s: float,
    backward: set[tuple[int, int]],
) -> list[_SentCollective]:
    """Returns the rank's collectives in order, each with the times at which it is ready and first read."""
    from pase.replay.types import COLLECTIVE, OPERATIONS
    from pase.schedule.types import AxisGroup

    need = np.full(len(g), np.inf)
    reader = np.full(len(g), -1)
    reads = np.flatnonzero(g.kind[g.dst] != COLLECTIVE)
    for e in reads[np.argsort(-start[g.dst[reads]], kind="stable")].tolist():  # the earliest comes last
        need[g.src[e]], reader[g.src[e]] = start[g.dst[e]], g.dst[e]

    def within(task: int) -> bool:
        event = int(g.event[task]) if task >= 0 else -1
        return event >= 0 and (int(g.rank[task]), int(t["correlation"][event])) in backward

    out: list[_SentCollective] = []
    for i in np.flatnonzero(which)[np.argsort(start[which], kind="stable")].tolist():
        seconds = float(g.duration_ns[i]) / 1e9
        group = int(t["group"][g.event[i]]) if g.event[i] >= 0 else -1
        over = t.groups[group].name if group >= 0 else f"{int(g.ways[i]) or '?'} ranks"
        kind = OPERATIONS[int(g.operation[i])] or "collective"
        out.append(
            _SentCollective(
                name=f"{len(out)} {kind}",
                kind=kind,
                axes=AxisGroup.parse(f"{over}/{kind}"),
                lane=g.devices[int(g.device[i])].name,
                nbytes=int(g.nbytes[i]),
                seconds=seconds,
                ready_s=(float(start[i]) - zero) / 1e9,
                need_s=min((float(need[i]) - zero) / 1e9, end_s),
                gradient=within(i) and not within(int(reader[i])) if backward else None,
            )
        )
    return out


def _at_once(s: _SentCollective) -> bool:
    return s.need_s - s.ready_s <= AT_ONCE * s.seconds


def _sized(s: _SentCollective, links: Sequence[Link], where: str) -> _SentCollective:
    """Returns the collective with its size. A size that the trace lacks follows from the duration on the first link."""
    if s.nbytes > 0:
        return s
    if not links:
        raise PaseError(
            f"collective {s.name} has no size in the trace",
            where=where,
            fix="record shapes (PyTorch: record_shapes=True, or an execution trace next to the trace), or give "
            "--link NAME:STARTUP:BANDWIDTH to derive sizes from durations",
        )
    return replace(s, nbytes=max(1, int(links[0].curve.bytes_within(np.asarray([s.seconds]))[0])))


def _launched_in_backward(t: Timeline) -> set[tuple[int, int]]:
    """Returns (rank, correlation) of all that PyTorch's autograd threads launched; empty if no such thread is found."""
    from pase.replay.types import KINDS

    host = t["kind"] == KINDS.index("host")
    names = [i for i, n in enumerate(t.names) if BACKWARD.search(n)]
    lanes = np.unique(t["lane"][host & np.isin(t["name"], names)])
    calls = (t["kind"] == KINDS.index("runtime")) & np.isin(t["lane"], lanes) & (t["correlation"] >= 0)
    return set(zip(t.rank_of[calls].tolist(), t["correlation"][calls].tolist(), strict=True))


def _forward_end_s(
    t: Timeline,
    g: DataflowGraph,
    compute: np.ndarray,
    start: np.ndarray,
    zero: float,
    last_s: float,
    backward: set[tuple[int, int]],
) -> float:
    """Returns the start of backward's first op, or a third of the time to the last gradient if it is unknown."""
    from pase.replay.types import on_stream

    tasks = np.flatnonzero(compute & on_stream(g.kind) & (g.event >= 0))
    begun = [
        float(start[i])
        for i, e in zip(tasks.tolist(), g.event[tasks].tolist(), strict=True)
        if (int(g.rank[i]), int(t["correlation"][e])) in backward
    ]
    return (min(begun) - zero) / 1e9 if begun else FORWARD_SHARE * last_s


def fit_curve(nbytes: Sequence[float], seconds: Sequence[float], *, shortest_s: float = 0.0) -> SendTime:
    """Fits a cost curve through the median of each size, with a startup.

    nbytes, seconds: the measured messages.
    shortest_s: the startup if there is only one size, capped by the median of that size.

    >>> c = fit_curve([1e6, 2e6, 2e6], [1.5e-3, 2.4e-3, 2.6e-3])
    >>> round(c.startup_s * 1e3, 6), round(c.seconds_for(4e6) * 1e3, 6)
    (0.5, 4.5)
    """
    from scipy.optimize import nnls

    from pase.schedule.types import SendTime

    sizes = np.unique(np.asarray(nbytes, float))
    times = np.asarray([np.median(np.asarray(seconds)[np.asarray(nbytes) == n]) for n in sizes])
    if len(sizes) == 1:
        startup = min(shortest_s, float(times[0]))
    else:
        # Fit relative errors, so that large messages do not outweigh the startup of small ones.
        rows = np.stack((np.ones(len(sizes)), sizes), axis=1) / np.maximum(times, 1e-12)[:, None]
        startup = min(float(nnls(rows, np.ones(len(sizes)))[0][0]), float(times.min()))
    made = SendTime.table([0.0, *sizes], [startup, *times])
    per_byte = float(times[-1] - startup) / float(sizes[-1])
    return replace(made, tail_s_per_byte=max(made.tail_s_per_byte, 0.0) if len(sizes) > 1 else per_byte)


def _links(sent: Sequence[_SentCollective]) -> tuple[Link, ...]:
    """Returns one link for each stream, with a curve for each group of ranks and kind of collective."""
    from pase.schedule.types import Link

    out = []
    lanes = list(dict.fromkeys(s.lane for s in sent))
    for lane in lanes:
        here = [s for s in sent if s.lane == lane]
        shortest = min(s.seconds for s in here)
        curves = {
            key: fit_curve(
                [s.nbytes for s in here if s.axes == key],
                [s.seconds for s in here if s.axes == key],
                shortest_s=shortest,
            )
            for key in dict.fromkeys(s.axes for s in here)
        }
        name = (
            lane
            if len(lanes) > 1 and not lane.isdigit()
            else f"stream {lane}"
            if len(lanes) > 1
            else "network"
        )
        out.append(Link(name=name, curve=next(iter(curves.values())), by_axes=curves, axes=tuple(curves)))
    return tuple(out)


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """When a step's forward and backward end, and when the step ends, in seconds from its start."""

    forward_s: float
    backward_s: float
    end_s: float


def _problem(
    kept: Sequence[_SentCollective],
    between: Sequence[_SentCollective],
    gradients: Sequence[_SentCollective],
    ends: _Ends,
    *,
    links: tuple[Link, ...],
    name: str,
    source: str,
) -> ScheduleProblem:
    """Builds the problem. Compute is divided into blocks at each time at which a tensor is ready or needed."""
    forward_s, backward_s, end_s = ends.forward_s, ends.backward_s, ends.end_s
    from pase.schedule.types import ALL_DEVICES, ComputeBlock, ScheduleProblem, Transfer

    back_s = max(backward_s - forward_s, 1e-12)

    def need_of(s: _SentCollective) -> float:
        """Returns when a tensor is needed. For a gradient: the mirror image, in forward, of when it was made."""
        if s not in gradients:
            return s.need_s
        return forward_s * min(max(1.0 - (s.ready_s - forward_s) / back_s, 0.0), 1.0)

    # The optimizer's own time comes after the last gradient and is spread over forward.
    body_s = backward_s if gradients else end_s
    moments = {0.0, forward_s, body_s}
    for s in kept:
        moments |= {min(s.ready_s, body_s), min(need_of(s), body_s)}
    cuts = sorted(moments)
    cuts = [c for i, c in enumerate(cuts) if i == 0 or c > cuts[i - 1] + 1e-9]
    update_s = (end_s - body_s) / max(forward_s, 1e-12)

    def index(moment: float) -> int:
        return int(np.argmin(np.abs(np.asarray(cuts) - min(moment, body_s))))

    blocks = []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        forward = b <= forward_s + 1e-9
        waits = sum(
            max(s.seconds - (s.need_s - s.ready_s), 0.0)
            for s in between
            if a <= s.ready_s < b or (i == len(cuts) - 2 and s.ready_s >= b)
        )
        seconds = (b - a) * (1 + update_s if forward else 1.0) + waits
        blocks.append(
            ComputeBlock(
                name=f"{'forward' if forward else 'backward'} {i}",
                phase="forward" if forward else "backward",
                seconds=seconds,
            )
        )
    tensors = []
    for s in kept:
        ready, need = index(s.ready_s), index(need_of(s))
        gradient = s in gradients
        tensors.append(
            Transfer(
                name=s.name,
                nbytes=s.nbytes,
                ready_after=ready - 1 if ready else None,
                needed_before=need if need < len(blocks) else None,
                lag=1 if gradient else 0,
                axes=s.axes if any(link.axes is not None for link in links) else ALL_DEVICES,
                kind=s.kind,
            )
        )
    return ScheduleProblem(
        name=name, blocks=tuple(blocks), tensors=tuple(tensors), links=links, source=source
    )
