"""Memory per device under a strategy: one definition, for the plan's account and for a search under a limit.

Parameters are kept in their storage layout, gradients and optimizer state so too or split further (ZeRO-2).
Activations are the tensors between nodes that backward needs, each once, in the layout it was written in, times
the loop turns that make it; inside a rematerialised region only what enters it is kept, and while a region is
recomputed, one turn of its inner tensors. Buffers: the largest tensor in flight in a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pase.ir import Graph, Node
from pase.machine import Mesh
from pase.plan.itemize import Collective
from pase.tables.derive import OPTIMIZERS
from pase.tables.layouts import dim_index, number, shards, state_index

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["Held", "Memory", "held", "memory", "profile"]

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
    region: tuple[str, ...] | None = None


def held(graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str = "adam") -> Iterator[Held]:
    """What the node keeps under each of its configs; cfg int8 [K, axes]."""
    for op in n.ops:
        for a in op.writes:
            t = graph.tensors[a.tensor]
            local = number(t.nbytes, t.name) / shards(cfg, dim_index(n, a.map.dims), mesh)
            if t.role == "parameter":
                yield Held(kind="parameters", nbytes=local)
                if t.needs_grad:
                    mine = local / shards(cfg, state_index(n), mesh)
                    yield Held(kind="gradients", nbytes=mine)
                    yield Held(kind="optimizer", nbytes=4 * OPTIMIZERS[optimizer] * mine / t.itemsize)
            elif n.kind in ("parameter", "copy") or not graph.read_outside(n, a.tensor):
                continue  # a cast or a copy can be made again, an inner value is fused
            elif t.role == "input":
                yield Held(kind="activations", nbytes=local)
            elif t.needs_grad and op.remat:
                yield Held(kind="activations", nbytes=local, region=op.scope)
            elif t.needs_grad:  # a carry is kept once for every turn of its loop
                turns = (
                    max(number(o.times, n.name) for o in n.ops)
                    if n.kind == "carry"
                    else number(op.times, n.name)
                )
                yield Held(kind="activations", nbytes=local * turns)


def memory(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    moved: tuple[Collective, ...],
    optimizer: str = "adam",
) -> Memory:
    """Predicted peak bytes on one device; configs: node name -> int8 [axes]."""
    kept = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
    regions: dict[tuple[str, ...], float] = {}
    for n in graph.nodes:
        for h in held(graph, n, configs[n.name][None, :], mesh, optimizer):
            if h.region is None:
                kept[h.kind] += float(h.nbytes[0])
            else:
                regions[h.region] = regions.get(h.region, 0.0) + float(h.nbytes[0])
    kept["activations"] += max(regions.values(), default=0.0)
    buffers = max((c.nbytes for c in moved), default=0)
    return Memory(buffers=buffers, **{k: round(v) for k, v in kept.items()})


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
