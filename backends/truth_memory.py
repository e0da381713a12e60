"""Predicted peak memory against what XLA's buffer assignment says of the compiled step.

One habit of XLA's CPU pipeline is allowed for, in ``on_cpu``: it gathers all sums of gradients of a scope (the whole
step, or one turn of a loop) in one all-reduce at its end, so that all partial gradients and all their sums live at
once, whole, since it forms no reduce-scatter either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pase.backends.truth import graph_of
from pase.plan.types import Plan

__all__ = ["Peak", "compare_memory"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes on one device. stored: parameters and optimizer state, predicted, then the arguments of the compiled step
    less its batch; the others are peaks."""

    stored: int
    stored_compiled: int
    predicted: int
    on_cpu: int
    compiled: int

    @property
    def error(self) -> float:
        """(predicted, as on CPU - compiled) / compiled."""
        return (self.on_cpu - self.compiled) / self.compiled


def compare_memory(plan: Plan, compiled: Any) -> Peak:
    """compiled: what ``plan.jax.lower_train_step(optimizer).compile()`` gave, on host devices, with the plan's
    optimizer."""
    a, m = compiled.memory_analysis(), plan.memory
    batch = sum(_local(plan, t) for t in plan.inputs.values())
    return Peak(
        stored=m.parameters + m.optimizer,
        stored_compiled=a.argument_size_in_bytes - batch,
        predicted=m.total,
        on_cpu=m.total - m.buffers + max(m.buffers, _sums_at_once(plan)),
        compiled=a.argument_size_in_bytes
        + a.output_size_in_bytes
        - a.alias_size_in_bytes
        + a.temp_size_in_bytes,
    )


def _local(plan: Plan, t: Any) -> int:
    from pase.ir.types import itemsize

    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    n = itemsize(t.dtype)
    for extent, axes in zip(t.shape, t.storage, strict=True):
        n *= extent
        for axis in axes:
            n //= sizes[axis]
    return n


def _sums_at_once(plan: Plan) -> int:
    """Partial gradients and their sums in the scope that has most of them, less the summed gradients that the plan
    counts already."""
    graph = graph_of(plan)
    parameters = {n.name for n in graph.nodes if n.kind == "parameter"}
    whole: dict[str, dict[tuple[str, str], int]] = {}
    for c in plan.collectives:
        if (
            c.phase != "backward"
            or c.source not in parameters
            or c.kind not in ("all_reduce", "reduce_scatter")
        ):
            continue
        loops = [s for s in graph.node[c.node].main.scope if s.startswith("loop")]
        here = whole.setdefault(loops[-1] if loops else "", {})
        here[c.node, c.tensor] = max(here.get((c.node, c.tensor), 0), c.nbytes)
    totals = {scope: 2 * sum(by.values()) for scope, by in whole.items()}
    if "" in totals:
        totals[""] -= min(plan.memory.gradients, totals[""] // 2)
    return max(totals.values(), default=0)
