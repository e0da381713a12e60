"""dPRO's coarsened view of a replayable graph: compute segments that end where a tensor is handed to a collective.

Ops that produce no tensor are contracted into the next that does. A segment knows its ops in stream order, the
host tasks that launch them, the collective that waits for its end, and the collectives that it waits for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.replay.changes.whatif import split_cost
from pase.replay.graph import EDGES, DataflowGraph
from pase.replay.simulation.simulate import Replay
from pase.replay.types import COLLECTIVE, KINDS, OPERATIONS, on_stream

__all__ = ["FUSIBLE", "Coarse", "SyncedTensor", "coarsen"]

FUSIBLE = re.compile(
    r"elementwise|vectorized|pointwise|fused|loop_\w*fusion|input_\w*fusion|wrapped_|copy|memset|memcpy|dropout|fill"
    r"|add|mul|relu|gelu|silu|softmax|norm|cast|convert|where|compare|scale|bias",
    re.IGNORECASE,
)
"""Light device ops: what recomputation runs again and what may wait behind a message; fusion takes fewer."""
_HEAVY = re.compile(
    r"gemm|conv\w*_|cutlass|cudnn|wgrad|dgrad|flash|attention|sort|nccl|custom-call", re.IGNORECASE
)
"""Matrix products, convolutions and attention stay as they are."""
_COPY = re.compile(r"copy|CatArray", re.IGNORECASE)
"""Copies are light, and compute nothing that could be fused."""

_E = {k: i for i, k in enumerate(EDGES)}


@dataclass(frozen=True, kw_only=True)
class SyncedTensor:
    """A collective of the iteration on every rank: dPRO's q_n. Indices are tasks of the graph."""

    number: int
    tasks: tuple[int, ...]
    """One for each rank that takes part."""
    producers: tuple[int, ...]
    """Per task the last compute op that it waits for, −1 for none."""
    consumers: tuple[tuple[int, ...], ...]
    """Per task the ops that wait for it."""
    family: tuple[int, int, int]
    """Operation, number of ranks, and stream: only tensors of one family can be fused."""
    nbytes: int
    ready_ns: float
    """When its last producer has ended."""
    used_ns: float
    """When its first consumer starts; inf where none is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coarse:
    """tensors in the order in which they are communicated; runs: per task the number of its fusible run, −1."""

    tensors: tuple[SyncedTensor, ...]
    fusible: np.ndarray
    """bool [tasks]"""
    next_op: np.ndarray
    """The op after each on its stream, −1; int64 [tasks]."""
    launch: np.ndarray
    """The host task that each op hangs on, −1; int64 [tasks]."""
    call: np.ndarray
    """The call task after that, −1; int64 [tasks]."""
    stream_edge: np.ndarray
    """The edge from the op before each on its stream, −1; int64 [tasks]."""
    fixed_ns: np.ndarray
    """The part of each collective's duration that does not scale with bytes; float64 [tasks]."""
    heavy_ns: np.ndarray
    """Starts of the ops that are neither collectives nor fusible, sorted."""
    signature: np.ndarray
    """Equal for ops that look alike: name and a coarse duration; int64 [tasks]."""

    def may_join(self, members: Sequence[int]) -> bool:
        """Whether tensors can be sent as one: one family, and nothing that a member's result may feed stands
        between its first use and the last member's producer.

        Data flow through memory is not in a trace. Copies and elementwise ops (unpacking, averaging) may wait
        for the bucket; a matrix product or convolution in between may feed the later member, and forbids it.
        """
        chosen = [self.tensors[k] for k in members]
        if len({(t.family, len(t.tasks)) for t in chosen}) > 1:
            return False
        last = max(t.ready_ns for t in chosen)
        first = min(t.used_ns for t in chosen)
        between = np.searchsorted(self.heavy_ns, [first, last])
        return first >= last or between[0] == between[1]


def coarsen(g: DataflowGraph, r: Replay) -> Coarse:
    """The coarsened view of every rank; tensors of different ranks are joined by their order on the rank."""
    n = len(g)
    gpu = on_stream(g.kind)
    light = np.array([bool(FUSIBLE.search(x)) and not _HEAVY.search(x) for x in g.names])[g.name] & gpu
    copies = np.array([bool(_COPY.search(x)) for x in g.names])[g.name]
    fusible = light & ~copies & (g.kind == KINDS.index("kernel"))
    next_op = np.full(n, -1, dtype=np.int64)
    stream = g.edge_kind == _E["stream"]
    next_op[g.src[stream]] = g.dst[stream]
    stream_edge = np.full(n, -1, dtype=np.int64)
    stream_edge[g.dst[stream]] = np.flatnonzero(stream)
    launch, call = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    edge = g.edge_kind == _E["launch"]
    launch[g.dst[edge]] = g.src[edge]
    program = g.edge_kind == _E["program"]
    follow = np.full(n, -1, dtype=np.int64)
    follow[g.src[program]] = g.dst[program]
    has = launch >= 0
    call[has] = follow[launch[has]]
    waits = np.isin(g.edge_kind, (_E["wait"], _E["data"]))
    into: dict[int, list[int]] = {}
    out: dict[int, list[int]] = {}
    for a, b in zip(g.src[waits].tolist(), g.dst[waits].tolist(), strict=True):
        into.setdefault(b, []).append(a)
        out.setdefault(a, []).append(b)
    signature = g.name.astype(np.int64) * 64 + np.log2(np.maximum(g.duration_ns, 1.0)).astype(np.int64)
    heavy = gpu & ~light & (g.kind != COLLECTIVE)
    heavy &= ~np.array(["Memcpy" in x or "Memset" in x for x in g.names])[g.name]
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
    """Collectives of all ranks, joined: by gang where there is one, else each on its own."""
    comm = np.flatnonzero((g.kind == COLLECTIVE) & (g.operation != OPERATIONS.index("barrier")))
    comm = comm[np.argsort(r.start_ns[comm], kind="stable")]
    groups: dict[tuple[int, int], list[int]] = {}
    for i in comm.tolist():
        key = (0, int(g.gang[i])) if g.gang[i] >= 0 else (1, i)
        groups.setdefault(key, []).append(i)
    return list(groups.values())
