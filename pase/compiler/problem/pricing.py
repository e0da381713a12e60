"""How a strategy's seconds add up, and how the cheapest strategy on a mesh is found under that pricing.

``Summed``: nothing overlaps. ``Overlapped``: collectives of parameters overlap with compute, depending on their
position. A new mode is a class with these members, registered in ``PRICINGS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pase.compiler.problem.overlap import OverlapSearch
from pase.ir import Graph
from pase.machine import CostModel, Mesh
from pase.registry import Registry
from pase.search import Known, Solution, solve
from pase.search.check import cost_of
from pase.tables import CostTables
from pase.tables.build import ConfigLimit, Space, build, config_space, edge_tables, phase_costs
from pase.tables.decompose import slowed
from pase.tables.overlap import StepTables, edges_at, nodes_at, passes_of
from pase.tables.types import EdgeTable

__all__ = ["PRICINGS", "Overlapped", "Solver", "Summed"]

Solver = Callable[[CostTables, Known, float], Solution]
"""Solves tables under further conditions: (tables, what is known about them without those, fraction of the available
time in (0, 1])."""

PRICINGS: Registry[type[Summed]] = Registry("overlap")
"""``CompileOptions.overlap`` -> the pricing that it selects."""


@PRICINGS.register("none")
class Summed:
    """A step takes the sum of its compute and its communication. Tables are built once per mesh."""

    def __init__(
        self, graph: Graph, model: CostModel, optimizer: str, limit: ConfigLimit | None = None
    ) -> None:
        self.graph, self.model, self.optimizer, self.limit = graph, model, optimizer, limit
        self._tables: dict[tuple[int, ...], tuple[CostTables, Space]] = {}
        self._free: dict[tuple[int, ...], Solution] = {}
        self._configs: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}

    @property
    def occupied(self) -> float | None:
        """The value that plans record (``PlanData.overlap``)."""
        return None

    def configs(self, mesh: Mesh) -> tuple[np.ndarray, ...]:
        """Return the configs of ``space(mesh)``, per node int8 [K, axes], without its tables."""
        if mesh.sizes not in self._configs:
            self._configs[mesh.sizes] = config_space(self.graph, mesh, self.model, self.limit)
        return self._configs[mesh.sizes]

    def tables(self, mesh: Mesh) -> tuple[CostTables, Space]:
        """Return the additive cost tables of a mesh. They depend on the sizes of its axes, not on their names."""
        if mesh.sizes not in self._tables:
            self._tables[mesh.sizes] = build(
                self.graph, mesh, self.model, self.optimizer, among=self.configs(mesh)
            )
        return self._tables[mesh.sizes]

    def space(self, mesh: Mesh) -> Space:
        """Return the configs that are searched on a mesh."""
        return self.tables(mesh)[1]

    def solve(
        self,
        mesh: Mesh,
        solver: Solver | None = None,
        below: float = np.inf,
        close: bool = True,
    ) -> Solution:
        """Return the cheapest strategy on a mesh, as choices in ``space(mesh)``.

        solver: adds conditions, such as a memory limit; None if there are none.
        below: strategies of that cost or more need not be found.
        close: whether to close, as far as labels suffice, the gap to the bound that a solver leaves.
        """
        if solver is not None:
            return solver(self.tables(mesh)[0], Known(free=self._free.get(mesh.sizes)), 1.0)
        if mesh.sizes not in self._free:
            self._free[mesh.sizes] = solve(self.tables(mesh)[0])
        return self._free[mesh.sizes]

    def glance(self, mesh: Mesh) -> float:
        """Return a lower bound on the strategies of a mesh, with as little work as possible."""
        return self.solve(mesh).bound

    def close(self, mesh: Mesh, below: float) -> Solution:
        """Return what ``solve`` found, with a smaller gap. below: strategies of that cost or more need not be found."""
        return self.solve(mesh)

    def bounding(self, mesh: Mesh) -> tuple[CostTables, Solution]:
        """Return tables in which no strategy costs more than its real cost, and their optimum, the best known bound."""
        return self.tables(mesh)[0], self.solve(mesh)

    def node_bounds(self, mesh: Mesh, among: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return lower bounds on the costs of each node's configs, float64 [K].

        With those of ``edge_bounds`` added, no strategy costs more than its real cost.

        among: per node, its configs, int8 [K, axes].
        """
        return [n.total for n in phase_costs(self.graph, among, mesh, self.model, self.optimizer)]

    def edge_bounds(
        self, mesh: Mesh, among: Sequence[np.ndarray], along: Sequence[int]
    ) -> tuple[EdgeTable, ...]:
        """Return the tables of some edges to go with ``node_bounds``. along: indices in ``graph.edges``."""
        return edge_tables(self.graph, among, mesh, self.model, along)

    def solve_among(
        self, mesh: Mesh, among: Sequence[np.ndarray], tables: CostTables, below: float
    ) -> Solution:
        """Return the cheapest strategy among some configs. Raises Infeasible if there is none.

        tables: the tables of these configs, from ``node_bounds`` and ``edge_bounds``.
        below: strategies of that cost or more need not be found.
        """
        return solve(tables)

    def cost(self, mesh: Mesh, configs: Mapping[str, np.ndarray], summed: float | None = None) -> float:
        """Return the cost of a strategy (node name -> int8 [axes]). summed: its cost if nothing overlaps, if known."""
        if summed is not None:
            return summed
        tables, space = self.tables(mesh)
        return cost_of(tables, space.index(configs))


@PRICINGS.register("parameters")
class Overlapped(Summed):
    """Collectives of parameters overlap with the compute of their pass, as far as their position allows
    (``pase.tables.overlap``)."""

    def __init__(
        self, graph: Graph, model: CostModel, optimizer: str, limit: ConfigLimit | None = None
    ) -> None:
        super().__init__(graph, model, optimizer, limit)
        self._searches: dict[tuple[int, ...], OverlapSearch] = {}
        self._passes = passes_of(graph, self.occupied)
        self._cheapest, self._weights = np.inf, self._passes.longest

    @property
    def occupied(self) -> float:
        return slowed(self.model.machine)

    def search(self, mesh: Mesh) -> OverlapSearch:
        """Return the search of a mesh, with its prices by part."""
        if mesh.sizes not in self._searches:
            tables = StepTables.of(self.graph, mesh, self.model, self.optimizer, self.configs(mesh))
            self._searches[mesh.sizes] = OverlapSearch(tables=tables, passes=self._passes)
        return self._searches[mesh.sizes]

    def tables(self, mesh: Mesh) -> tuple[CostTables, Space]:
        if mesh.sizes not in self._tables:
            parts = self.search(mesh).tables
            self._tables[mesh.sizes] = parts.summed, parts.space
        return self._tables[mesh.sizes]

    def space(self, mesh: Mesh) -> Space:
        return self.search(mesh).tables.space

    def solve(
        self,
        mesh: Mesh,
        solver: Solver | None = None,
        below: float = np.inf,
        close: bool = True,
    ) -> Solution:
        found = self.search(mesh)
        if solver is not None:
            s = found.solve(
                lambda w: solver(found.at(w), Known(free=found.means.get(w), close=not close), 1 / 4),
                below,
                _ENOUGH,
            )
            return found.close_within(s, lambda t, known: solver(t, known, 1 / 2), below) if close else s
        if mesh.sizes not in self._free:
            self._free[mesh.sizes] = s = found.solve(found.mean, below, likely=(self._weights,))
            if s.cost < self._cheapest:
                self._cheapest, self._weights = s.cost, found.best
        return self._free[mesh.sizes]

    def glance(self, mesh: Mesh) -> float:
        if mesh.sizes in self._free:
            return self._free[mesh.sizes].bound
        found = self.search(mesh)
        return found.mean(found.best).bound

    def close(self, mesh: Mesh, below: float) -> Solution:
        self._free[mesh.sizes] = self.search(mesh).close(self.solve(mesh), below)
        return self._free[mesh.sizes]

    def bounding(self, mesh: Mesh) -> tuple[CostTables, Solution]:
        found = self.search(mesh)
        return found.at(found.best), found.mean(found.best)

    def node_bounds(self, mesh: Mesh, among: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the bounds at the weights of the cheapest strategy found so far."""
        return nodes_at(self.graph, among, mesh, self.model, self.optimizer, self._between)

    def edge_bounds(
        self, mesh: Mesh, among: Sequence[np.ndarray], along: Sequence[int]
    ) -> tuple[EdgeTable, ...]:
        return edges_at(self.graph, among, mesh, self.model, along, self._between)

    def solve_among(
        self, mesh: Mesh, among: Sequence[np.ndarray], tables: CostTables, below: float
    ) -> Solution:
        first = solve(tables)
        if first.bound >= below:
            return first
        parts = StepTables.of(self.graph, mesh, self.model, self.optimizer, among)
        search = OverlapSearch(tables=parts, passes=self._passes, best=self._weights)
        return search.close(search.solve(search.mean, below), below)

    @property
    def _between(self) -> np.ndarray:
        return self._passes.between(self._weights)

    def cost(self, mesh: Mesh, configs: Mapping[str, np.ndarray], summed: float | None = None) -> float:
        found = self.search(mesh)
        return found.cost(found.tables.space.index(configs))


_ENOUGH = 1e-4
"""The relative gap at which a search under further conditions may stop."""
