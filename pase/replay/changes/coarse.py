"""dPRO's coarsened view of a replayable graph: the synchronized tensors, with their producers and consumers.

It also has what the passes need of each op: the next op on its stream, the host tasks that launch it, and whether it
can be fused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.replay.graph import DataflowGraph
from pase.replay.simulation.collective_cost import split_cost
from pase.replay.simulation.simulate import Replay
from pase.replay.types import COLLECTIVE, KINDS, OPERATIONS, on_stream

__all__ = ["FUSIBLE", "Coarse", "SyncedTensor", "coarsen"]

FUSIBLE = re.compile(
    r"elementwise|vectorized|pointwise|fused|loop_\w*fusion|input_\w*fusion|wrapped_|copy|memset|memcpy|dropout|fill"
    r"|add|mul|relu|gelu|silu|softmax|norm|cast|convert|where|compare|scale|bias",
    re.IGNORECASE,
)
"""Light device ops. Recomputation runs them again, and they may be moved behind a message. Fusion excludes copies."""
_HEAVY = re.compile(
    r"gemm|conv\w*_|cutlass|cudnn|wgrad|dgrad|flash|attention|sort|nccl|custom-call", re.IGNORECASE
)
"""Matrix products, convolutions, attention and other ops that are never fused."""
_COPY = re.compile(r"copy|CatArray", re.IGNORECASE)
"""Copies, which are light but compute nothing that could be fused."""


@dataclass(frozen=True, kw_only=True)
class SyncedTensor:
    """A collective of the iteration on all its ranks: dPRO's q_n. Indices are tasks of the graph."""

    number: int
    tasks: tuple[int, ...]
    """One task for each rank that takes part."""
    producers: tuple[int, ...]
    """For each task, the last compute op that it waits for; −1 for none."""
    consumers: tuple[tuple[int, ...], ...]
    """For each task, the ops that wait for it."""
    family: tuple[int, int, int]
    """(operation, number of ranks, stream). Only tensors of one family can be fused."""
    nbytes: int
    ready_ns: float
    """When its last producer ends."""
    used_ns: float
    """When its first consumer starts; inf if none is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coarse:
    """The coarsened view of a graph. tensors: in the order in which they are communicated."""

    tensors: tuple[SyncedTensor, ...]
    fusible: np.ndarray
    """Whether each task can be fused; bool [tasks]."""
    next_op: np.ndarray
    """The next op on the stream of each op; −1 for none. int64 [tasks]."""
    launch: np.ndarray
    """The host task from which each op has a launch edge; −1 for none. int64 [tasks]."""
    call: np.ndarray
    """The call task after that host task; −1 for none. int64 [tasks]."""
    stream_edge: np.ndarray
    """The edge from the previous op on the stream of each op; −1 for none. int64 [tasks]."""
    fixed_ns: np.ndarray
    """The part of each collective's duration that does not scale with bytes; float64 [tasks]."""
    heavy_ns: np.ndarray
    """Start times of the heavy compute ops, sorted."""
    signature: np.ndarray
    """Equal for ops that have the same name and about the same duration; int64 [tasks]."""

    def may_join(self, members: Sequence[int]) -> bool:
        """Whether tensors can be sent as one message.

        They must be of one family, and no heavy op may be between the first use of a member and the time at which the
        last member is ready. Data flow through memory is not in a trace. Copies and elementwise ops (unpacking,
        averaging) can wait for the bucket, but a matrix product or convolution might depend on an early member and
        produce a later one.
        """
        chosen = [self.tensors[k] for k in members]
        if len({(t.family, len(t.tasks)) for t in chosen}) > 1:
            return False
        last = max(t.ready_ns for t in chosen)
        first = min(t.used_ns for t in chosen)
        between = np.searchsorted(self.heavy_ns, [first, last])
        return first >= last or between[0] == between[1]


def coarsen(g: DataflowGraph, r: Replay) -> Coarse:
    """Returns the coarsened view of all ranks."""
    n = len(g)
    gpu = on_stream(g.kind)
    light = g.named(FUSIBLE.search) & ~g.named(_HEAVY.search) & gpu
    fusible = light & ~g.named(_COPY.search) & (g.kind == KINDS.index("kernel"))
    next_op = np.full(n, -1, dtype=np.int64)
    stream = g.edges_of("stream")
    next_op[g.src[stream]] = g.dst[stream]
    stream_edge = np.full(n, -1, dtype=np.int64)
    stream_edge[g.dst[stream]] = np.flatnonzero(stream)
    launch, call = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    edge = g.edges_of("launch")
    launch[g.dst[edge]] = g.src[edge]
    program = g.edges_of("program")
    follow = np.full(n, -1, dtype=np.int64)
    follow[g.src[program]] = g.dst[program]
    has = launch >= 0
    call[has] = follow[launch[has]]
    waits = g.edges_of("wait", "data")
    into: dict[int, list[int]] = {}
    out: dict[int, list[int]] = {}
    for a, b in zip(g.src[waits].tolist(), g.dst[waits].tolist(), strict=True):
        into.setdefault(b, []).append(a)
        out.setdefault(a, []).append(b)
    signature = g.name.astype(np.int64) * 64 + np.log2(np.maximum(g.duration_ns, 1.0)).astype(np.int64)
    heavy = gpu & ~light & (g.kind != COLLECTIVE)
    heavy &= ~g.named(re.compile("Memcpy|Memset").search)
    tensors = []
    for k, tasks in enumerate(_by_order(g, r)):
        producers = []
        consumers = []
        for i in tasks:
            before = [a for a in into.get(i, ()) if g.kind[a] != COLLECTIVE]
            producers.append(max(before, key=lambda a: r.finish_ns[a]) if before else -1)
            consumers.append(tuple(b for b in out.get(i, ()) if g.kind[b] != COLLECTIVE))
        first = tasks[0]
        tensors.append(
            SyncedTensor(
                number=k,
                tasks=tuple(tasks),
                producers=tuple(producers),
                consumers=tuple(consumers),
                family=(int(g.operation[first]), int(g.ways[first]), _stream_label(g, first)),
                nbytes=int(g.nbytes[first]),
                ready_ns=max((float(r.finish_ns[a]) for a in producers if a >= 0), default=0.0),
                used_ns=min((float(r.start_ns[b]) for c in consumers for b in c), default=math.inf),
            )
        )
    return Coarse(
        tensors=tuple(tensors),
        fusible=fusible,
        next_op=next_op,
        launch=launch,
        call=call,
        stream_edge=stream_edge,
        heavy_ns=np.sort(r.start_ns[heavy]),
        fixed_ns=split_cost(g).fixed_ns,
        signature=signature,
    )


def _stream_label(g: DataflowGraph, i: int) -> int:
    names = sorted({d.name for d in g.devices})
    return names.index(g.devices[int(g.device[i])].name)


def _by_order(g: DataflowGraph, r: Replay) -> list[list[int]]:
    """Returns the collectives in order of time, as lists of their tasks on all ranks that share them."""
    comm = np.flatnonzero((g.kind == COLLECTIVE) & (g.operation != OPERATIONS.index("barrier")))
    comm = comm[np.argsort(r.start_ns[comm], kind="stable")]
    groups: dict[tuple[int, int], list[int]] = {}
    for i in comm.tolist():
        key = (0, int(g.gang[i])) if g.gang[i] >= 0 else (1, i)
        groups.setdefault(key, []).append(i)
    return list(groups.values())
