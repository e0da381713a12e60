"""Memory per device under a strategy: one definition, for the plan's account and for a search under a limit.

Parameters are kept in their storage layout, gradients and optimizer state so too or split further (ZeRO-2).
Activations are what backward needs (``pase.memory.residuals``), each once, in the layout it was written in, times the
loop turns that make it; inside a rematerialised region only what enters it is kept, and while a region is
recomputed, one turn of its inner tensors. Weights that a product reads gathered or cast are activations too, until
its backward, except in a rematerialised region, which gathers them again. Buffers: what one op reads and makes,
with its gradients, at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pase.ir import Graph, Node, Scope
from pase.ir.blocks import turns_of
from pase.machine import Mesh
from pase.memory.residuals import kept
from pase.tables.derive import OPTIMIZERS
from pase.tables.itemize import Collective
from pase.tables.layouts import (
    PARTIAL,
    REPLICATED,
    dim_index,
    forward_states,
    gradient_states,
    number,
    read_states,
    shards,
    state_index,
    write_states,
)

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["Held", "Memory", "held", "in_flight", "in_flight_at_least", "memory", "profile"]

Kind = Literal["parameters", "gradients", "optimizer", "activations"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a node keeps on one device, per config: float64 [K].

    region: the rematerialised region while whose recomputation they live; None: the whole step.
    """

    kind: Kind
    nbytes: np.ndarray
    region: tuple[Scope, ...] | None = None


def held(graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str = "adam") -> Iterator[Held]:
    """What the node keeps under each of its configs; cfg int8 [K, axes]."""
    wanted, turns = kept(graph), turns_of(graph)  # of a step in micro-batches, one lives at a time
    for op in n.ops:
        for a in op.writes:
            t = graph.tensors[a.tensor]
            local = number(t.nbytes, t.name) / shards(cfg, dim_index(n, a.map.dims), mesh)
            if t.role == "parameter":
                yield Held(kind="parameters", nbytes=local)
                if t.needs_grad:
                    mine = local / shards(cfg, state_index(n), mesh)
                    yield Held(
                        kind="gradients", nbytes=mine * (2 if turns > 1 else 1)
                    )  # the sum, and one to add
                    yield Held(kind="optimizer", nbytes=4 * OPTIMIZERS[optimizer] * mine / t.itemsize)
            elif t.role == "input":
                yield Held(kind="activations", nbytes=local * turns)  # all of them arrive at once
            elif n.kind == "carry" and t.needs_grad:  # kept once for every turn of its loop
                yield Held(
                    kind="activations", nbytes=local * max(number(o.times, n.name) for o in n.ops) / turns
                )
            elif a.tensor in wanted and n.kind not in ("parameter", "copy"):
                k = wanted[a.tensor]
                many = 1 if k.region is not None else number(k.times, t.name) / turns
                yield Held(kind="activations", nbytes=local * many, region=k.region)
    yield from _weights(graph, n, cfg, mesh)


def _weights(graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh) -> Iterator[Held]:
    """Parameters as this node reads them, kept for its backward; less what is the stored parameter itself."""
    for op, a in n.reads:
        source = graph.producer.get(a.tensor)
        if source is None or source.kind != "parameter" or not op.differentiable or op.region is not None:
            continue
        if n.kind == "copy" or op.kind in ("matmul", "conv"):
            t = graph.tensors[a.tensor]
            local = number(t.nbytes, t.name) / shards(cfg, dim_index(n, a.map.dims), mesh)
            yield Held(kind="activations", nbytes=local * number(op.times, n.name) / turns_of(graph))
    if n.kind == "parameter":
        a = n.ops[0].writes[0]
        t = graph.tensors[a.tensor]
        heavy = [
            e for e in graph.edges
            if e.tensor == a.tensor and e.op.region is None and e.op.differentiable
            and (e.op.kind in ("matmul", "conv") or graph.node[e.dst].kind == "copy")
        ]  # fmt: skip
        if heavy and t.needs_grad:
            local = number(t.nbytes, t.name) / shards(cfg, dim_index(n, a.map.dims), mesh)
            yield Held(kind="activations", nbytes=-local)


def in_flight(graph: Graph, n: Node, configs: Mapping[str, np.ndarray], mesh: Mesh) -> float:
    """Bytes of what the node reads and makes while it runs, and of the parameters that it reads, and of their
    gradients, where these are laid out otherwise than they are kept."""
    out, seen = 0.0, set()
    if n.kind in ("parameter", "input", "output", "copy", "carry"):
        return out
    cfg = configs[n.name][None, :]
    for op in n.ops:
        for a in (*op.writes, *op.reads):
            source = graph.producer.get(a.tensor)
            inner = a.tensor in n.internal and not graph.read_outside(n, a.tensor)
            if source is None or inner or a.tensor in seen or (a.sparse and source is not n):
                continue
            seen.add(a.tensor)
            t = graph.tensors[a.tensor]
            local = float(number(t.nbytes, t.name) / shards(cfg, dim_index(n, a.map.dims), mesh)[0])
            if source.kind != "parameter":
                out += local
                continue
            written = write_states(source, *source.write_of(t.name), t, configs[source.name][None, :], mesh)
            read = read_states(n, op, a, t, cfg, mesh)
            again = op.region is not None  # else it counts as kept
            moved = (forward_states(written) != np.where(read == PARTIAL, REPLICATED, read)).any()
            out += local * (again and (moved or source.ops[0].writes[0].tensor != t.name))
            out += local * (t.needs_grad and bool((gradient_states(written) != read).any()))
    return out


def in_flight_at_least(graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """A lower bound on ``in_flight`` that this node's config alone decides: bytes [K]. Parameters are left out."""
    out = np.zeros(len(cfg))
    if n.kind in ("parameter", "input", "output", "copy", "carry"):
        return out
    seen: set[str] = set()
    for op in n.ops:
        for a in (*op.writes, *op.reads):
            source = graph.producer.get(a.tensor)
            inner = a.tensor in n.internal and not graph.read_outside(n, a.tensor)
            if source is None or inner or a.tensor in seen or (a.sparse and source is not n):
                continue
            seen.add(a.tensor)
            if source.kind != "parameter":
                t = graph.tensors[a.tensor]
                out = out + number(t.nbytes, t.name) / shards(cfg, dim_index(n, a.map.dims), mesh)
    return out


def memory(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    moved: tuple[Collective, ...],
    optimizer: str = "adam",
) -> Memory:
    """Predicted peak bytes on one device; configs: node name -> int8 [axes]."""
    sums = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
    regions: dict[tuple[Scope, ...], float] = {}
    for n in graph.nodes:
        for h in held(graph, n, configs[n.name][None, :], mesh, optimizer):
            if h.region is None:
                sums[h.kind] += float(h.nbytes[0])
            else:
                regions[h.region] = regions.get(h.region, 0.0) + float(h.nbytes[0])
    sums["activations"] += max(regions.values(), default=0.0)
    buffers = max((c.nbytes for c in moved), default=0.0)
    buffers = max(buffers, *(in_flight(graph, n, configs, mesh) for n in graph.nodes))
    return Memory(buffers=round(buffers), **{k: round(v) for k, v in sums.items()})


def profile(
    graph: Graph, mesh: Mesh, configs: Sequence[np.ndarray], limit_bytes: float, optimizer: str = "adam"
) -> MemoryProfile:
    """The same account as a limit for the search: one point of time for each region, all else lives throughout.

    configs: per node its int8 [K, axes]. A node that keeps something throughout and something in a region is
    counted with both throughout.
    """
    from pase.search import MemoryProfile

    per_node = [
        list(held(graph, n, cfg, mesh, optimizer)) for n, cfg in zip(graph.nodes, configs, strict=True)
    ]
    regions = dict.fromkeys(h.region for hs in per_node for h in hs if h.region is not None)
    point = {r: i for i, r in enumerate(regions)}
    last = max(len(point), 1)
    nbytes, start, stop = [], [], []
    for hs, cfg in zip(per_node, configs, strict=True):
        nbytes.append(sum((h.nbytes for h in hs), np.zeros(len(cfg))))
        only = {h.region for h in hs}
        region = only.pop() if len(only) == 1 else None
        at = point[region] if region is not None else 0
        start.append(at)
        stop.append((at + 1 if region is not None else last) if hs else at)
    return MemoryProfile(
        bytes=tuple(nbytes),
        start=np.array(start, np.int64),
        stop=np.array(stop, np.int64),
        limit_bytes=limit_bytes,
    )
