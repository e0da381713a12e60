"""Memory per device under a strategy.

Parameters, gradients and optimizer state are kept in the parameter's storage layout. Activations are the
tensors between nodes that backward needs, each once, in the layout it was written in, times the loop turns
that make it; inside a rematerialised region only what enters it is kept, plus one turn of the largest region
while it is recomputed. Buffers: the largest tensor gathered or in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pase.ir import Graph, Node
from pase.machine import Mesh
from pase.plan.itemize import Collective
from pase.tables.derive import OPTIMIZERS
from pase.tables.layouts import dim_index, number, shards

__all__ = ["Memory", "memory"]


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


def memory(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    moved: tuple[Collective, ...],
    optimizer: str = "adam",
) -> Memory:
    """Predicted peak bytes on one device; see the module's text for what is counted."""
    parameters = gradients = state = 0.0
    kept = 0.0
    recomputed: dict[tuple[str, ...], float] = defaultdict(float)

    def local(n: Node, tensor: str) -> float:
        _, write = n.write_of(tensor)
        t = graph.tensors[tensor]
        ways = shards(configs[n.name][None, :], dim_index(n, write.map.dims), mesh)[0]
        return number(t.nbytes, t.name) / ways

    for n in graph.nodes:
        for op in n.ops:
            for a in op.writes:
                t = graph.tensors[a.tensor]
                if t.role == "parameter":
                    size = local(n, a.tensor)
                    parameters += size
                    if t.needs_grad:
                        gradients += size
                        state += 4 * OPTIMIZERS[optimizer] * size / t.itemsize
                elif n.kind in ("parameter", "copy") or not graph.read_outside(n, a.tensor):
                    continue  # a cast or a copy can be made again, an inner value is fused
                elif t.role == "input":
                    kept += local(n, a.tensor)
                elif t.needs_grad:
                    size = local(n, a.tensor)
                    if op.remat:
                        recomputed[op.scope] += size
                    else:
                        kept += size * _turns(graph, n, op.times)
    buffers = max((c.nbytes for c in moved), default=0)
    return Memory(
        parameters=round(parameters), gradients=round(gradients), optimizer=round(state),
        activations=round(kept + max(recomputed.values(), default=0.0)), buffers=round(buffers),
    )  # fmt: skip


def _turns(graph: Graph, n: Node, times: object) -> int:
    """A carry is kept once for every turn of its loop."""
    if n.kind == "carry":
        return max(number(op.times, n.name) for op in n.ops)
    return number(times, n.name)  # type: ignore[arg-type]
