"""Finds products of float32 that keep all bits of their factors, and what the device's default precision would save."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pase.frontends.registry import FRONTENDS
from pase.ir import Graph, Node, Remark
from pase.ir.precision import HIGHEST, product_dtype, rate_dtype
from pase.plan.table import cost_text
from pase.plan.types import PlanData
from pase.tables.build import habits, single_cost
from pase.tables.itemize import config_of
from pase.tables.work import node_work

if TYPE_CHECKING:
    from pase.compiler.problem.problem import SplitProblem

__all__ = ["noted_all_bits"]

_MUCH = 0.03
"""The part of a step from which on a saving is worth a remark."""


def noted_all_bits(plan: PlanData, problem: SplitProblem) -> PlanData:
    """The plan with a remark if such products take considerably longer than they would with the default precision, or
    if the machine has no rate for them."""
    nodes = [n for n in problem.graph.nodes if _keeps_all(problem.graph, n)]
    if not nodes or problem.model.unit != "s":
        return plan
    first = str(nodes[0].source.from_root())
    if HIGHEST not in problem.machine.device.peak_flops:
        what = (
            f"products of float32 keep all bits of their factors here, and are priced at the rate of float32: the "
            f"machine has none for them ({HIGHEST} in [device.peak_flops])"
        )
        return replace(plan, noted=(*plan.noted, Remark("assumed", what, first)))
    exact = sum(_cost(plan, problem, n) for n in nodes)
    rounded = sum(_cost(plan, problem, _by_default(n)) for n in nodes)
    if exact - rounded < _MUCH * plan.cost:
        return plan
    reads = FRONTENDS.get(problem.graph.facts.frontend)
    how = reads.fewer_bits if reads is not None else ""
    what = (
        f"products of float32 keep all bits of their factors here, which takes {cost_text(exact, plan.unit)} of the "
        f"step; with the device's default precision (TF32 on NVIDIA GPUs), they would take "
        f"{cost_text(rounded, plan.unit)}. {how}"
    )
    return replace(plan, noted=(*plan.noted, Remark("assumed", what.strip(), first)))


def _keeps_all(graph: Graph, node: Node) -> bool:
    products = (op for op in node.ops if op.kind in ("matmul", "conv"))
    return any(rate_dtype(op, product_dtype(graph, op)) == HIGHEST for op in products)


def _by_default(node: Node) -> Node:
    """The node with products that may round. Fused attention keeps its precision, which no setting changes."""
    ops = (replace(op, precision=None) if op.kind != "attention" else op for op in node.ops)
    return replace(node, ops=tuple(ops))


def _cost(plan: PlanData, problem: SplitProblem, node: Node) -> float:
    """What the node's work costs under the plan."""
    cfg = config_of(node, plan.strategy[node.name], plan.mesh)[None]
    work = node_work(problem.graph, node, cfg, plan.mesh, habits=habits(problem.model))
    return single_cost(work, problem.model)
