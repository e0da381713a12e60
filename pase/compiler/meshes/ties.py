"""Chooses, among strategies of equal cost, the one that stores the least.

A program that is not trained pays nothing for a parameter that is stored whole and read in parts, so time alone does
not determine how to store it. Here, stored tensors and the nodes that pass them on get the layouts that their readers
want.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pase.compiler.meshes.search import Found
from pase.compiler.problem.problem import SplitProblem
from pase.ir import Node
from pase.tables.layouts import local_bytes

__all__ = ["least_stored"]

_HANDED_ON = ("copy", "carry")
_STORED = ("parameter", "input")
_EQUAL = 1e-12
"""Relative to the strategy's cost. Sums in another order differ by less."""


def least_stored(problem: SplitProblem, found: Found) -> Found:
    """Return the same strategy with stored tensors split as far as that costs nothing. Its cost does not change."""
    tables, space = problem.tables(found.mesh)
    graph, choice = problem.graph, np.array(found.solution.choice)
    edges: list[list[tuple[bool, int]]] = [[] for _ in graph.nodes]
    for i, e in enumerate(tables.edges):
        edges[e.src].append((True, i))
        edges[e.dst].append((False, i))

    def cost_of(v: int) -> np.ndarray:
        total = tables.node_costs[v].copy()
        for leaves, i in edges[v]:
            e = tables.edges[i]
            if leaves:
                total += e.cost[e.src_class, e.dst_class[choice[e.dst]]]
            else:
                total += e.cost[e.src_class[choice[e.src]], e.dst_class]
        return np.asarray(total)

    def held(n: Node, cfg: np.ndarray) -> np.ndarray:
        access = n.ops[0].writes[0]
        return np.asarray(local_bytes(n, graph.tensors[access.tensor], access, cfg, found.mesh))

    places = [v for v, n in enumerate(graph.nodes) if n.kind in _HANDED_ON]
    places += [v for v, n in enumerate(graph.nodes) if n.kind in _STORED]
    for v in places:
        total = cost_of(v)
        equal = np.flatnonzero(total <= total[choice[v]] + _EQUAL * abs(found.solution.cost))
        nbytes = held(graph.nodes[v], space.configs[v][equal])
        best = equal[int(np.argmin(nbytes))]
        if nbytes.min() < held(graph.nodes[v], space.configs[v][choice[v]][None, :])[0]:
            choice[v] = best
    return replace(found, solution=replace(found.solution, choice=choice))
