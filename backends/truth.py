"""What a plan predicted, beside what XLA compiled: bytes by kind of collective.

Two habits of XLA's CPU pipeline are allowed for, in the column ``on_cpu``, so that the comparison tests the
plan and not the backend: it never forms a reduce-scatter (a whole all-reduce and a slice instead), and it
does not sum the partial gradients of a tensor's readers before it reduces them (GPU and TPU pipelines do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pase.backends.hlo import collectives
from pase.errors import PaseError
from pase.plan.types import Plan

__all__ = ["Row", "compare", "total_error"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of collective; bytes are times × the larger local buffer, summed over a step."""

    kind: str
    predicted: int
    on_cpu: int
    compiled: int

    @property
    def error(self) -> float:
        """(predicted - compiled) / compiled, with the CPU pipeline's habits allowed for; 0 where both are 0."""
        return (self.on_cpu - self.compiled) / self.compiled if self.compiled else float(self.on_cpu > 0)


def compare(plan: Plan, compiled: Any) -> list[Row]:
    """compiled: what ``plan.jax.lower_train_step(optimizer).compile()`` gave, on host devices."""
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute")
    predicted = dict.fromkeys(kinds, 0)
    on_cpu = dict.fromkeys(kinds, 0)
    readers = _partial_readers(plan)
    for c in plan.collectives:
        nbytes = c.nbytes * c.times
        predicted[c.kind] += nbytes
        kind = "all_reduce" if c.kind == "reduce_scatter" else c.kind
        on_cpu[kind] += nbytes * (max(readers.get(c.node, 1), 1) if c.phase == "backward" else 1)
    found = dict.fromkeys(kinds, 0)
    for h in collectives(compiled):
        found[h.kind] += h.bytes * (h.count or 1)
    return [Row(kind=k, predicted=predicted[k], on_cpu=on_cpu[k], compiled=found[k]) for k in kinds]


def _partial_readers(plan: Plan) -> dict[str, int]:
    """Copy node -> how many readers hand it a gradient that is still partial."""
    from pase.ir import named, simplify
    from pase.plan.itemize import config_of
    from pase.tables.layouts import PARTIAL, read_states

    if plan.traced is None:
        raise PaseError("the plan was loaded without its model: plan.bind(fn, params, batch) first")
    graph = named(simplify(plan.traced.graph))
    out: dict[str, int] = {}
    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        if src.kind == "copy" and "pending" in plan.strategy[src.name]:
            config = config_of(dst, plan.strategy[dst.name], plan.mesh)[None, :]
            states = read_states(dst, e.op, e.access, graph.tensors[e.tensor], config, plan.mesh)
            out[src.name] = out.get(src.name, 0) + int((states == PARTIAL).any())
    return out


def total_error(rows: Sequence[Row]) -> float:
    """Error of all bytes together."""
    compiled = sum(r.compiled for r in rows)
    return (sum(r.on_cpu for r in rows) - compiled) / compiled if compiled else float(any(r.on_cpu for r in rows))
