"""Builds cost tables from a graph, a mesh and a cost model, and keeps the configs that the tables' indices stand
for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from pase.ir import FixedLayout, Graph, Node
from pase.machine import COLLECTIVES, CollectiveKind, CostModel, Mesh
from pase.tables.charges import SUMS, Charge, Flow, node_charges
from pase.tables.decompose import TAKEN_APART, decomposed_times
from pase.tables.facts import EdgeFacts, Facts, facts
from pase.tables.fixed import as_fixed, fixed_layout
from pase.tables.layouts import LayoutRule, configs
from pase.tables.reshard import Plans, compare
from pase.tables.types import CostTables, EdgeTable
from pase.tables.work import CompilerHabits, Work, node_work

__all__ = [
    "GRANULE_BYTES",
    "ConfigLimit",
    "EdgeCosts",
    "PhaseCosts",
    "Space",
    "build",
    "charge_price",
    "config_space",
    "edge_costs",
    "edge_tables",
    "facts_along",
    "habits",
    "layout_pairs",
    "lone_gather",
    "phase_costs",
    "single_cost",
    "work_cost",
    "work_price",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """The configs that the tables' indices stand for: per node, int8 [K, axes]."""

    graph: Graph
    mesh: Mesh
    configs: tuple[np.ndarray, ...]

    def index(self, strategy: Mapping[str, np.ndarray]) -> np.ndarray:
        """Config indices of a strategy (node name -> int8 [axes]). KeyError if the strategy is not in the space."""
        out = np.zeros(len(self.configs), dtype=np.int64)
        for v, n in enumerate(self.graph.nodes):
            hit = np.flatnonzero((self.configs[v] == strategy[n.name]).all(axis=1))
            if not len(hit):
                raise KeyError(
                    f"node '{n.name}': {strategy[n.name]} is not among its configs on mesh {self.mesh.sizes}"
                )
            out[v] = hit[0]
        return out


GRANULE_BYTES = 512
"""The fewest bytes that one device sends of a bucketed tensor: XLA for TPU pads shards to this size ("k512Byte" in its
HLO). Without it, splitting a bias over 32 devices would look as good as replicating it, although it costs slices and
copies."""


def charge_price(charge: Charge, model: CostModel, mesh: Mesh) -> np.ndarray:
    """The cost of a charge for all its runs in a step."""
    alone = model.collective(charge.kind, mesh, charge.axes, charge.nbytes)
    bucket = model.machine.bucket_bytes
    if charge.bucketed and bucket:
        ways = np.array([mesh.ways(axes) for axes in range(1 << len(mesh.sizes))], dtype=float)[charge.axes]
        nbytes = np.where(charge.nbytes > 0, np.maximum(charge.nbytes, GRANULE_BYTES * ways), 0.0)
        full = model.collective(
            charge.kind, mesh, charge.axes, np.full_like(charge.nbytes, bucket, dtype=float)
        )
        joined = (nbytes < bucket) & ~lone_gather(charge.kind, charge.whole, model)
        alone = np.where(joined, full * (nbytes / bucket), alone)
    if charge.behind is not None:
        alone = np.maximum(alone - work_price(charge.behind, model) / (charge.rounds + 1), 0.0)
    if charge.during:
        alone = np.minimum(alone, _decomposed(charge, model, mesh))
    return charge.times * charge.rounds * alone


def lone_gather(kind: CollectiveKind, whole: ArrayLike, model: CostModel) -> np.ndarray:
    """Whether a parameter of ``whole`` bytes is gathered by itself, without joining other gathers or compute."""
    return np.asarray((kind == "all_gather") & (np.asarray(whole) < model.machine.lone_gather_bytes))


def _decomposed(c: Charge, model: CostModel, mesh: Mesh) -> np.ndarray:
    """Seconds that compute waits for a charge that overlaps with products."""
    return decomposed_times(c.during, c.kind, c.back, c.axes, c.nbytes, c.whole, mesh, model)


def work_cost(work: Iterable[Work], model: CostModel) -> np.ndarray | float:
    """The total cost of the work, for all its runs in a step."""
    total: np.ndarray | float = 0.0
    for w in work:
        total = total + w.times * work_price(w, model)
    return total


def single_cost(work: Iterable[Work], model: CostModel) -> float:
    """``work_cost`` of work with a single configuration."""
    return float(np.ravel(work_cost(work, model))[0])


def work_price(work: Work, model: CostModel) -> np.ndarray:
    """The cost of one run of a piece of work."""
    longer = work.padding * _unaligned_slowdown(work, model)
    mnk = None if work.mnk is None else (work.mnk[0] * longer, *work.mnk[1:])
    fused = work.kind == "attention" and model.unit == "s" and model.machine.device.attention is not None
    flops = work.flops * (work.diagonal if fused else longer)
    price = model.compute(work.kind, work.dtype, flops, work.nbytes, mnk=mnk)
    if fused and np.any(work.passes):
        price = price + model.compute("memory", work.dtype, 0.0, work.passes)
    if work.kind == "memory" and work.phase != "update":
        price = np.maximum(price, work.nbytes / _light_bytes_per_s(model))
        price = price + work.windowed / _windowed_flops_per_s(model)
    return price


def _unaligned_slowdown(work: Work, model: CostModel) -> np.ndarray | float:
    """The factor by which a product's arithmetic takes longer because its rows are not aligned."""
    kernels = model.machine.device.products
    if model.unit != "s" or kernels is None or not np.any(work.unaligned):
        return 1.0
    return np.where(work.unaligned, kernels.slowdown(work.dtype) * work.unaligned, 1.0)


def _light_bytes_per_s(model: CostModel) -> float:
    """The highest bandwidth of light ops between products, if it was measured in addition to the memory curve.

    The memory curve is measured on one op in a chain, with warm caches. Light ops between products compute more per
    byte and are slower. An optimizer's update is such a chain, so it is priced by the curve alone.
    """
    device = model.machine.device
    part = device.efficiency.get("memory")
    if model.unit != "s" or device.memory_curve is None or part is None:
        return np.inf
    return part * device.memory_bandwidth_bytes_per_s


def _windowed_flops_per_s(model: CostModel) -> float:
    """FLOP/s of windows that slide over an array, if measured; otherwise windows are priced as any light op."""
    device = model.machine.device
    part = device.efficiency.get("window")
    if model.unit != "s" or part is None or device.vector_flops is None:
        return np.inf
    return part * device.vector_flops


def habits(model: CostModel) -> CompilerHabits:
    """What the compiler of the model's machine does; arrays are not padded and nothing is converted if the model's unit
    is not seconds."""
    device, seconds = model.machine.device, model.unit == "s"
    return CompilerHabits(
        tile=device.memory_tile if seconds and len(device.memory_tile) == 2 else None,
        widens=seconds,
        converts=not model.machine.fuses_products,
        sums_apart=not model.machine.fuses_products,
    )


def build(
    graph: Graph,
    mesh: Mesh,
    model: CostModel,
    optimizer: str = "adam",
    *,
    sync: float = 1.0,
    gathers: float = 1.0,
    among: Sequence[np.ndarray] | None = None,
) -> tuple[CostTables, Space]:
    """Price every config of every node and every pair of layouts of every edge.

    among: per node, the configs to price, int8 [K, axes]; None for all. Equal nodes should share an array.

    Equal nodes and edges of repeated layers are priced only once and share their arrays. sync, gathers: weights of the
    gradients' reduction and of the parameters' gathers. With a weight below 1, a parameter is not gathered again for
    recomputation, because it stays gathered. Tables with other weights have the same nodes, edges and classes.
    """
    known = facts(graph)
    space = config_space(graph, mesh, model) if among is None else tuple(among)
    tables = CostTables(
        node_costs=tuple(n.total for n in phase_costs(graph, space, mesh, model, optimizer)),
        edges=tuple(_edges(known, space, mesh, model, {"backward": sync, "forward": gathers})),
        names=tuple(n.name for n in graph.nodes),
    )
    return tables, Space(graph=graph, mesh=mesh, configs=space)


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseCosts:
    """The costs of a node by phase, float64 [K] each.

    waited: its collectives and the optimizer's update. forward, backward: its compute; recomputation counts in
    backward.
    gathers: of the updated parameter, if its optimizer state is split further than the parameter.
    """

    waited: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    gathers: np.ndarray

    @cached_property
    def total(self) -> np.ndarray:
        """The cost of the node if nothing overlaps."""
        return self.waited + self.forward + self.backward + self.gathers


def phase_costs(
    graph: Graph, space: Sequence[np.ndarray], mesh: Mesh, model: CostModel, optimizer: str
) -> tuple[PhaseCosts, ...]:
    """The costs of every node. Equal nodes of repeated layers share one object.

    space: per node, its configs, int8 [K, axes]. Equal nodes with the same configs should share an array.
    """
    made: dict[tuple[int, int], PhaseCosts] = {}
    keys = [(number, id(cfg)) for number, cfg in zip(facts(graph).cost, space, strict=True)]
    for n, cfg, key in zip(graph.nodes, space, keys, strict=True):
        if key not in made:
            cost = {name: np.zeros(len(cfg)) for name in ("waited", "forward", "backward", "gathers")}
            for w in node_work(graph, n, cfg, mesh, optimizer, habits(model)):
                price = w.times * work_price(w, model)
                late = w.late * price
                when = "waited" if w.phase == "update" else w.phase
                cost[when] = cost[when] + (price - late)
                cost["backward"] = cost["backward"] + late
            for c in node_charges(graph, n, cfg, mesh):
                overlaps = c.bucketed and not lone_gather(c.kind, c.whole, model)
                kind = "gathers" if overlaps else "waited"
                cost[kind] = cost[kind] + charge_price(c, model, mesh)
            made[key] = PhaseCosts(**cost)
    return tuple(made[key] for key in keys)


class ConfigLimit(Protocol):
    """A limit on the configs of nodes, for instance to those that a target can express."""

    def alike(self, node: Node, /) -> Hashable:
        """Nodes with equal dims for which this is equal have the same allowed configs."""

    def allowed(self, node: Node, cfg: np.ndarray, mesh: Mesh, /) -> np.ndarray:
        """bool [K]: which of the configs are allowed. cfg: int8 [K, axes]."""


def config_space(
    graph: Graph, mesh: Mesh, model: CostModel, limit: ConfigLimit | None = None
) -> tuple[np.ndarray, ...]:
    """The configs of each node within the limit; equal nodes share an array.

    If the machine's compiler reduces the gradient of each reader separately, configs that leave a gradient partial are
    excluded. For a tensor with a fixed layout, only configs with that layout remain; there are none if the mesh cannot
    hold it.
    """
    apart = not model.machine.sums_readers
    memo: dict[tuple[int, Hashable, FixedLayout | None], np.ndarray] = {}
    same: dict[bytes, np.ndarray] = {}
    out = []
    for n, number in zip(graph.nodes, facts(graph).space, strict=True):
        fixed = fixed_layout(graph, n)
        alike = None if limit is None else limit.alike(n)
        key = (number, alike, None if fixed is None else replace(fixed, path=""))
        if key not in memo:
            cfg = configs(n, mesh)
            if fixed is not None:
                cfg = cfg[as_fixed(n, cfg, mesh, fixed)]
            if apart:
                waiting = [i for i, d in enumerate(n.space) if d.kind == "pending"]
                cfg = cfg[~np.isin(cfg, waiting).any(axis=1)]
            if limit is not None:
                cfg = cfg[limit.allowed(n, cfg, mesh)]
            memo[key] = same.setdefault(cfg.tobytes(), cfg)
        out.append(memo[key])
    return tuple(out)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Classes:
    """Distinct layouts, [C, axes], and the class of each config, int32 [K]."""

    rows: np.ndarray
    index: np.ndarray


class _Layouts:
    """Groups configs into classes by the layout that they give a tensor. Equal classes, and their rows, are one
    object."""

    def __init__(self, rules: tuple[LayoutRule, ...], mesh: Mesh) -> None:
        self.rules, self.mesh = rules, mesh
        self.memo: dict[tuple[int, int], _Classes] = {}
        self.rows: dict[bytes, np.ndarray] = {}

    def of(self, rule: int, cfg: np.ndarray) -> _Classes:
        key = (rule, id(cfg))
        if key not in self.memo:
            rows, index = np.unique(self.rules[rule].states(cfg, self.mesh), axis=0, return_inverse=True)
            self.memo[key] = _Classes(rows=self.one(rows), index=index.reshape(-1).astype(np.int32))
        return self.memo[key]

    def one(self, rows: np.ndarray) -> np.ndarray:
        return self.rows.setdefault(rows.tobytes(), rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeCosts:
    """The cost of an edge for each pair of layouts, by flow: float64 [source rows, reader rows].

    Equal edges share their flows. rows: the written layouts and the read layouts, int8 [C, axes]. classes: the row of
    each config of the source and of the reader, int32 [K].
    """

    flows: tuple[tuple[Flow, np.ndarray], ...]
    rows: tuple[np.ndarray, np.ndarray]
    classes: tuple[np.ndarray, np.ndarray]

    def table(self, e: EdgeFacts, cost: np.ndarray) -> EdgeTable:
        """The table of an edge with these classes and this cost."""
        return EdgeTable(
            src=e.src, dst=e.dst, cost=cost, src_class=self.classes[0], dst_class=self.classes[1]
        )


def _edges(
    known: Facts, space: tuple[np.ndarray, ...], mesh: Mesh, model: CostModel, weights: Mapping[str, float]
) -> Iterator[EdgeTable]:
    """Edges that cost something for some pair of layouts. weights: per phase, for the collectives of parameters."""
    memo: dict[int, np.ndarray | None] = {}
    for e, priced in edge_costs(known, space, mesh, model):
        if id(priced.flows) not in memo:
            cost, something = np.zeros([len(rows) for rows in priced.rows]), False
            for f, one in priced.flows:
                something |= bool(one.any())
                weight = weights[f.phase] if f.bucketed else 1.0
                weight /= f.repeats if weight < 1 else 1
                cost += weight * one
            memo[id(priced.flows)] = cost if something else None
        matrix = memo[id(priced.flows)]
        if matrix is not None:
            yield priced.table(e, matrix)


def edge_costs(
    known: Facts, space: tuple[np.ndarray, ...], mesh: Mesh, model: CostModel
) -> Iterator[tuple[EdgeFacts, EdgeCosts]]:
    """The costs of every edge of the graph, in order. space: per node, its configs, int8 [K, axes]."""
    layouts = _Layouts(known.rules, mesh)
    ends: dict[tuple[int, int, bool], tuple[np.ndarray, np.ndarray]] = {}
    classes = [(layouts.of(e.write, space[e.src]), layouts.of(e.read, space[e.dst])) for e in known.edges]
    for e, (src, dst) in zip(known.edges, classes, strict=True):
        for f in known.flows[e.flows]:
            key = (id(src.rows), id(dst.rows), f.back)
            if key not in ends:
                a, b = f.ends(src.rows, dst.rows)
                ends[key] = (layouts.one(a), layouts.one(b))
    pairs = {(id(a), id(b)): (a, b) for a, b in ends.values()}
    plans = dict(zip(pairs, compare(list(pairs.values()), mesh), strict=True)) if pairs else {}
    price = _Prices(plans.values(), {f for flows in known.flows for f in flows}, mesh, model)
    memo: dict[tuple[int, int, int], tuple[tuple[Flow, np.ndarray], ...]] = {}
    for e, (src, dst) in zip(known.edges, classes, strict=True):
        where = (id(src.rows), id(dst.rows), e.flows)
        if where not in memo:
            flows = []
            for f in known.flows[e.flows]:
                a, b = ends[id(src.rows), id(dst.rows), f.back]
                ways = plans[id(a), id(b)]
                one = ways.cost(price.of(f))
                one = one.T if f.back else one
                for kind in TAKEN_APART if f.read or f.made else ():
                    saved = ways.cost_of_single(price.saved(f, kind))
                    on = f.during(kind, src.rows, mesh)
                    one = one - np.where(on[:, None], saved.T if f.back else saved, 0.0)
                flows.append((f, one))
            memo[where] = tuple(flows)
        yield (
            e,
            EdgeCosts(flows=memo[where], rows=(src.rows, dst.rows), classes=(src.index, dst.index)),
        )


def edge_tables(
    graph: Graph, among: Sequence[np.ndarray], mesh: Mesh, model: CostModel, along: Sequence[int]
) -> tuple[EdgeTable, ...]:
    """Tables of some of the edges for some of the configs, without edges that cost nothing.

    among: per node, the configs, int8 [K, axes]; equal nodes should share an array. along: indices into
    ``graph.edges``.
    """
    known = facts_along(facts(graph), along)
    return tuple(_edges(known, tuple(among), mesh, model, {"backward": 1.0, "forward": 1.0}))


def facts_along(known: Facts, along: Sequence[int]) -> Facts:
    """The facts of some of the edges. along: indices into ``graph.edges``."""
    return replace(known, edges=tuple(known.edges[i] for i in along))


def layout_pairs(
    graph: Graph, among: Sequence[np.ndarray], mesh: Mesh, along: Sequence[int]
) -> list[tuple[object, int]]:
    """For each of these edges: a key for everything that its matrix depends on, and the number of its layout pairs.

    among, along: as in ``edge_tables``.
    """
    known = facts(graph)
    layouts = _Layouts(known.rules, mesh)
    out: list[tuple[object, int]] = []
    for e in facts_along(known, along).edges:
        src, dst = layouts.of(e.write, among[e.src]), layouts.of(e.read, among[e.dst])
        out.append(((id(src.rows), id(dst.rows), e.flows), len(src.rows) * len(dst.rows)))
    return out


class _Prices:
    """The cost of each code of the plans for each flow. The cost model is called once per kind of collective."""

    def __init__(self, plans: Iterable[Plans], flows: set[Flow], mesh: Mesh, model: CostModel) -> None:
        n = len(mesh.sizes)
        used = np.unique(np.concatenate([np.zeros(1, np.int32), *(p.codes.ravel() for p in plans)]))[1:]
        kind, axes, split = (used - 1) >> 2 * n, (used - 1) >> n & (1 << n) - 1, (used - 1) & (1 << n) - 1
        fraction = 1.0 / np.array([mesh.ways(s) for s in range(1 << n)], dtype=float)[split]
        self.rows: dict[tuple[int, bool], np.ndarray] = {}
        self.mesh, self.model, self.used = mesh, model, used
        self.kind, self.axes, self.fraction = kind, axes, fraction
        for bucketed in (False, True):
            sizes = sorted({n for f in flows if f.bucketed == bucketed for n in (f.nbytes, f.sum_nbytes)})
            table = np.zeros((len(sizes), 1 + len(COLLECTIVES) << 2 * n))
            for k, name in enumerate(COLLECTIVES):
                on = kind == k
                charge = Charge(
                    kind=name,
                    axes=axes[None, on],
                    nbytes=np.array(sizes, dtype=float)[:, None] * fraction[on],
                    tensor="",
                    phase="forward",
                    times=1.0,
                    bucketed=bucketed,
                    whole=np.array(sizes)[:, None],
                )
                table[:, used[on]] = charge_price(charge, model, mesh)
            self.rows |= dict(zip(((size, bucketed) for size in sizes), table, strict=True))

    def of(self, flow: Flow) -> np.ndarray:
        """The cost of every code for this flow, for all its runs in a step; 0 for code 0."""
        row = self.rows[flow.nbytes, flow.bucketed]
        if flow.sum_nbytes != flow.nbytes:
            on = self.used[np.isin(self.kind, [COLLECTIVES.index(kind) for kind in SUMS])]
            row = row.copy()
            row[on] = self.rows[flow.sum_nbytes, flow.bucketed][on]
        return flow.times * row

    def saved(self, flow: Flow, taken_apart: CollectiveKind) -> np.ndarray:
        """How much less each code costs if it overlaps with the flow's products; 0 for other kinds of collectives."""
        out = np.zeros_like(self.rows[flow.nbytes, flow.bucketed])
        on = self.kind == COLLECTIVES.index(taken_apart)
        if (products := flow.overlapping(taken_apart)) and on.any():
            c = Charge(
                kind=taken_apart,
                axes=self.axes[on],
                nbytes=flow.bytes_of(taken_apart) * self.fraction[on],
                tensor="",
                phase=flow.phase,
                times=flow.times,
                during=products,
                whole=float(flow.bytes_of(taken_apart)),
                back=flow.back,
            )
            alone = charge_price(replace(c, during=()), self.model, self.mesh)
            out[self.used[on]] = alone - charge_price(c, self.model, self.mesh)
        return out
