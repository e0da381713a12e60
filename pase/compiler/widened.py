"""Finds products whose backward runs in a wider dtype than their operands have, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.compiler.unfused import of_activations
from pase.frontends.registry import FRONTENDS
from pase.ir import Node, Op, Remark, SourceLine
from pase.ir.precision import gradient_dtype, product_dtype
from pase.plan.table import cost_text
from pase.plan.types import PlanData
from pase.tables.build import habits, single_cost
from pase.tables.itemize import config_of
from pase.tables.work import has_gradient, node_work

if TYPE_CHECKING:
    from pase.compiler.problem.problem import SplitProblem

__all__ = ["Widened", "noted_widened", "widened"]


@dataclass(frozen=True, kw_only=True)
class Widened:
    """A product whose gradients are computed in its result's dtype.

    layer: the node. source: the user's line. operands, result: the dtypes.
    cost: what the node costs more in a step than with a result in its operands' dtype, in the plan's unit.
    """

    layer: str
    source: SourceLine
    operands: str
    result: str
    cost: float


def widened(plan: PlanData, problem: SplitProblem) -> tuple[Widened, ...]:
    """Every product with a parameter that would have a faster backward if its result had its operands' dtype, the
    dearest first. Products of activations are attention's scores, which a fused kernel computes better."""
    graph, mesh, model = problem.graph, plan.mesh, problem.model
    does = habits(model)
    found = []
    for node, op in _wide_products(problem):
        cfg = config_of(node, plan.strategy[node.name], mesh)[None]
        costs = (
            single_cost(node_work(graph, node, cfg, mesh, habits=h), model)
            for h in (does, replace(does, widens=False))
        )
        wide, narrow = costs
        found.append(
            Widened(
                layer=node.name,
                source=op.source,
                operands=product_dtype(graph, op),
                result=gradient_dtype(graph, op),
                cost=wide - narrow,
            )
        )
    return tuple(sorted((w for w in found if w.cost > 0), key=lambda w: -w.cost))


def noted_widened(plan: PlanData, problem: SplitProblem) -> PlanData:
    """The plan with a remark if such products take a considerable part of its step."""
    if problem.model.unit != "s":
        return plan
    found = widened(plan, problem)
    if not found or sum(w.cost for w in found) < _MUCH * plan.cost:
        return plan
    remark = Remark("assumed", _text(plan, problem, found), str(found[0].source.from_root()))
    return replace(plan, noted=(*plan.noted, remark))


_MUCH = 0.03


def _text(plan: PlanData, problem: SplitProblem, found: Sequence[Widened]) -> str:
    cost, first, others = sum(w.cost for w in found), found[0], len(found) - 1
    places = first.layer + (f" and {others} other{'s' if others > 1 else ''}" if others else "")
    reads = FRONTENDS.get(problem.graph.facts.frontend)
    how = reads.narrow_result if reads is not None else ""
    return (
        f"the product {places} has a result in {first.result} of operands in {first.operands}, so both products of "
        f"its backward run in {first.result}: {cost_text(cost, plan.unit)} of the step ({cost / plan.cost:.0%})"
        + (f". {how}" if how else "")
    )


def _wide_products(problem: SplitProblem) -> Iterator[tuple[Node, Op]]:
    graph = problem.graph
    for node in (n for n in graph.nodes if not of_activations(graph, n)):
        for op in node.ops:
            if (
                op.kind in ("matmul", "conv")
                and gradient_dtype(graph, op) != product_dtype(graph, op)
                and any(has_gradient(graph, op, a.tensor) for a in op.factors)
            ):
                yield node, op
                break
