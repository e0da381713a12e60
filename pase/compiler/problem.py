"""The problem to solve: a graph to split over the devices of a machine, under a cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pase.compiler.variants import Variant, graph_of
from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.compiler.options import PlanTarget
    from pase.compiler.pricing import Summed
    from pase.frontends.registry import Traced
    from pase.ir import Graph
    from pase.machine import CostModel, Machine, Mesh
    from pase.memory.accounts import Account
    from pase.tables import CostTables
    from pase.tables.build import Space

__all__ = ["Progress", "SplitProblem"]

Progress = Callable[[str], None]

_MOST_PRIME_AXES = 4
"""The mesh of prime factors is also searched if it has at most this many axes."""


def _expressible(graph: Graph, target: PlanTarget) -> Graph:
    """The graph with the limits of what the target can express."""
    return replace(graph, one_axis_a_dim=True) if target == "dtensor" else graph


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """A graph to split over the devices of a machine, under a cost model. overlap, target: as in ``CompileOptions``."""

    graph: Graph
    devices: int
    machine: Machine
    model: CostModel
    optimizer: str
    variant: Variant
    overlap: str = "none"
    target: PlanTarget = "any"

    @classmethod
    def of(
        cls,
        raw: Graph,
        devices: int,
        machine: str | Path | Machine | None,
        cost_model: str,
        optimizer: str,
        overlap: str = "none",
        target: PlanTarget = "any",
    ) -> SplitProblem:
        """The problem of a traced graph as written. overlap: also "machine".

        Raises PaseError if it has sizes that are not bound.
        """
        from pase import costmodels
        from pase.ir import named, simplify
        from pase.machine import DEFAULT, Machine
        from pase.machine import load as load_machine
        from pase.memory.live import is_trained

        if raw.symbols:
            raise PaseError(
                f"model '{raw.name}' has symbolic sizes {', '.join(raw.symbols)}: bind them "
                f"to search: dims={{'{raw.symbols[0]}': 64}}, or --dim {raw.symbols[0]}=64"
            )
        m = (
            machine
            if isinstance(machine, Machine)
            else load_machine(machine if machine is not None else DEFAULT)
        )
        graph, priced = _expressible(named(simplify(raw)), target), costmodels.get(cost_model, m)
        if overlap == "machine":
            overlap = "parameters" if m.overlaps and priced.unit == "s" and is_trained(graph) else "none"
        return cls(
            graph=graph,
            devices=devices,
            machine=m,
            model=priced,
            optimizer=optimizer,
            variant=Variant(),
            overlap=overlap,
            target=target,
        )

    def varied(self, traced: Traced, variant: Variant) -> SplitProblem:
        """The same problem for another way to run the step."""
        graph = _expressible(graph_of(traced, variant), self.target)
        return replace(self, graph=graph, variant=variant)

    def meshes(self, mesh: str | None, max_axes: int) -> list[Mesh]:
        """The meshes to search: the given one, or all with at most the allowed number of axes."""
        from pase.machine import mesh_from, meshes

        if mesh is not None:
            return [mesh_from(mesh, self.devices)]
        return meshes(self.devices, self.machine, max_axes, max_prime_axes=_MOST_PRIME_AXES)

    @cached_property
    def pricing(self) -> Summed:
        """How seconds add up, with the tables built for it so far."""
        from pase.compiler.pricing import PRICINGS

        return PRICINGS[self.overlap](self.graph, self.model, self.optimizer)

    @property
    def account(self) -> Account:
        """How memory is counted."""
        from pase.memory.accounts import account_for

        return account_for(self.machine, self.graph, self.pricing.beside is not None)

    def tables(self, mesh: Mesh) -> tuple[CostTables, Space]:
        """The additive cost tables of a mesh, built once."""
        return self.pricing.tables(mesh)
