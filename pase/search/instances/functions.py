"""Converts cost functions of any number of variables, as in WCSP, UAI and MPS files, to tables over nodes and edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.errors import PaseError
from pase.tables.types import CostTables, EdgeTable

__all__ = ["MAX_CELLS", "CostFunction", "tables_of"]

MAX_CELLS = 200_000_000  # the most numbers in all functions together


@dataclass(frozen=True, kw_only=True, eq=False)
class CostFunction:
    """A cost function. scope: its variables, all different. cost: float64, one axis per variable; inf forbids."""

    scope: tuple[int, ...]
    cost: np.ndarray


def tables_of(sizes: Sequence[int], functions: Sequence[CostFunction], names: Sequence[str]) -> CostTables:
    """The problem as nodes and edges. sizes: the number of values of each variable. names: of the variables.

    The first nodes are the variables, in order. A function of three or more variables gets a node of its own after
    them, whose configs are the assignments that it allows. An edge to each of its variables makes them agree. The cost
    of a function without variables is added to the first node. Raises PaseError if there is no variable.
    """
    if not sizes:
        raise PaseError("the problem has no variables")
    costs = [np.zeros(k) for k in sizes]
    iota = {k: np.arange(k, dtype=np.int32) for k in set(sizes)}
    agree = {k: np.where(np.eye(k, dtype=bool), 0.0, np.inf) for k in set(sizes)}
    same: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
    edges, every_name = list[EdgeTable](), list(names)
    for f in functions:
        if not f.scope:
            costs[0] = costs[0] + float(f.cost)
        elif len(f.scope) == 1:
            costs[f.scope[0]] = costs[f.scope[0]] + f.cost
        elif len(f.scope) == 2:
            (a, b), m = f.scope, np.ascontiguousarray(f.cost)
            # Equal functions share one array, so that the search handles them once.
            m = same.setdefault((m.shape, m.tobytes()), m)
            edges.append(EdgeTable(src=a, dst=b, cost=m, src_class=iota[sizes[a]], dst_class=iota[sizes[b]]))
        else:
            allowed = np.isfinite(f.cost)
            node = len(costs)
            costs.append(f.cost[allowed] if allowed.any() else np.array([np.inf]))
            every_name.append(" ".join(["function of", *(names[v] for v in f.scope)]))
            values = np.nonzero(allowed) if allowed.any() else (np.zeros(1, np.int64),) * len(f.scope)
            edges += [
                EdgeTable(
                    src=node,
                    dst=v,
                    cost=agree[sizes[v]],
                    src_class=at.astype(np.int32),
                    dst_class=iota[sizes[v]],
                )
                for v, at in zip(f.scope, values, strict=True)
            ]
    return CostTables(node_costs=tuple(costs), edges=tuple(edges), names=tuple(every_name))


def cells(sizes: Sequence[int], scope: Sequence[int]) -> int:
    """The number of assignments of the variables in ``scope``."""
    return math.prod(sizes[v] for v in scope)
