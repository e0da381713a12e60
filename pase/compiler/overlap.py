"""Gradient synchronisation that overlaps with backward: a step then costs C + max(0, S - V).

C: everything that cannot be hidden (forward, backward, update, collectives that an op waits for). S: the time to
synchronise the gradients. V: the compute of backward, which hides it. The search's tables are additive and a maximum is
not, but

    max(0, S - V) = max over w in [0, 1] of w (S - V),   so   min over strategies  >=  min of C + w (S - V),  every w.

The tables at weight w are a mix of those at 0 and at 1. Their exact optima are bounds, and their solutions, priced
exactly, are candidates. The next weight is where the lines of the two that enclose the maximum meet. The search ends
when a bound meets a candidate, or it reports the gap that is left. This is the Lagrangian dual of the constraint that S
- V is at most 0, with a price for its violation, and it is exact for its relaxation.

This prices the whole step and is not a timeline: it assumes that all of backward may hide any gradient.
``pase.schedule`` knows the order in which gradients become ready, and finds slightly more exposed time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.ir import Graph
from pase.ir.blocks import once_of, turns_of
from pase.machine import CostModel, Mesh
from pase.search import Solution, solve
from pase.search.check import cost_of
from pase.tables import CostTables
from pase.tables.build import Space, build

__all__ = ["Hiding", "build_hiding", "exposed", "solve_hiding"]

_MOST_WEIGHTS = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Hiding:
    """Tables at weight 0 (gradients are free) and at weight 1 (what they take, less backward's compute)."""

    free: CostTables
    charged: CostTables
    space: Space

    def cost(self, choice: np.ndarray) -> float:
        """C + max(0, S - V) of one config index per node."""
        return max(cost_of(self.free, choice), cost_of(self.charged, choice))

    def at(self, weight: float) -> CostTables:
        """The tables at a weight. Nodes that share an array at both ends share one here too."""
        same: dict[tuple[int, int], np.ndarray] = {}

        def mixed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            key = (id(a), id(b))
            if key not in same:
                same[key] = (1 - weight) * a + weight * b
            return same[key]

        nodes = zip(self.free.node_costs, self.charged.node_costs, strict=True)
        edges = zip(self.free.edges, self.charged.edges, strict=True)
        return replace(
            self.free,
            node_costs=tuple(mixed(a, b) for a, b in nodes),
            edges=tuple(replace(e, cost=mixed(e.cost, f.cost)) for e, f in edges),
        )


def build_hiding(graph: Graph, mesh: Mesh, model: CostModel, optimizer: str) -> Hiding:
    """The tables of a mesh. Sums that come once a step have only the last micro-batch's backward to hide behind."""
    hides = 1 / turns_of(graph) if once_of(graph) == "all" else 1.0
    free, space = build(graph, mesh, model, optimizer, sync=0.0, backward=1.0)
    charged, _ = build(graph, mesh, model, optimizer, sync=1.0, backward=1.0 - hides)
    return Hiding(free=free, charged=charged, space=space)


def solve_hiding(
    h: Hiding,
    candidates: Sequence[np.ndarray] = (),
    one: Callable[[CostTables], Solution] = solve,
) -> Solution:
    """The best strategy found, and the proven bound. candidates: further choices to price.

    one: solves the tables at a weight. Under a memory limit, which forbids the same strategies at every weight, its
    bounds need not be met. If it finds no feasible strategy, its answer is returned unchanged.
    """
    best: Solution | None = None
    lines: list[tuple[float, float]] = []  # (cost at weight 0, at weight 1) of each answer
    bound, weights = -np.inf, [0.0, 1.0]
    for _ in range(_MOST_WEIGHTS):
        if not weights:
            break
        w = weights.pop(0)
        s = one(h.at(w))
        bound = max(bound, s.bound)
        if not s.feasible:
            if best is None:
                return s
            continue
        for choice in (s.choice, *candidates):
            cost = h.cost(choice)
            if best is None or cost < best.cost:
                best = replace(s, choice=choice, cost=cost)
        candidates = ()
        lines.append((cost_of(h.free, s.choice), cost_of(h.charged, s.choice)))
        assert best is not None
        if best.cost <= bound * (1 + 1e-9):
            break
        if not weights:
            weights = _crossing(lines, bound)
    assert best is not None
    optimal = best.cost <= bound * (1 + 1e-9)
    return replace(
        best,
        bound=min(bound, best.cost),
        optimal=optimal,
        certificate="elimination at weights of hidden time",
        method=f"{best.method}, {len(lines)} weights",
    )


def _crossing(lines: Sequence[tuple[float, float]], bound: float) -> list[float]:
    """The weight at which the lower envelope of the lines is highest, or None if the maximum is already proven."""
    weights = {0.0, 1.0}
    for i, (a, b) in enumerate(lines):
        for c, d in lines[:i]:
            slope = (b - a) - (d - c)
            if slope and 0 < (w := (c - a) / slope) < 1:
                weights.add(w)
    height, w = max((min(a + w * (b - a) for a, b in lines), w) for w in weights)
    return [w] if height > bound * (1 + 1e-9) else []


def exposed(h: Hiding, strategy: dict[str, np.ndarray]) -> float:
    """C + max(0, S - V) of a strategy: node name -> int8 [axes]."""
    return h.cost(h.space.index(strategy))
