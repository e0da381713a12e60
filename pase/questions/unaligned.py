"""Finds products whose rows are not aligned in memory, and what a larger dim would save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.ir import Graph, Node, SourceLine
from pase.machine import Mesh
from pase.plan.types import PlanData
from pase.tables.build import single_cost
from pase.tables.itemize import config_of
from pase.tables.layouts import concrete_size, dim_index, shards
from pase.tables.work import Work, aligned_elements, matrix_rows, node_work, product_groups

if TYPE_CHECKING:
    from pase.compiler.problem.problem import SplitProblem

__all__ = ["Unaligned", "unaligned"]


@dataclass(frozen=True, kw_only=True)
class Unaligned:
    """A product of which some rows, on a device, are no multiple of 16 bytes.

    layer: the node. source: the user's line.
    sizes: dim -> (its size, the next size at which rows are aligned, with the plan's split).
    cost: of the node's products in a step, in the plan's unit. padded: the same with these sizes.
    """

    layer: str
    source: SourceLine
    sizes: dict[str, tuple[int, int]]
    cost: float
    padded: float


def unaligned(plan: PlanData, problem: SplitProblem) -> tuple[Unaligned, ...]:
    """Every product that would be faster if some of its dims were a little larger, the one that gains most first."""
    mesh, model = plan.mesh, problem.model
    found = []
    for node in problem.graph.nodes:
        cfg = config_of(node, plan.strategy[node.name], mesh)[None]
        work = [
            w for w in node_work(problem.graph, node, cfg, mesh) if w.kind == "matmul" and np.any(w.unaligned)
        ]
        if not work:
            continue
        sizes = dict(_sizes(problem.graph, node, cfg, mesh, work[0].dtype))
        each = Unaligned(
            layer=node.name,
            source=node.source,
            sizes=sizes,
            cost=single_cost(work, model),
            padded=single_cost(
                [_padded(w, math.prod(new / old for old, new in sizes.values())) for w in work], model
            ),
        )
        if each.padded < each.cost:
            found.append(each)
    return tuple(sorted(found, key=lambda u: u.padded - u.cost))


def _sizes(
    graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh, dtype: str
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the innermost dim of each row that is not aligned: (dim, (its size, the next aligned one))."""
    width = aligned_elements(dtype)
    for op in (op for op in node.ops if op.kind == "matmul"):
        for dims, row in matrix_rows(graph, (*op.factors, *op.writes), product_groups(op)):
            ways = int(np.ravel(shards(cfg, dim_index(node, dims), mesh))[0])
            if row > width and row % (ways * width):
                size = concrete_size(node.space[dims[-1]].size, node.name)
                unit = width * int(np.ravel(shards(cfg, dim_index(node, dims[-1:]), mesh))[0])
                yield dims[-1], (size, math.ceil(size / unit) * unit)


def _padded(work: Work, larger: float) -> Work:
    """The work of dims that are larger by this factor in all."""
    assert work.mnk is not None  # only products have rows
    m, n, k = work.mnk
    return replace(
        work, flops=work.flops * larger, nbytes=work.nbytes * larger, mnk=(m * larger, n, k), unaligned=0.0
    )
