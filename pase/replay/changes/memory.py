"""Measures the peak memory of an iteration from allocator events, and predicts recomputation and accumulation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from pase.replay.changes.coarse import FUSIBLE
from pase.replay.graph import DataflowGraph, launching_calls
from pase.replay.kernels import work_of
from pase.replay.measurement.model import Measured
from pase.replay.simulation.simulate import replay_graph
from pase.replay.simulation.steady import evaluate
from pase.replay.types import COLLECTIVE, KINDS, on_stream

__all__ = ["MemoryOption", "MemoryUse", "memory_options", "memory_use"]

_KEPT = re.compile(r"(^|::)_?(mm|addmm|bmm|baddbmm|matmul|linear|conv\w*|\w*convolution\w*|\w*attention\w*)$")
_FLOOR_NS = 2_000.0
"""The shortest duration of a device op, however small its batch."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory on one rank. kept: the fraction of activations that are written by matrix products and convolutions."""

    rank: int
    peak_bytes: int
    start_bytes: int
    kept: float

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryOption:
    """A way to use less memory, with its predicted time and peak."""

    name: str
    iteration_ns: float
    peak_bytes: int


def memory_use(m: Measured) -> MemoryUse | None:
    """Returns the memory use of the rank with the highest peak in the steady iterations.

    None if the trace has no memory events.
    """
    t = m.timeline
    events = np.flatnonzero(
        (t["kind"] == KINDS.index("memory")) & (t["nbytes"] >= 0) & np.isin(t["iteration"], m.steady())
    )
    if not len(events):
        return None
    top = int(events[t["nbytes"][events].argmax()])
    rank, iteration = int(t.rank_of[top]), int(t["iteration"][top])
    mine = events[(t.rank_of[events] == rank) & (t["iteration"][events] == iteration)]
    mine = mine[np.argsort(t["start_ns"][mine], kind="stable")]
    growth = mine[: int(t["nbytes"][mine].argmax()) + 1]
    change = np.diff(t["nbytes"][growth])
    total = float(change.sum())
    host = np.flatnonzero(
        (t["kind"] == KINDS.index("host")) & (t.rank_of == rank) & (t["iteration"] == iteration)
    )
    host = host[t.named(_KEPT.search, host)]
    host = host[np.argsort(t["start_ns"][host], kind="stable")]
    at = t["start_ns"][growth[1:]]
    where = np.searchsorted(t["start_ns"][host], at, side="right") - 1
    inside = (
        (where >= 0) & (at <= t.end_ns[host[np.maximum(where, 0)]]) if len(host) else np.zeros(len(at), bool)
    )
    kept = float(change[inside].sum()) / total if total > 0 else 1.0
    return MemoryUse(
        rank=rank,
        peak_bytes=int(t["nbytes"][top]),
        start_bytes=int(t["nbytes"][mine[0]]),
        kept=min(max(kept, 0.0), 1.0),
    )


def memory_options(g: DataflowGraph, use: MemoryUse) -> list[MemoryOption]:
    """Returns options: unchanged, recomputation (results of matrix products and convolutions are kept), and gradient
    accumulation over 2, 4 and 8 micro-batches. An option that saves no memory is left out.

    Each micro-batch launches all ops again. Gradients are sent, and parameters updated, with the last one only.
    """
    base = max(evaluate(g).values())
    out = [MemoryOption(name="as it is", iteration_ns=base, peak_bytes=use.peak_bytes)]
    again = _recomputed(g)
    if again is not None:
        peak = use.start_bytes + round(use.kept * use.activation_bytes)
        out.append(
            MemoryOption(name="recomputation", iteration_ns=max(evaluate(again).values()), peak_bytes=peak)
        )
    comm = g.kind == COLLECTIVE
    device = on_stream(g.kind) & ~comm
    once = _once_a_step(g)
    for k in (2, 4, 8):
        shrunk = np.where(
            device, np.maximum(g.duration_ns / k, np.minimum(g.duration_ns, _FLOOR_NS)), g.duration_ns
        )
        whole = max(evaluate(replace(g, duration_ns=shrunk)).values())
        silent = max(evaluate(replace(g, duration_ns=np.where(once, 0.0, shrunk))).values())
        peak = use.start_bytes + use.activation_bytes // k
        out.append(
            MemoryOption(
                name=f"accumulation over {k}", iteration_ns=whole + (k - 1) * silent, peak_bytes=peak
            )
        )
    return [out[0], *(o for o in out[1:] if o.peak_bytes < use.peak_bytes)]


def _once_a_step(g: DataflowGraph) -> np.ndarray:
    """Returns a mask of what a step of several micro-batches runs once: collectives, the optimizer's kernels, and what
    the host does to launch them."""
    once = g.named(lambda name: work_of(name) == "optimizer") & on_stream(g.kind)
    once |= g.kind == COLLECTIVE
    calls: dict[int, list[int]] = {}
    for op, call in launching_calls(g).items():
        calls.setdefault(call, []).append(op)
    for call, ops in calls.items():
        if once[ops].all():
            once[[call, g.before_on_thread[call]]] = True
    return once


def _recomputed(g: DataflowGraph) -> DataflowGraph | None:
    """Returns the graph in which light ops of forward run again before backward begins; None if backward is not found.

    Backward begins when the main thread hands over to another thread, as with PyTorch's autograd.
    """
    handed = np.flatnonzero(g.edges_of("handoff"))
    if not len(handed):
        return None
    r = replay_graph(g)
    duration = g.duration_ns.copy()
    light = g.named(FUSIBLE.search)
    for rank in g.ranks:
        starts = [int(g.dst[e]) for e in handed if g.rank[g.dst[e]] == rank]
        if not starts:
            continue
        begin = min(starts, key=lambda i: r.start_ns[i])
        when = float(r.start_ns[begin])
        launch = g.edges_of("launch") & (g.rank[g.dst] == rank)
        forward = launch & light[g.dst] & (r.finish_ns[g.src] < when) & (g.kind[g.dst] != COLLECTIVE)
        first = np.flatnonzero(launch & (r.start_ns[g.src] >= when))
        if not len(first):
            continue
        op = int(g.dst[first[np.argmin(r.start_ns[g.src[first]])]])
        duration[op] += float(g.duration_ns[g.dst[forward]].sum())
        duration[begin] += float(g.duration_ns[g.src[forward]].sum())
    return replace(g, duration_ns=duration)
