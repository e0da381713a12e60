"""A node's work on one device as a program's own kernels run it, with its price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pase.costmodels.attention import rate_at_width
from pase.ir import Graph, Node
from pase.ir.functions import CAUSAL_ATTENTION
from pase.ir.precision import FP8, operand_bytes
from pase.machine import CostModel, Mesh
from pase.plan.step import executed_work
from pase.stated.program import Program
from pase.stated.strategy import PRODUCTS_IN, Strategy
from pase.tables.build import work_price
from pase.tables.layouts import dim_index, shards
from pase.tables.work import SCALE_PASSES, Work

__all__ = ["priced_work"]

_OPTIMIZER = "adam"


def priced_work(
    graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, s: Strategy, program: Program, model: CostModel
) -> Iterator[tuple[Work, float]]:
    """Yield the node's work on one device as the program's own kernels run it, each piece with its price for one run.

    The program defines what casts to fp8 read. NVFP4 has a scale of the whole tensor, for which the tensor is read once
    more (Transformer Engine, NVFP4BlockScaling).
    """
    for w in executed_work(graph, n, cfg, mesh, model, program.executor, _OPTIMIZER):
        if w.kind == "attention":
            yield w, _attention_s(graph, n, cfg, mesh, w, program, model)
            continue
        if w.casts in ("narrower", "weight"):
            written = 2 * operand_bytes(PRODUCTS_IN[s.precision] or FP8)
            passes = max(program.fp8_passes, 1.0) if s.precision == "nvfp4" else program.fp8_passes
            own, had = (2 * (1 + often) + written for often in (passes, SCALE_PASSES))
            w = replace(w, nbytes=w.nbytes * own / had)
            yield w, model.machine.device.cast_s(float(np.ravel(w.nbytes)[0]))
            continue
        yield w, float(np.ravel(work_price(w, model))[0])


def _attention_s(
    graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, w: Work, program: Program, model: CostModel
) -> float:
    """Return the seconds of an attention with the program's own kernel, if the machine knows it.

    With a causal mask and a sharded sequence, all ranks have the same work, because all frameworks assign chunks in
    pairs (zigzag).
    """
    op = next(op for op in n.ops if op.kind == "attention")
    if op.function is CAUSAL_ATTENTION:
        queries = op.writes[1].map.walks[1].dims
        ways = float(shards(cfg, dim_index(n, queries), mesh)[0])
        w = replace(w, flops=w.flops * (0.5 / (1 - 1 / (2 * ways))))
    device = model.machine.device
    known = {k.name: k for k in device.attention_kernels}
    name = next((name for name in program.attention if name in known), None)
    seconds = float(np.ravel(work_price(w, model))[0])
    if name is None or w.mnk is None:
        return seconds
    backward = w.phase == "backward"
    rate = device.peak_of("attention", w.dtype) * float(
        known[name].at(np.asarray(w.mnk[1]), backward=backward).ravel()[0]
    )
    width = float(np.ravel(w.mnk[2])[0])
    return float(np.ravel(w.flops)[0]) / (rate * rate_at_width(device, width, backward)) + device.launch_s
