"""Peak memory over the step's course, as a compiler that fuses across layers arrives at it (XLA for TPU).

``pase.plan.memory`` sums what is kept and what is in flight, whenever it lives. Here a step has moments: the end of
forward, when all that is kept is there and the gradients of the last ops are made; and the backward of each
rematerialised region, when what was kept behind that region is gone, the gradients of its parameters are there, and
one turn of the region is made again. Results of exponentials that a fusion can make again from a kept operand are
not kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pase.ir import Access, Graph, Node, Op
from pase.machine import Mesh
from pase.plan.residuals import kept, region_of
from pase.tables.derive import OPTIMIZERS
from pase.tables.layouts import dim_index, number, shards, state_index

__all__ = ["peak"]

_MADE_AGAIN = frozenset({"exp", "exp2", "expm1", "tanh", "logistic"})
_ACCUMULATED = 4
"""Bytes of an element of a gradient while it is summed: float32."""


def peak(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], optimizer: str = "adam") -> int:
    """Predicted bytes on one device at the step's worst moment; configs: node name -> int8 [axes]."""
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    stored = gradients = looped = 0.0
    outside: list[tuple[int, float]] = []  # where it is made, bytes
    region: dict[tuple[str, ...], float] = {}
    starts: dict[tuple[str, ...], int] = {}
    flight: dict[tuple[str, ...] | None, float] = {}
    mine = 0.0
    wanted = kept(graph)
    made = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}

    def local(n: Node, a: Access) -> float:
        t = graph.tensors[a.tensor]
        ways = shards(configs[n.name][None, :], dim_index(n, a.map.dims), mesh)
        return float(number(t.nbytes, t.name) / ways[0])

    for n in graph.nodes:
        for op in n.ops:
            where = region_of(op)
            if where is not None:
                starts.setdefault(where, order[n.name])
            for a in op.writes:
                t = graph.tensors[a.tensor]
                if t.role == "parameter":
                    nbytes = local(n, a)
                    mine = nbytes / float(shards(configs[n.name][None, :], state_index(n), mesh)[0])
                    stored += nbytes
                    if t.needs_grad:
                        stored += 4 * OPTIMIZERS[optimizer] * mine / t.itemsize
                        gradients += mine
                elif t.role == "input":
                    stored += local(n, a)
                elif n.kind == "carry" and t.needs_grad:
                    turns = max(number(o.times, n.name) for o in n.ops)
                    outside.append((order[n.name], local(n, a) * turns))
                elif a.tensor in wanted and n.kind not in ("parameter", "copy"):
                    if op.name in _MADE_AGAIN and _operand_kept(op, wanted, made):
                        continue
                    k = wanted[a.tensor]
                    if k.region is not None:
                        region[k.region] = region.get(k.region, 0.0) + local(n, a)
                    else:
                        outside.append((order[n.name], local(n, a) * number(k.times, t.name)))
        # A loop's stack of weights is cast before the loop, and that of their gradients is there from its start.
        casts = [op for op in n.ops[1:] if op.kind == "elementwise" and number(op.times, n.name) > 1]
        if n.kind == "parameter" and casts:
            stored += sum(local(n, op.writes[0]) * number(op.times, n.name) for op in casts)
            looped += mine if graph.tensors[n.ops[0].writes[0].tensor].needs_grad else 0.0
        for where, nbytes in _weights(graph, n, local).items():
            flight[where] = max(flight.get(where, 0.0), nbytes)
    moments = [sum(b for _, b in outside) + looped + flight.get(None, 0.0)]
    for where, start in starts.items():
        before = sum(b for at, b in outside if at < start)
        moments.append(before + gradients + region.get(where, 0.0) + flight.get(where, 0.0))
    return round(stored + max(moments))


def _operand_kept(op: Op, wanted: Mapping[str, object], made: Mapping[str, Op]) -> bool:
    """Is some operand, followed back through elementwise ops, views and copies, itself kept?"""
    seen, left = set(), [a.tensor for a in op.reads]
    while left:
        t = left.pop()
        if t in wanted:
            return True
        if t in seen or t not in made or made[t].kind not in ("elementwise", "view", "copy"):
            continue
        seen.add(t)
        left += [a.tensor for a in made[t].reads]
    return False


def _weights(graph: Graph, n: Node, local: object) -> dict[tuple[str, ...] | None, float]:
    """Of parameters that this node's products read: what they read, and its gradient before it is sent home."""
    out: dict[tuple[str, ...] | None, float] = {}
    for op, a in n.reads:
        source = graph.producer.get(a.tensor)
        if source is None or source.kind != "parameter" or op.kind not in ("matmul", "conv"):
            continue
        nbytes = local(n, a)  # type: ignore[operator]
        t = graph.tensors[a.tensor]
        gradient = nbytes / t.itemsize * _ACCUMULATED if t.needs_grad and op.differentiable else 0.0
        where = region_of(op)
        out[where] = out.get(where, 0.0) + nbytes + gradient
    return out
