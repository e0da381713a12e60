"""Compares the predicted peak memory with XLA's buffer assignment for the compiled step.

``on_cpu`` accounts for three properties of XLA's CPU pipeline. It runs updates last, so that all gradients are alive at
the end, and it moves work between forward and backward: everything that is kept counts, whenever it is alive
(``pase.memory.account``). Second, it combines all gradient reductions of a scope (the
whole step, or one loop iteration) into one all-reduce at the end of the scope. All partial gradients and all their sums
are then live at the same time, and they are not sharded, because it never forms a reduce-scatter. Third, it does not
fuse anything with convolutions (``_forward``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pase.backends.jax.spmd.lower import Lowering
from pase.ir import Access, Node, Scope, functions
from pase.memory.account import held, memory
from pase.plan.types import PlanData
from pase.tables.layouts import local_bytes

if TYPE_CHECKING:
    from jax.stages import Compiled


__all__ = ["Peak", "compare_memory"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes on one device.

    stored: the predicted bytes of parameters and optimizer state. stored_compiled: the arguments of the compiled step
    without its batch. predicted, on_cpu, compiled: peak bytes.
    """

    stored: int
    stored_compiled: int
    predicted: int
    on_cpu: int
    compiled: int

    @property
    def error(self) -> float:
        """(on_cpu - compiled) / compiled."""
        return (self.on_cpu - self.compiled) / self.compiled


def compare_memory(plan: PlanData, compiled: Compiled, lowering: Lowering = "annotated") -> Peak:
    """Compare the plan's memory with that of a compiled step.

    compiled: the result of ``plan.jax.lower_train_step(optimizer, lowering=…).compile()`` on host devices, with the
    plan's optimizer. lowering: the lowering of that step. In the manual lowering, gradients are reduced according to
    the plan, so there are no additional unsharded gradients.
    """
    a, m = compiled.memory_analysis(), plan.memory
    configs = {n.name: _config(plan, n)[0] for n in plan.graph.nodes}
    ever = memory(plan.graph, plan.mesh, configs, plan.optimizer, prefetch=plan.overlap is not None)
    assert a is not None  # host devices provide it
    sums = _sums_at_once(plan, ever.gradients) if lowering == "annotated" else 0
    batch = sum(t.local_bytes(plan.mesh) for t in plan.inputs.values())
    return Peak(
        stored=m.parameters + m.optimizer,
        stored_compiled=a.argument_size_in_bytes - batch,
        predicted=m.total,
        on_cpu=max(ever.total - ever.buffers + max(ever.buffers, sums), _forward(plan)),
        compiled=a.argument_size_in_bytes
        + a.output_size_in_bytes
        - a.alias_size_in_bytes
        + a.temp_size_in_bytes,
    )


def _sums_at_once(plan: PlanData, gradients: int) -> int:
    """Bytes of partial gradients and their sums in the scope with the most of them.

    gradients: the bytes of reduced gradients, which are counted already and left out.
    """
    graph = plan.graph
    parameters = {n.name for n in graph.nodes if n.kind == "parameter"}
    whole: dict[Scope | None, dict[tuple[str, str], int]] = {}
    for c in plan.collectives:
        if (
            c.phase != "backward"
            or c.source not in parameters
            or c.kind not in ("all_reduce", "reduce_scatter")
        ):
            continue
        loops = [s for s in graph.node[c.node].main.scope if s.kind == "loop"]
        here = whole.setdefault(loops[-1] if loops else None, {})
        here[c.node, c.tensor] = max(here.get((c.node, c.tensor), 0), c.nbytes)
    totals = {scope: 2 * sum(by.values()) for scope, by in whole.items()}
    if None in totals:  # the step itself
        totals[None] -= min(gradients, totals[None] // 2)
    return max(totals.values(), default=0)


_INDEX = 4
"""Bytes of an index: int32."""


def _forward(plan: PlanData) -> int:
    """Peak bytes of XLA's CPU pipeline at a max-pooling of forward, or at the end of forward.

    They consist of the residuals so far, and of the arrays of convolutions and poolings that are not fused.

    - The gradients of a convolution are convolutions that read its operands transposed. These copies are made together
      with the operands and live as long as they do. Copies of weights do not depend on activations, so they exist from
      the start of the step.
    - A max-pooling with a gradient finds indices as well as maxima. It reads one array of indices for each dim of its
      operand. (These are iotas without operands, so those of later poolings already exist.) It writes the same number
      of arrays of its result's size. These are residuals, together with the zeros of the operand's size into which the
      gradient is scattered.
    """
    graph, mesh, m = plan.graph, plan.mesh, plan.memory
    kept = weights = zeros = indices = 0.0
    before: list[
        tuple[float, float]
    ] = []  # for each pooling: (residuals so far, bytes that it reads and writes)
    for n in graph.nodes:
        cfg = _config(plan, n)

        def local(a: Access, n: Node = n, cfg: np.ndarray = cfg) -> float:
            t = graph.tensors[a.tensor]
            return float(local_bytes(n, t, a, cfg, mesh)[0])

        kept += sum(
            float(h.nbytes[0]) for h in held(graph, n, cfg, mesh) if h.kind == "activations" and not h.region
        )
        for op in n.ops:
            if op.kind == "conv" and op.differentiable:
                x, w = op.reads[:2]
                kept += local(x)
                weights += local(w) * graph.tensors[x.tensor].needs_grad
            elif op.function is functions.WINDOW_MAX and graph.tensors[op.reads[0].tensor].needs_grad:
                t = graph.tensors[op.reads[0].tensor]
                into, out = (
                    _INDEX / t.itemsize * len(t.shape) * local(a) for a in (op.reads[0], op.writes[0])
                )
                zeros += local(op.reads[0])
                before.append((kept + local(op.reads[0]) + indices + out, into))
                indices += out
    stored = m.parameters + m.optimizer + weights + zeros
    at = [now + sum(into for _, into in before[i:]) for i, (now, _) in enumerate(before)]
    return round(stored + max([*at, kept + indices])) if weights else 0


def _config(plan: PlanData, n: Node) -> np.ndarray:
    """The node's config: int8 [1, axes]."""
    out = np.full((1, len(plan.mesh.sizes)), -1, np.int8)
    names = [d.name for d in n.space]
    for dim, axes in plan.strategy[n.name].items():
        for axis in axes:
            out[0, plan.mesh.names.index(axis)] = names.index(dim)
    return out
