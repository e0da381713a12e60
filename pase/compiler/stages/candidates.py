"""One choice of ranks, micro-batches, mesh and arrangement of a pipeline: its tables, and its search over stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.stages.chain_places import UnitPlaces, divided
from pase.compiler.stages.chain_search import ChainMenu
from pase.compiler.stages.device_groups import Arrangement, RankGroup
from pase.compiler.stages.menu import StageDevices, StageTables
from pase.compiler.stages.places import Places
from pase.compiler.stages.search import Staged, StageMenu
from pase.ir import Graph
from pase.ir.cut_points import UnitChain
from pase.machine import Mesh
from pase.search import PlanCache

if TYPE_CHECKING:
    from pase.frontends.registry import Traced
    from pase.ir.blocks import Block

__all__ = ["PipelineCandidate", "TablesMade", "menu_of", "search_candidate"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCandidate:
    """A number of ranks, a number of micro-batches, a mesh, and an arrangement of the ranks on device groups.

    least: seconds that none of its pipelines beats.
    tables: makes the tables of each way to run the step, on demand.
    schedule: the schedule to try, or "auto".
    """

    ranks: int
    micro_batches: int
    mesh: Mesh
    least: float
    place: Arrangement
    tables: Callable[[], tuple[StageTables, ...]]
    schedule: str = "auto"

    def menu(self, tables: Sequence[StageTables]) -> StageMenu:
        return menu_of(tables, self.micro_batches, self.place, self.schedule)

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks of {'×'.join(map(str, self.mesh.sizes))}, {self.micro_batches} micro-batches"
        )


class TablesMade:
    """Makes the tables of a traced model's stages on demand.

    blocks: the written-out blocks.
    keep: whether to keep tables, because they are needed again for another order of groups.
    spent: counts the work.
    """

    def __init__(
        self, traced: Traced, blocks: Sequence[Block], optimizer: str, *, keep: bool, spent: Spent
    ) -> None:
        self.traced, self.blocks, self.optimizer, self.keep = traced, blocks, optimizer, keep
        self.spent, self.planned = spent, PlanCache()
        self._graphs: dict[Variant, tuple[Graph, Places]] = {}
        self._tables: dict[tuple[Variant, Mesh, int], StageTables] = {}

    def all(
        self, ways: Sequence[Variant], mesh: Mesh, groups: Sequence[RankGroup]
    ) -> tuple[StageTables, ...]:
        """Return, for each device group, the tables of each way to run the step."""
        return tuple(self.of(v, mesh, group) for group in groups for v in ways)

    def _chain(self, variant: Variant) -> UnitChain | None:
        """Return the chain of a model without equal blocks, which ways with equally many micro-batches share."""
        plain = replace(variant, blocks=(), hoisted="none", precision="model", decompose="none")
        if plain == variant:
            return None
        if plain not in self._graphs:
            graph = graph_of(self.traced, plain)
            self._graphs[plain] = graph, divided(graph, self.blocks)
        places = self._graphs[plain][1]
        return places.chain if isinstance(places, UnitPlaces) else None

    def of(self, variant: Variant, mesh: Mesh, group: RankGroup) -> StageTables:
        if variant not in self._graphs:
            graph = graph_of(self.traced, variant)
            self.spent.graphs += 1
            self._graphs[variant] = graph, divided(graph, self.blocks, self._chain(variant))
        key = variant, mesh, group.number
        if key in self._tables:
            return self._tables[key]
        graph, places = self._graphs[variant]
        made = StageTables(
            graph,
            places,
            variant,
            StageDevices(mesh=mesh, model=group.model, group=group.number, slow=group.slow),
            self.optimizer,
            "hoisted",
            self.spent,
            self.planned,
        )
        if self.keep:
            self._tables[key] = made
        return made


def menu_of(
    tables: Sequence[StageTables], micro_batches: int, place: Arrangement, schedule: str = "auto"
) -> StageMenu:
    """Return the ways to split the stages of ranks with this arrangement.

    tables: those of all its device groups.
    schedule: the schedule to try, or "auto".
    """
    made = ChainMenu if isinstance(tables[0].places, UnitPlaces) else StageMenu
    return made(tables, len(place.ranks), micro_batches, place.limits, place.numbers, place.between, schedule)


def search_candidate(c: PipelineCandidate, below: float) -> tuple[Staged | None, StageMenu]:
    """Return the candidate's best pipeline that takes less than ``below``, and the menu that it is from.

    Only schedules are searched whose first stages take less than the best so far. Gathers and sums in each micro-batch
    take longer but need less memory, so they are tried only if nothing fits without them.
    """
    once = c.tables()
    for each in (False, True):
        menu = c.menu([*once, *(t.sent_each() for t in once if each)])
        best, top, fits = None, below, False
        for first, d, chunks in sorted(((menu.first(*x), *x) for x in menu.schedules()), key=lambda x: x[0]):
            if first >= top:  # the bound decides later whether it is searched further
                fits |= bool(np.isfinite(first))
                continue
            found, fitted = menu.staged(d, chunks, top)
            fits |= fitted
            if found is not None:
                best, top = found, found.step_s
        if fits or np.isinf(menu.limits).all():
            break
    return best, menu
