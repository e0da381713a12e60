"""Gradients of parameters on their way to where they are stored, in a program that runs call by call (PyTorch's).

They are sent in buckets, in the order in which backward makes them. Each waits, in the size in which its reader makes
it, until its bucket is full or backward makes no more of its kind; then the bucket is joined and sent. A sum takes the
place of the joined gradients, and a part of one is an array of its own. Both are counted as gradients of the
parameters (``pase.memory.account``), so here is what lives besides. A bucket that is scattered lives on until the next
one is joined, which is scattered over the same axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pase.ir import Graph
from pase.machine import FIRST_BUCKET_BYTES, Mesh
from pase.memory.account import (
    converted,
    gathered,
    is_gathered_again,
    is_made_by_call,
    kept_as_read,
    order_in_memory,
)
from pase.tables.axis_layout import PARTIAL, gradient_states, tensor_dim
from pase.tables.layouts import local_bytes
from pase.tables.work import has_gradient, parameter_reads

__all__ = ["GradientsInTransit", "gradients_in_transit"]


@dataclass(frozen=True, kw_only=True)
class _SentGradient:
    """A gradient to be sent.

    of: the node that stores the parameter.
    at: the moment at which its reader has made it.
    made, stored: its bytes as it is made, and as it arrives.
    kept: the bytes of what the reader kept of the parameter, which are free by then.
    key: equal for those that one bucket may carry; None if it is sent by itself.
    axes: over which it is summed.
    scattered: whether each device gets a part of the sum.
    copied: whether its order in memory is not the one in which it is sent.
    is_final: whether it is the parameter's own when it arrives, and not that of something made of it.
    """

    of: str
    at: int
    made: float
    stored: float
    kept: float
    key: object
    axes: tuple[int, ...]
    scattered: bool
    copied: bool
    is_final: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientsInTransit:
    """Gradients of parameters on their way, besides what is counted where it is stored. All but ``of`` are bytes.

    waits: during each node's backward, float64 [nodes + 1]; the last is the end of forward.
    sends: when the node's backward has ended, and one that is full is joined and sent.
    stays: at the end of the step: of what is made of parameters, in one array with gradients that stay.
    of: the nodes of the parameters whose gradients are sent.
    """

    waits: np.ndarray
    sends: np.ndarray
    stays: float
    of: frozenset[str]


def gradients_in_transit(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], bucket_bytes: float
) -> GradientsInTransit:
    """Returns the bytes of gradients of parameters on their way.

    configs: node name -> int8 [axes].
    """
    sent = sorted(_sent(graph, mesh, configs), key=lambda g: -g.at)
    last = {g.key: g for g in sent}
    waits = np.zeros(len(graph.nodes) + 1)
    joins = np.zeros(len(graph.nodes) + 1)
    open_: dict[object, list[_SentGradient]] = {}
    under_way: dict[tuple[int, ...], tuple[int, float]] = {}  # axes -> since when, and its bytes
    stays = 0.0
    full = min(FIRST_BUCKET_BYTES, bucket_bytes)
    for g in sent:
        bucket = open_.setdefault(g.key, [])
        bucket.append(g)
        made = sum(x.made for x in bucket)
        if g.key is not None and g is not last[g.key] and made < full:
            continue
        del open_[g.key]
        full = bucket_bytes if g.key is not None else full
        for x in bucket:  # it waits from its own moment to this one
            waits[g.at : x.at + 1] += x.made - x.stored
        copied = g.scattered if len(bucket) > 1 else g.copied
        joins[g.at] += sum(x.stored for x in bucket) + copied * made - g.kept
        if g.scattered:
            since, nbytes = under_way.pop(g.axes, (g.at, 0.0))
            waits[g.at : since] += nbytes
            joins[g.at] -= nbytes * (since > g.at)
            under_way[g.axes] = g.at, made
        if any(x.is_final for x in bucket):
            stays += sum(x.stored for x in bucket if not x.is_final)
    for since, nbytes in under_way.values():
        waits[:since] += nbytes
    return GradientsInTransit(waits=waits, sends=waits + joins, stays=stays, of=frozenset(g.of for g in sent))


def _sent(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> Iterator[_SentGradient]:
    """Yields the gradients of parameters that are sent."""
    for at, n in enumerate(graph.nodes):
        cfg = configs[n.name][None, :]
        for ops, a, _ in parameter_reads(graph, n):
            if not any(has_gradient(graph, op, a.tensor) for op in ops):
                continue
            source, tensor = graph.producer[a.tensor], graph.tensors[a.tensor]
            way = gathered(graph, n, ops[0], a, source)
            stored = configs[source.name][None, :]
            to, made = gradient_states(way.write.states(stored, mesh))[0], way.read.states(cfg, mesh)[0]
            if (to == made).all():
                continue
            summed = (made == PARTIAL) & (to != made)
            scattered = bool((summed & (to >= 0)).any())
            axes = tuple(np.flatnonzero(summed & (to >= 0) if scattered else summed).tolist())
            made_bytes = float(local_bytes(n, tensor, a, cfg, mesh)[0])
            moved = converted(graph, source, a.tensor) or way.resharded(stored, cfg, mesh)
            dims = [tensor_dim(int(d)) for d in to[list(axes)]] if scattered else []
            order = order_in_memory(source, a.tensor)
            here = any(is_gathered_again(graph, op, a.tensor) for op in ops) and not way.arrives(
                stored, cfg, mesh
            )
            kept = moved and (here or kept_as_read(graph, n, ops, a.tensor))
            yield _SentGradient(
                of=source.name,
                at=at,
                made=made_bytes,
                stored=float(local_bytes(source, tensor, source.write_of(a.tensor)[1], stored, mesh)[0]),
                kept=made_bytes * kept,
                key=(scattered, axes, tensor.itemsize) if axes else None,
                axes=axes,
                scattered=scattered,
                copied=list(order) != sorted(order) or any(dims),
                is_final=list(order) == sorted(order) and not is_made_by_call(source, a.tensor),
            )
