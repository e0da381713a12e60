"""Ways to split one stage of a pipeline, found by the usual search on the model's own tables with other weights.

A stage with n of L blocks is the model's graph in which a block's nodes and edges have weight n/L. What comes before
the blocks has weight only in the first stage, and what comes after them only in the last. One pair of tables therefore
serves stages of every size. Under a memory limit, the same tables are searched at several prices per byte. This gives
splits that take longer and need less memory. The schedule decides which split a stage uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant
from pase.compiler.stages.chain_places import UnitPlaces, UnitRange
from pase.compiler.stages.costs import PARTS, CostKind, GatheredWeights, PartCost, PricedParts, part_costs
from pase.compiler.stages.features import FeatureTables, direction, feature_tables, running
from pase.compiler.stages.places import Places, StagePart
from pase.ir import Graph
from pase.ir.blocks import micro_batches_of
from pase.ir.recompute import gathering_again
from pase.machine import CostModel, Mesh
from pase.memory.account import in_flight_at_least
from pase.pipeline.overlap import exposed_lines
from pase.pipeline.types import Kind, Schedule
from pase.search import PlanCache, Solution
from pase.tables import CostTables

__all__ = [
    "COMPUTED",
    "FIRST",
    "LAST",
    "MIDDLE",
    "ONLY",
    "RUN",
    "SUMMED",
    "StageRole",
    "StageSplit",
    "StageTables",
    "roles_of",
]


@dataclass(frozen=True, kw_only=True)
class StageRole:
    """Whether a stage has the part before the blocks, and the part after them.

    group: the number of its device group, as in ``StageTables``; 0 if all devices are equal.
    units: in a chain of unequal units, the units of the stage.
    """

    first: bool = False
    last: bool = False
    group: int = 0
    units: UnitRange | None = None

    @property
    def ends(self) -> bool:
        return self.first or self.last

    def weight(self, parts: tuple[StagePart, ...], share: float) -> float:
        """Return the weight of a node in these parts, if a stage has this share of the blocks."""
        of = {"first": float(self.first), "block": share, "last": float(self.last)}
        return max(of[p] for p in parts)


def roles_of(s: Schedule, groups: Sequence[int]) -> tuple[StageRole, ...]:
    """Return the role of each stage. groups: the device group of each rank."""
    last = s.stages - 1
    return tuple(StageRole(first=k == 0, last=k == last, group=groups[r]) for k, r in enumerate(s.rank_of))


FIRST, MIDDLE, LAST, ONLY = (
    StageRole(first=True),
    StageRole(),
    StageRole(last=True),
    StageRole(first=True, last=True),
)


_NOTHING = PartCost()
RUN = {
    "forward": (CostKind.FORWARD, CostKind.FORWARD_SENT),
    "input": (CostKind.INPUT, CostKind.INPUT_SENT),
    "weight": (CostKind.WEIGHT, CostKind.WEIGHT_SENT),
    "recompute": (CostKind.RECOMPUTE, CostKind.RECOMPUTE_SENT),
}
"""What the parts of an action cost, with the collectives that they wait for."""
SUMMED = {**RUN, "after": (CostKind.AFTER,), "static": (CostKind.STATIC,), "kept": (CostKind.KEPT,)}
"""What a stage's times and bytes consist of."""
COMPUTED = {
    Kind.FORWARD: (CostKind.FORWARD,),
    Kind.BACKWARD: (CostKind.RECOMPUTE, CostKind.INPUT, CostKind.WEIGHT),
    Kind.INPUT: (CostKind.RECOMPUTE, CostKind.INPUT),
    Kind.WEIGHT: (CostKind.WEIGHT,),
}
"""The compute of each kind of action, behind which gathers and sums may hide."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSplit:
    """A way to split a stage, node -> int8 [axes], with its costs.

    slow: the fraction of a device that hoisted gathers and sums occupy while they overlap with compute; 1 if nothing
        overlaps.
    units: for a range of unequal units, the part of each; such a stage has no equal blocks.
    """

    role: StageRole
    variant: Variant
    weights: GatheredWeights
    configs: Mapping[str, np.ndarray]
    parts: Mapping[StagePart, PartCost]
    slow: float = 1.0
    units: tuple[StagePart, ...] = ()

    @property
    def block(self) -> PartCost:
        return _NOTHING if self.units else self.parts["block"]

    @cached_property
    def ends(self) -> list[PartCost]:
        if self.units:
            return [self.parts[u] for u in self.units]
        return [self.parts["first"]] * self.role.first + [self.parts["last"]] * self.role.last

    def fixed(self, *what: CostKind) -> float:
        """Return the seconds or bytes of the stage without blocks, summed over these kinds of cost."""
        return sum(e[f] for e in self.ends for f in what)

    def of_block(self, *what: CostKind) -> float:
        """Return the seconds or bytes of one more block."""
        return sum(self.block[f] for f in what)

    def by_unit(self, *what: CostKind) -> np.ndarray:
        """Return the seconds before the stage's equal blocks, of one block, and after them, float64 [3].

        They are summed over these kinds of cost. For unequal units the result is [units + 2], with zeros for a block
        and what comes after it.
        """

        def of(part: PartCost) -> float:
            return sum(part[f] for f in what)

        if self.units:
            return np.array([*map(of, self.ends), 0.0, 0.0])
        has = {"first": self.role.first, "block": True, "last": self.role.last}
        return np.array([of(self.parts[p]) if has[p] else 0.0 for p in PARTS])

    @cached_property
    def summed(self) -> np.ndarray:
        """``fixed`` and ``of_block`` of each of ``SUMMED``, float64 [2, fields]."""
        return np.array([[f(*what) for what in SUMMED.values()] for f in (self.fixed, self.of_block)])

    @cached_property
    def overlap_rows(self) -> np.ndarray:
        """``by_unit`` of gathers, of sums, and of each kind of action's compute, float64 [2 + kinds, units]."""
        each = ((CostKind.BEFORE,), (CostKind.SUMS,), *COMPUTED.values())
        return np.stack([self.by_unit(*what) for what in each])

    @cached_property
    def buffers(self) -> float:
        """The bytes of temporary buffers, which do not depend on the number of blocks."""
        every = [*self.ends, self.block]
        return max(e.buffers for e in every) + max(e.inner for e in every)

    @cached_property
    def waiting(self) -> tuple[float, float]:
        """The part of a micro-batch's bytes that stays until weights' gradients are computed: (without blocks, of a
        block)."""
        return self.fixed(CostKind.WAITING if self.units else CostKind.KEPT), self.of_block(CostKind.WAITING)

    def step_s(self, blocks: float, micro_batches: int) -> float:
        """Return the seconds per step that a rank with only this stage is busy or waits for its gathers and sums."""
        return float((self.step_lines(micro_batches) @ np.array([1.0, blocks])).max())

    def step_lines(self, micro_batches: int) -> np.ndarray:
        """Return lines whose maximum is ``step_s``: (seconds without blocks, seconds per block), float64 [lines, 2]."""
        busy, exposed = self._busy
        lines: np.ndarray = micro_batches * busy + exposed
        return lines

    @cached_property
    def _busy(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds of a micro-batch [2], seconds per step [lines, 2])."""
        forward, backward = (self.by_unit(*COMPUTED[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD))
        gathers = exposed_lines(self.by_unit(CostKind.BEFORE), forward, self.slow)
        sums = exposed_lines(self.by_unit(CostKind.SUMS), backward, self.slow)
        each, once = (
            np.array([x[:-2].sum() + x[-1], x[-2]])
            for x in (self.by_unit(*sum(RUN.values(), ())), self.by_unit(CostKind.AFTER))
        )
        return each, (gathers[:, None] + sums + once).reshape(-1, 2)

    def nbytes(self, blocks: float, flying: float) -> float:
        """Return the bytes on a device with this many micro-batches in flight."""
        static, kept = (self.fixed(f) + blocks * self.of_block(f) for f in (CostKind.STATIC, CostKind.KEPT))
        return static + flying * kept + self.buffers


@dataclass(frozen=True, kw_only=True)
class StageDevices:
    """The devices of one stage: their mesh, the prices on them, and the number of their device group.

    slow: as in ``StageSplit``.
    """

    mesh: Mesh
    model: CostModel
    group: int = 0
    slow: float = 1.0


@dataclass(frozen=True, eq=False)
class StageTables:
    """The tables of a step in micro-batches on the devices of one stage.

    Other tables are made from them by ``replace``, so nothing that was computed from one's fields is found in another.

    once: the graph of a micro-batch, without gathers that are repeated.
    spent: counts the work on the tables.
    planned: elimination orders, which other tables may share.
    taken: the micro-batches that these devices take; None: all of the step's.
    alike: tables that differ only in ``taken``, whose features and prices these tables share.
    """

    once: Graph
    places: Places
    variant: Variant
    on: StageDevices
    optimizer: str
    weights: GatheredWeights
    spent: Spent = field(default_factory=Spent)
    planned: PlanCache = field(default_factory=PlanCache)
    _: KW_ONLY
    taken: int | None = None
    alike: StageTables | None = None

    def __post_init__(self) -> None:
        shared = [f.name for f in fields(self) if f.name not in ("taken", "alike")]
        assert self.alike is None or all(getattr(self, n) is getattr(self.alike, n) for n in shared)

    def sent_each(self) -> StageTables:
        """Return the same tables, with gathers and sums in each micro-batch."""
        return self._each

    @cached_property
    def _each(self) -> StageTables:
        return replace(self, weights="each", alike=None)

    def in_one_program(self) -> StageTables:
        """Return the same tables for stages that one program scans over micro-batches, which gathers once per step."""
        return self if self.weights == "hoisted" else self._scanned

    @cached_property
    def _scanned(self) -> StageTables:
        return replace(self, weights="gathered", alike=None)

    def with_share(self, micro_batches: int) -> StageTables:
        """Return the same tables for a step in which these devices take this many micro-batches of the same size."""
        return replace(self, taken=micro_batches, alike=self)

    @property
    def mesh(self) -> Mesh:
        return self.on.mesh

    @property
    def model(self) -> CostModel:
        return self.on.model

    @property
    def group(self) -> int:
        return self.on.group

    @property
    def slow(self) -> float:
        return self.on.slow

    @cached_property
    def micro_batches(self) -> int:
        return micro_batches_of(self.once) if self.taken is None else self.taken

    @cached_property
    def graph(self) -> Graph:
        """The graph of a micro-batch, with the gathers that each repeats."""
        return gathering_again(self.once) if self.weights == "each" else self.once

    @cached_property
    def features(self) -> FeatureTables:
        if self.alike is not None:
            return self.alike.features
        made = feature_tables(self.graph, self.places, self.mesh, self.model, self.optimizer, self.weights)
        self.spent.entries += made.entries
        return made

    @cached_property
    def _pieces(self) -> PricedParts:
        return PricedParts() if self.alike is None else self.alike._pieces

    @cached_property
    def _splits(self) -> dict[tuple[StageRole, bytes], StageSplit]:
        return {}

    @cached_property
    def step(self) -> np.ndarray:
        """The direction of a stage's seconds per step if compute hides all it can of gathers and sums: a bound."""
        return self._working(self.micro_batches) + direction(before=self.slow, sums=self.slow, after=1)

    @property
    def steps(self) -> list[np.ndarray]:
        """The directions in which splits are searched: ``step``, and one in which the compute of one micro-batch is
        hidden behind gathers and sums."""
        hidden = direction(forward=1, input=1, weight=1)
        waits = self._working(self.micro_batches) - hidden + direction(before=1, sums=1, after=1)
        return [self.step, waits] if self.slow < 1 else [self.step]

    def _working(self, m: int) -> np.ndarray:
        return running(forward=m, input=m, weight=m)

    def cheapest(
        self,
        role: StageRole,
        blocks: float,
        byte_price: float = 0.0,
        flying: float = 1.0,
        step: np.ndarray | None = None,
    ) -> StageSplit:
        """Return the cheapest split of a stage with this many blocks.

        byte_price: seconds per byte held.
        step: the direction of its seconds; ``self.step`` if not given.
        """
        weights = (self.step if step is None else step) + byte_price * direction(static=1, kept=flying)
        return self.split_by(role, self.solved(role, blocks, weights).choice)

    def split_by(self, role: StageRole, choice: np.ndarray) -> StageSplit:
        """Return the split of a stage in which each node has this config, int64 [nodes]."""
        key = role, choice.tobytes()
        if key not in self._splits:
            space = self.features.space
            configs = {n.name: c[i] for n, c, i in zip(space.graph.nodes, space.configs, choice, strict=True)}
            of, places, units = self.places, self.places, tuple[StagePart, ...]()
            if isinstance(of, UnitPlaces) and role.units is not None:
                places, units = of.within(role.units), tuple(of.parts_in(role.units))
            elif role.first and role.last:
                places = places.in_one_stage
            parts = part_costs(
                self.graph,
                places,
                self.mesh,
                configs,
                self.model,
                self.optimizer,
                self.weights,
                self._pieces,
            )
            self._splits[key] = StageSplit(
                role=role,
                variant=self.variant,
                weights=self.weights,
                configs=configs,
                parts=parts,
                slow=self.slow,
                units=units,
            )
        return self._splits[key]

    def least(self, role: StageRole, blocks: float, weights: np.ndarray) -> float:
        """Return the least weighted sum of features (``features``) over all splits of a stage with this many blocks."""
        return float(self.solved(role, blocks, weights).bound)

    def least_s(self, role: StageRole, blocks: float) -> float:
        """Return a lower bound on the seconds per step that a rank with a stage of this many blocks is busy."""
        return self.least(role, blocks, self.step)

    def least_buffers(self, role: StageRole) -> float:
        """Return the bytes of temporary buffers that every split of a stage of equal blocks needs at least."""
        has = {"first": role.first, "block": True, "last": role.last}
        return max(nbytes for part, nbytes in self._least_buffers.items() if has[part])

    @cached_property
    def _least_buffers(self) -> dict[StagePart, float]:
        out = dict.fromkeys(self.places.sizes, 0.0)
        of = in_flight_at_least(self.graph, self.mesh, self.features.space.configs)
        for n, nbytes in zip(self.graph.nodes, of, strict=True):
            for part in self.places.parts[n.name]:
                out[part] = max(out[part], float(nbytes.min()))
        return out

    def least_apart(self, weights: np.ndarray) -> float:
        """Return the least weighted sum of features of the units of a chain, without resharding between units."""
        places, nodes = self.places, self.graph.nodes
        assert isinstance(places, UnitPlaces)
        whole, of = self.features.weighted(weights, [1.0] * len(nodes)), places.chain.of
        within = tuple(
            e
            for e in whole.edges
            if of.get(nodes[e.src].name, of.get(nodes[e.dst].name)) == of.get(nodes[e.dst].name)
        )
        return float(self.found(replace(whole, edges=within)).bound)

    def least_of_units(self, weights: np.ndarray) -> np.ndarray:
        """Return the least weighted sum of features in each unit of a chain, without nodes that units may share;
        float64 [units]."""
        places = self.places
        assert isinstance(places, UnitPlaces)
        of = [tuple(places.apart(n.name, u) for n in self.graph.nodes) for u in range(places.blocks)]
        return np.array([float(self._solved_of(shares, weights).bound) for shares in of])

    def solved(self, role: StageRole, blocks: float, weights: np.ndarray) -> Solution:
        """Return the configs for a stage with this many blocks whose weighted sum of features is least."""
        if role.units is not None:
            return self._solved_units(role.units, weights)
        return self.found(self.weighted(role, blocks, weights))

    def found(self, tables: CostTables) -> Solution:
        """Return the configs that cost least by these tables, which ``weighted`` made."""
        found = self.planned.solve(tables)
        self.spent.operations += found.work + self.features.entries
        return found

    def least_sum(self, *of: tuple[np.ndarray, float, float]) -> Solution:
        """Return the configs with the least sum of several weighted sums.

        of: (features, their weight before and after the blocks, their weight in all blocks).
        """
        made = [
            self.features.weighted(
                weights,
                [
                    max(blocks if p == "block" else ends for p in self.places.parts[n.name])
                    for n in self.graph.nodes
                ],
            )
            for weights, ends, blocks in of
        ]
        each = zip(*(t.node_costs for t in made), strict=True)
        known: dict[tuple[int, ...], np.ndarray] = {}  # equal layers keep sharing their arrays
        costs = tuple(known.setdefault(tuple(map(id, cs)), sum(cs[1:], cs[0])) for cs in each)
        edges = tuple(e for t in made for e in t.edges)
        return self.found(replace(made[0], node_costs=costs, edges=edges))

    def weighted(self, role: StageRole, blocks: float, weights: np.ndarray) -> CostTables:
        """Return the tables of a stage with this many blocks for a weighted sum of features."""
        share, parts = blocks / self.places.blocks, self.places.parts
        return self.features.weighted(weights, [role.weight(parts[n.name], share) for n in self.graph.nodes])

    def _solved_units(self, units: UnitRange, weights: np.ndarray) -> Solution:
        """Return the same as ``solved`` for a range of unequal units."""
        assert isinstance(self.places, UnitPlaces)
        return self._solved_of(tuple(self.places.share(n.name, units) for n in self.graph.nodes), weights)

    def _solved_of(self, shares: tuple[float, ...], weights: np.ndarray) -> Solution:
        """Return the best configs for these shares of the nodes. Other nodes have their configs in the whole model."""
        key = shares, weights.tobytes()
        if key not in self._ranges:
            tables = self.features.weighted(weights, list(shares))
            inside = np.array(shares) > 0
            inside[[e.src for e in tables.edges]] = True
            at, number = np.flatnonzero(inside), np.cumsum(inside) - 1
            found = self.planned.solve(
                replace(
                    tables,
                    node_costs=tuple(tables.node_costs[i] for i in at),
                    edges=tuple(
                        replace(e, src=int(number[e.src]), dst=int(number[e.dst])) for e in tables.edges
                    ),
                    names=tuple(self.graph.nodes[i].name for i in at),
                )
            )
            self.spent.operations += found.work + self.features.entries
            choice = self._whole.copy()
            choice[at] = found.choice
            self._ranges[key] = replace(found, choice=choice)
        return self._ranges[key]

    @cached_property
    def _whole(self) -> np.ndarray:
        """The best configs of a model that is not cut, int64 [nodes]."""
        return self.planned.solve(self.features.weighted(self.step, [1.0] * len(self.graph.nodes))).choice

    @cached_property
    def _ranges(self) -> dict[tuple[tuple[float, ...], bytes], Solution]:
        return {}
