"""Makes a plan from the answer of the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np

from pase.ir import Graph, Node, Role, Scope, digest
from pase.machine import CostModel, Machine, Mesh
from pase.memory.account import KeptPart, MemoryKind
from pase.memory.accounts import account_for
from pase.plan.accesses import Reading, access_layouts, equation_layouts
from pase.plan.constraints import Constraints, constraints, stages
from pase.plan.throughput import products, step_work
from pase.plan.types import NodePlan, PlanData, TensorPlan, Tried
from pase.tables.axis_layout import Placement
from pase.tables.itemize import LocalWork, NodeCost, collectives, local_work, node_costs, split_of
from pase.tables.layouts import concrete_size

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["Searched", "assemble", "axes_by_use"]


class PricedOn(Protocol):
    """What a strategy is priced on: ``pase.compiler``'s ``SplitProblem``."""

    @property
    def machine(self) -> Machine: ...
    @property
    def model(self) -> CostModel: ...
    @property
    def optimizer(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search says of its answer, as ``PlanData`` holds it. The defaults are those of a strategy that was not
    searched for."""

    cost: float
    bound: float = 0.0
    optimal: bool = False
    baselines: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    tried: Sequence[Tried] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, str]


def axes_by_use(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> Mesh:
    """Return the mesh with its axes named after what they split in most of the work: data (the batch), sequence, or
    else model. The work are the FLOPs of products; a model without products has as much in each gather and reduction.

    Axes that the user named keep their names. Only pase itself uses names of a single letter.
    """
    if graph.fixed or any(len(name) > 1 for name in mesh.names):
        return mesh
    work: Counter[str] = Counter()
    for node, _, flops in products(graph):
        work[node] += flops  # type: ignore[assignment]
    work = work or Counter(n.name for n in graph.nodes if n.kind in ("gather", "reduce"))
    names: list[str] = []
    taken: Counter[str] = Counter()
    for a in range(len(mesh.names)):
        split: Counter[str] = Counter()
        for node, amount in work.items():
            d = int(configs[node][a])
            if d >= 0:
                split[graph.node[node].space.dims[d].name] += amount
        use = {"b": "data", "s": "sequence"}.get(split.most_common(1)[0][0], "model") if split else "spare"
        taken[use] += 1
        names.append(use if taken[use] == 1 else f"{use}{taken[use]}")
    return replace(mesh, names=tuple(names))


class _KeptBytes(TypedDict):
    """The bytes that a node keeps on a device, as ``NodePlan`` holds them."""

    keeps: Mapping[MemoryKind, int]
    kept_for_recompute: int
    recomputed_in: int


_NOTHING = _KeptBytes(keeps={}, kept_for_recompute=0, recomputed_in=0)


def _kept(parts: Iterable[KeptPart]) -> dict[str, _KeptBytes]:
    """Return what each node keeps. parts: of all nodes."""
    keeps: dict[str, dict[MemoryKind, float]] = {}
    recompute: Counter[str] = Counter()
    regions: dict[tuple[Scope, ...], int] = {}
    region: dict[str, int] = {}
    for p in parts:
        mine = keeps.setdefault(p.node, {})
        if p.region is None:
            mine[p.kind] = mine.get(p.kind, 0.0) + p.nbytes
        else:
            recompute[p.node] += p.nbytes  # type: ignore[assignment]
            region[p.node] = regions.setdefault(p.region, len(regions) + 1)
    return {
        node: _KeptBytes(
            keeps={k: round(v) for k, v in mine.items()},
            kept_for_recompute=round(recompute[node]),
            recomputed_in=region.get(node, 0),
        )
        for node, mine in keeps.items()
    }


def assemble(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    priced: PricedOn,
    searched: Searched,
    *,
    name: str,
    traced: Traced,
    overlap: float | None = None,
) -> PlanData:
    """Return everything that follows from (graph, mesh, configs), for a step that is not varied.

    configs: node name -> int8 [axes]. overlap: as in ``PlanData``.
    """
    machine, model, optimizer = priced.machine, priced.model, priced.optimizer
    sent = collectives(graph, mesh, configs, model)
    account = account_for(machine, graph, overlap is not None)
    kept = _kept(account.parts(graph, mesh, configs, optimizer))
    work = local_work(graph, mesh, configs, model, optimizer)
    layouts = access_layouts(graph, mesh, configs)
    c = constraints(graph, mesh, layouts, stages(mesh, machine))
    parameters, inputs = _leaves(graph, c, traced)
    return PlanData(
        model=name,
        devices=mesh.devices,
        machine=machine.name,
        machine_digest=machine.digest,
        device_memory=machine.device.memory_bytes,
        cost_model=model.name,
        unit=model.unit,
        optimizer=optimizer,
        mesh=mesh,
        nodes=_node_plans(graph, mesh, configs, work, node_costs(work, sent), kept),
        parameters=parameters,
        inputs=inputs,
        define=c.define,
        read=c.read,
        copies=c.copies,
        accesses=equation_layouts(graph, layouts),
        collectives=sent,
        memory=account.memory(graph, mesh, configs, optimizer),
        cost=searched.cost,
        optimal=searched.optimal,
        bound=searched.bound,
        baselines=searched.baselines,
        skipped=searched.skipped,
        tried=tuple(searched.tried),
        seconds=dict(searched.seconds),
        overlap=overlap,
        bucket_bytes=machine.bucket_bytes,
        graph_digest=digest(traced.graph),
        provenance=dict(searched.provenance),
        traced=traced,
        work=step_work(graph, machine),
        padding=dict(traced.padding),
    )


def _node_plans(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    work: Mapping[str, tuple[LocalWork, ...]],
    costs: Mapping[str, NodeCost],
    kept: Mapping[str, _KeptBytes],
) -> tuple[NodePlan, ...]:
    """Return the nodes as the plan lists them."""
    reads: dict[str, dict[str, None]] = {}
    for e in graph.edges:
        reads.setdefault(e.dst, {})[e.src] = None

    def planned(n: Node) -> NodePlan:
        shown = (d for d in n.space if d.kind not in ("pending", "state", "ring"))
        return NodePlan(
            name=n.name,
            op=n.kind,
            einsum=n.main.einsum,
            sizes={d.name: concrete_size(d.size, n.name) for d in shown},
            split=split_of(n, configs[n.name], mesh),
            times=concrete_size(n.times, n.name),
            source=str(n.source.from_root()),
            cost=costs[n.name],
            reads=tuple(reads.get(n.name, ())),
            work=work[n.name],
            **kept.get(n.name, _NOTHING),
        )

    return tuple(map(planned, graph.nodes))


def _leaves(
    graph: Graph, c: Constraints, traced: Traced
) -> tuple[dict[str, TensorPlan], dict[str, TensorPlan]]:
    """Return parameters and inputs by path: their storage layouts, and the layouts in which they are used."""
    uses: dict[str, dict[Placement, None]] = {}
    for e in graph.edges:
        src = graph.node[e.src]
        if src.kind == "parameter":
            key = Reading(e.op.eqn, graph.tensors[e.tensor].original)
            route = c.define.get(e.op.writes[0].tensor) if e.op.kind == "copy" else c.read.get(key)
            if route is not None:
                uses.setdefault(src.ops[0].writes[0].tensor, {})[route.layouts[-1]] = None
    shapes = {t.path: t.shape for t in traced.graph.inputs}  # of all micro-batches

    def of_role(role: Role) -> dict[str, TensorPlan]:
        return {
            t.path: TensorPlan(
                shape=tuple(concrete_size(s, t.path) for s in shapes.get(t.path, t.shape)),
                dtype=t.dtype,
                storage=c.storage[t.name],
                used_as=tuple(uses.get(t.name, ())),
                state=c.state.get(t.name),
                unpadded=traced.unpadded.get(t.path),
            )
            for t in graph.tensors.values()
            if t.role == role and t.name in graph.producer
        }

    return of_role("parameter"), of_role("input")
