"""Finds attention that runs as two products and a softmax, and what a fused kernel would save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.frontends.registry import FRONTENDS
from pase.ir import Access, Graph, Node, Remark, SourceLine, functions
from pase.machine import CostModel, Mesh
from pase.memory.residuals import kept
from pase.plan.table import bytes_text, cost_text
from pase.plan.types import PlanData
from pase.tables.build import single_cost
from pase.tables.itemize import config_of
from pase.tables.layouts import concrete_size, dim_index, shards
from pase.tables.work import BACKWARD_PRODUCTS, Phase, Work, backward_passes, node_work

if TYPE_CHECKING:
    from pase.compiler.problem.problem import SplitProblem

__all__ = ["Unfused", "noted_unfused", "of_activations", "unfused", "unfused_text"]


@dataclass(frozen=True, kw_only=True)
class Unfused:
    """An attention that is written out.

    layers: the scores' product, the softmax, and the product with the values.
    source: the user's line of the softmax.
    cost: their cost in a step, in the plan's unit.
    fused: the cost of one fused kernel that computes all scores, with the same split. With a causal mask, it is half
        of this.
    kept: bytes of scores and weights that a device keeps for backward.
    """

    layers: tuple[str, str, str]
    source: SourceLine
    cost: float
    fused: float
    kept: int


def unfused(plan: PlanData, problem: SplitProblem) -> tuple[Unfused, ...]:
    """Every attention of the model that is written out and that a fused kernel would run faster."""
    graph, mesh = problem.graph, plan.mesh
    configs = {n.name: config_of(n, plan.strategy[n.name], mesh) for n in graph.nodes}
    cost = {n.name: n.cost.compute for n in plan.nodes}
    held = {t: k.times for t, k in kept(graph).items() if k.region is None}
    found = []
    for nodes in _written_out(graph):
        scores, weights, values = nodes
        arrays = [(n, *n.write_of(t)) for n in (scores, weights) for t in n.internal if t in held]
        each = Unfused(
            layers=(scores.name, weights.name, values.name),
            source=weights.source,
            cost=sum(cost[n.name] for n in nodes),
            fused=_as_one(graph, nodes, configs, mesh, problem.model),
            kept=round(sum(held[a.tensor] * _local(graph, n, a, configs, mesh) for n, _, a in arrays)),
        )
        if each.fused < each.cost:
            found.append(each)
    return tuple(found)


def unfused_text(plan: PlanData, problem: SplitProblem, found: Sequence[Unfused]) -> str:
    """A sentence about what fused kernels would save, and how the program requests one. found: from ``unfused``, at
    least one."""
    saved, kept = _saved(found)
    others = len(found) - 1
    places = found[0].layers[1] + (f" and {others} other{'s' if others > 1 else ''}" if others else "")
    scores = f" and {bytes_text(kept)} of scores kept on a device" if kept else ""
    reads = FRONTENDS.get(problem.graph.facts.frontend)
    how = reads.fused_attention if reads is not None else ""
    return (
        f"attention is written out around {places}: a fused kernel would save {cost_text(saved, plan.unit)} of the "
        f"step ({saved / plan.cost:.0%}; more if the mask is causal){scores}" + (f". {how}" if how else "")
    )


def noted_unfused(plan: PlanData, problem: SplitProblem) -> PlanData:
    """The plan with a remark if fused kernels of attention would save much of its step or of its memory."""
    if problem.model.unit != "s" or problem.machine.device.attention is None:
        return plan
    found = unfused(plan, problem)
    saved, kept = _saved(found)
    if not found or (saved < _MUCH * plan.cost and kept < _MUCH * plan.memory.total):
        return plan
    return replace(plan, noted=(*plan.noted, Remark("assumed", unfused_text(plan, problem, found))))


_MUCH = 0.05


def _saved(found: Sequence[Unfused]) -> tuple[float, int]:
    """(The cost, the kept bytes) that fused kernels would save."""
    return sum(u.cost - u.fused for u in found), sum(u.kept for u in found)


def _written_out(graph: Graph) -> Iterator[tuple[Node, Node, Node]]:
    """Yields (product, softmax, product), where the products are of activations and the second one sums over the dim of
    the softmax."""
    for weights in graph.nodes:
        computed = {op.function for op in weights.ops}
        if functions.EXP not in computed or functions.SUM not in computed:
            continue
        made = {graph.producer[a.tensor].name for _, a in weights.reads if a.tensor in graph.producer}
        scores = [graph.node[name] for name in made if of_activations(graph, graph.node[name])]
        read = {e.dst for e in graph.edges if e.src == weights.name}
        values = [graph.node[name] for name in read if of_activations(graph, graph.node[name])]
        if len(scores) == 1 and len(values) == 1 and _sums(weights, values[0]):
            yield scores[0], weights, values[0]


def of_activations(graph: Graph, n: Node) -> bool:
    """Whether the node is a product none of whose operands is a parameter, or a parameter's copy."""

    def leads_to_a_parameter(t: str) -> bool:
        maker = graph.producer.get(t)
        if maker is not None and maker.kind == "copy":
            return leads_to_a_parameter(maker.ops[0].reads[0].tensor)
        return maker is None or maker.kind in ("parameter", "constant")

    return n.kind == "matmul" and not any(leads_to_a_parameter(a.tensor) for a in n.main.reads)


def _sums(weights: Node, values: Node) -> bool:
    """Whether the product sums over the dim along which the softmax runs."""
    over = next(op for op in weights.ops if op.function is functions.SUM)
    kept_dims = set(over.writes[0].map.dims)
    (along, *more) = [
        i for i, w in enumerate(over.reads[0].map.walks) if w.dims and not set(w.dims) & kept_dims
    ]
    mine = [a for a in values.main.reads if a.tensor in weights.internal]
    if more or not mine or len(mine[0].map.walks) <= along:
        return False
    return not set(mine[0].map.walks[along].dims) & set(values.main.writes[0].map.dims)


def _as_one(
    graph: Graph,
    found: tuple[Node, Node, Node],
    configs: Mapping[str, np.ndarray],
    mesh: Mesh,
    model: CostModel,
) -> float:
    """The cost of both products as one fused kernel, forward and backward, summed over a step."""
    scores, weights, values = found
    first, second = (_products(graph, n, configs, mesh) for n in (scores, values))
    (k, keys), flops = (np.asarray(w[0].mnk)[2] for w in (first, second)), first[0].flops + second[0].flops
    sent = sum(
        _local(graph, n, a, configs, mesh)
        for n, accesses in ((scores, scores.main.reads), (values, (*values.main.reads, *values.main.writes)))
        for a in accesses
        if a.tensor not in weights.internal
    )
    result = graph.tensors[values.main.writes[0].tensor]
    result_bytes = _local(graph, values, values.main.writes[0], configs, mesh)
    phases: tuple[tuple[Phase, float, int], ...] = (("forward", 1.0, 1), ("backward", BACKWARD_PRODUCTS, 2))
    total = 0.0
    for phase, products, passes in phases:
        times = next((w.times for w in first if w.phase == phase), 0.0)
        work = Work(
            kind="attention",
            dtype=first[0].dtype,
            flops=products * flops,
            nbytes=np.asarray([passes * sent]),
            mnk=(keys, keys, k),
            phase=phase,
            times=times,
            passes=backward_passes(result, result_bytes) if phase == "backward" else 0.0,
        )
        total += single_cost([work], model)
    return total


def _products(graph: Graph, n: Node, configs: Mapping[str, np.ndarray], mesh: Mesh) -> list[Work]:
    return [w for w in node_work(graph, n, configs[n.name][None], mesh) if w.kind == "matmul"]


def _local(graph: Graph, n: Node, access: Access, configs: Mapping[str, np.ndarray], mesh: Mesh) -> float:
    """Bytes of a tensor on one device in the layout that the node has."""
    ways = shards(configs[n.name][None], dim_index(n, access.map.dims), mesh)
    return float(concrete_size(graph.tensors[access.tensor].nbytes, access.tensor) / ways[0])
