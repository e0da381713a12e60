"""How a strategy's seconds add up, and how the cheapest strategy on a mesh is found under that pricing.

``Summed``: nothing overlaps. ``HiddenGradients``: gradient synchronisation overlaps with backward's compute. A new mode
is a class with these members, registered in ``PRICINGS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pase.compiler.overlap import Hiding, build_hiding, exposed, solve_hiding
from pase.ir import Graph
from pase.machine import CostModel, Mesh
from pase.registry import Registry
from pase.search import Solution, solve
from pase.tables import CostTables
from pase.tables.build import Space, build

__all__ = ["PRICINGS", "HiddenGradients", "Solver", "Summed"]

Solver = Callable[[CostTables, float], Solution]
"""Solves tables within a fraction of the available time: (tables, fraction in (0, 1])."""


def _solve(tables: CostTables, part: float) -> Solution:
    return solve(tables)


PRICINGS: Registry[type[Summed]] = Registry("overlap")
"""``CompileOptions.overlap`` -> what it means."""


@PRICINGS.register("none")
class Summed:
    """A step takes the sum of its compute and its communication. Tables are built once per mesh."""

    exact = True
    """No strategy of a mesh's space is cheaper than the one found."""

    def __init__(self, graph: Graph, model: CostModel, optimizer: str) -> None:
        self.graph, self.model, self.optimizer = graph, model, optimizer
        self._tables: dict[tuple[int, ...], tuple[CostTables, Space]] = {}

    def tables(self, mesh: Mesh) -> tuple[CostTables, Space]:
        """The additive cost tables of a mesh. They depend on the sizes of its axes, not on their names."""
        if mesh.sizes not in self._tables:
            self._tables[mesh.sizes] = build(self.graph, mesh, self.model, self.optimizer)
        return self._tables[mesh.sizes]

    def space(self, mesh: Mesh) -> Space:
        """The configs that are searched on a mesh."""
        return self.tables(mesh)[1]

    def solve(self, mesh: Mesh, solver: Solver = _solve) -> Solution:
        """The cheapest strategy on a mesh, as choices in ``space(mesh)``."""
        return solver(self.tables(mesh)[0], 1.0)

    def cost(self, mesh: Mesh, configs: Mapping[str, np.ndarray], summed: float) -> float:
        """The cost of a strategy: node name -> int8 [axes]. summed: its cost if nothing overlaps."""
        return summed


@PRICINGS.register("gradients")
class HiddenGradients(Summed):
    """Only the part of gradient synchronisation that backward cannot hide is priced (``pase.compiler.overlap``)."""

    exact = False

    def __init__(self, graph: Graph, model: CostModel, optimizer: str) -> None:
        super().__init__(graph, model, optimizer)
        self._hiding: dict[tuple[int, ...], Hiding] = {}

    def hiding(self, mesh: Mesh) -> Hiding:
        if mesh.sizes not in self._hiding:
            self._hiding[mesh.sizes] = build_hiding(self.graph, mesh, self.model, self.optimizer)
        return self._hiding[mesh.sizes]

    def space(self, mesh: Mesh) -> Space:
        return self.hiding(mesh).space

    def solve(self, mesh: Mesh, solver: Solver = _solve) -> Solution:
        return solve_hiding(self.hiding(mesh), one=lambda tables: solver(tables, 1 / 4))

    def cost(self, mesh: Mesh, configs: Mapping[str, np.ndarray], summed: float) -> float:
        return exposed(self.hiding(mesh), dict(configs))
