"""layout.json: a plan as a versioned file with a JSON Schema, written whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.files.codec import AtLeastOne, Count, convert, json_schema, read_json, to_tree
from pase.ir import Place
from pase.ir.blocks import Block
from pase.machine import Mesh
from pase.memory.account import Memory
from pase.plan.accesses import Digits, EquationLayouts, Reading, distinct
from pase.plan.constraints import Route
from pase.plan.pipeline import PipelinePlan
from pase.plan.throughput import StepWork, Throughput
from pase.plan.types import NodePlan, PlanData, TensorPlan, Tried
from pase.tables.itemize import Collective, NodeCost
from pase.tables.work import Phase

__all__ = ["SCHEMA", "diff", "from_json", "load", "made_schema", "save", "schema", "to_json"]

LayoutVersion = Literal["pase.layout/1"]
SCHEMA: LayoutVersion = "pase.layout/1"
_MAX_BYTES = 512 << 20

Axes = Annotated[tuple[str, ...], Meta(max_length=64)]
PlacementForm = Annotated[
    tuple[Axes, ...],
    Meta(
        max_length=64,
        description="per tensor dim, the mesh axes that split it, major to minor: a JAX PartitionSpec",
    ),
]


class MachineForm(Struct, kw_only=True):
    """The machine that the plan was made for."""

    name: str
    digest: str
    memory_bytes: Count


class TensorForm(Struct, kw_only=True):
    """A parameter or an input; state: of its gradient and optimizer state, where these are split further."""

    shape: Annotated[tuple[AtLeastOne, ...], Meta(max_length=64)]
    dtype: str
    storage: PlacementForm
    used_as: tuple[PlacementForm, ...]
    state: PlacementForm | UnsetType = UNSET


class NodeForm(Struct, kw_only=True):
    """A node of the graph and how it is split: iteration dim -> mesh axes."""

    node: str
    op: str
    einsum: str
    sizes: dict[str, AtLeastOne]
    split: dict[str, Axes]
    times: Count
    source: str


class ReshardForm(Struct, kw_only=True):
    """Where one op reads a tensor in another layout than it was made in: the layouts to go through, the last is used.

    gradient: the layout that its gradient is brought into at once.
    """

    at: str
    tensor: str
    layouts: tuple[PlacementForm, ...]
    gradient: PlacementForm | UnsetType = UNSET


class CollectiveForm(Struct, kw_only=True, rename={"nbytes": "bytes"}):
    """A collective of a step; bytes: the larger local buffer on one device; cost: of all times."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
    tensor: str
    axes: Axes
    nbytes: Count
    times: Count
    phase: Phase
    node: str
    source: str
    cost: float


class CostForm(Struct, kw_only=True):
    """Predicted costs of a step, in ``unit``."""

    unit: str
    model: str
    total: float
    bound: float
    optimal: bool
    by_node: dict[str, NodeCost]
    by_kind: dict[str, float]
    baselines: dict[str, float]
    skipped: dict[str, str]
    baseline_memory: dict[str, Count] | UnsetType = UNSET
    meshes: tuple[Tried, ...]


class EquationForm(Struct, kw_only=True):
    """Tensor -> which of the layouts an equation reads or writes it in."""

    reads: dict[str, Count]
    writes: dict[str, Count]


class AccessesForm(Struct, kw_only=True):
    """The layouts in which each equation of the model reads and writes its tensors.

    layouts: per mesh axis what it selects of the tensor, (dim, blocks), or null where the tensor is replicated.
    equations: path of an equation -> its tensors.
    """

    layouts: tuple[Annotated[tuple[tuple[Count, AtLeastOne] | None, ...], Meta(max_length=64)], ...]
    equations: dict[str, EquationForm]


class LayoutForm(Struct, kw_only=True):
    """How every layer of a model is split over the devices."""

    schema: LayoutVersion
    model: Annotated[str, Meta(max_length=4096)]
    devices: AtLeastOne
    machine: MachineForm
    mesh: Annotated[
        dict[str, AtLeastOne],
        Meta(min_length=1, max_length=64, description="axis name -> size, outermost first"),
    ]
    optimizer: str
    parameters: Annotated[dict[str, TensorForm], Meta(description="the user's path -> tensor")]
    inputs: Annotated[dict[str, TensorForm], Meta(description="the user's path -> tensor")]
    strategy: tuple[NodeForm, ...]
    reshards: tuple[ReshardForm, ...]
    layouts: Annotated[
        dict[str, tuple[PlacementForm, ...]],
        Meta(description="tensor -> the layouts it is given where it is made"),
    ]
    gradients: Annotated[
        dict[str, PlacementForm],
        Meta(
            description="tensor made of a parameter -> the layout that its gradient is brought into, where that is not "
            "the tensor's own"
        ),
    ] = {}
    copies: (
        Annotated[
            dict[str, str],
            Meta(description="copy that several readers share -> the tensor that it is a copy of"),
        ]
        | UnsetType
    ) = UNSET
    collectives: tuple[CollectiveForm, ...]
    cost: CostForm
    memory: Annotated[Memory, Meta(description="bytes on one device")]
    work: (
        Annotated[StepWork, Meta(description="what a step works on: model FLOPs, tokens, examples")]
        | UnsetType
    ) = UNSET
    throughput: (
        Annotated[Throughput, Meta(description="of the predicted step, on one device")] | UnsetType
    ) = UNSET
    memory_limit: (
        Annotated[Count, Meta(description="bytes that a device may hold; absent: no limit")] | UnsetType
    ) = UNSET
    misfit: (
        Annotated[str, Meta(description="what would fit, where no strategy fits the limit")] | UnsetType
    ) = UNSET
    accumulate: AtLeastOne = 1
    remat: tuple[Block, ...] = ()
    graph_digest: str
    seconds: dict[str, float]
    provenance: dict[str, str]
    accesses: AccessesForm | UnsetType = UNSET
    bucket_plan: dict[str, Any] | UnsetType = UNSET
    pipeline: Annotated[PipelinePlan, Meta(description="stages; the mesh is one rank's")] | UnsetType = UNSET


def made_schema() -> dict[str, Any]:
    """The JSON Schema of layout.json, made of ``LayoutForm``; the committed file is equal to it."""
    return json_schema(LayoutForm, "pase.layout/1: how every layer of a model is split over the devices")


@cache
def schema() -> dict[str, Any]:
    """The published JSON Schema of layout.json."""
    text = resources.files("pase.plan").joinpath("layout-1.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def to_json(plan: PlanData) -> dict[str, Any]:
    """The plan as the JSON object that ``from_json`` reads."""
    tree: dict[str, Any] = to_tree(_form_of(plan))
    return tree


def _form_of(plan: PlanData) -> LayoutForm:
    def tensor(t: TensorPlan) -> TensorForm:
        state = UNSET if t.state is None else t.state
        return TensorForm(shape=t.shape, dtype=t.dtype, storage=t.storage, used_as=t.used_as, state=state)

    by_kind: dict[str, float] = {}
    for c in plan.collectives:
        by_kind[c.kind] = by_kind.get(c.kind, 0.0) + c.cost
    return LayoutForm(
        schema=SCHEMA,
        model=plan.model,
        devices=plan.devices,
        machine=MachineForm(name=plan.machine, digest=plan.machine_digest, memory_bytes=plan.device_memory),
        mesh=dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        optimizer=plan.optimizer,
        parameters={path: tensor(t) for path, t in plan.parameters.items()},
        inputs={path: tensor(t) for path, t in plan.inputs.items()},
        strategy=tuple(
            NodeForm(
                node=n.name,
                op=n.op,
                einsum=n.einsum,
                sizes=dict(n.sizes),
                split=dict(n.split),
                times=n.times,
                source=n.source,
            )
            for n in plan.nodes
        ),
        reshards=tuple(
            ReshardForm(
                at=str(reading.at),
                tensor=reading.tensor,
                layouts=route.layouts,
                gradient=UNSET if route.gradient is None else route.gradient,
            )
            for reading, route in plan.read.items()
        ),
        layouts={name: route.layouts for name, route in plan.define.items() if route.layouts},
        gradients={name: r.gradient for name, r in plan.define.items() if r.gradient is not None},
        copies=dict(plan.copies) or UNSET,
        collectives=tuple(_copied(c, CollectiveForm) for c in plan.collectives),
        cost=CostForm(
            unit=plan.unit,
            model=plan.cost_model,
            total=plan.cost,
            bound=plan.bound,
            optimal=plan.optimal,
            by_node={n.name: n.cost for n in plan.nodes},
            by_kind=by_kind,
            baselines=dict(plan.baselines),
            skipped=dict(plan.skipped),
            baseline_memory=dict(plan.baseline_memory) or UNSET,
            meshes=plan.tried,
        ),
        memory=plan.memory,
        work=UNSET if plan.work is None else plan.work,
        throughput=UNSET if plan.throughput is None else plan.throughput,
        memory_limit=UNSET if plan.memory_limit is None else plan.memory_limit,
        misfit=UNSET if plan.misfit is None else plan.misfit,
        accumulate=plan.accumulate,
        remat=plan.remat,
        graph_digest=plan.graph_digest,
        seconds=dict(plan.seconds),
        provenance=dict(plan.provenance),
        accesses=_accesses_form(plan.accesses) if plan.accesses else UNSET,
        bucket_plan=UNSET if plan.buckets is None else dict(plan.buckets),
        pipeline=UNSET if plan.pipeline is None else plan.pipeline,
    )


def _copied(value: Any, cls: Any) -> Any:
    """The same fields as another class."""
    return cls(**{name: getattr(value, name) for name in cls.__annotations__})


def _accesses_form(accesses: Mapping[Place, EquationLayouts]) -> AccessesForm:
    """Each layout once, and per equation which of them its tensors are read and written in."""
    number: dict[Digits, int] = {layout: i for i, layout in enumerate(distinct(accesses))}

    def numbered(layouts: Mapping[str, Digits]) -> dict[str, int]:
        return {t: number[d] for t, d in layouts.items()}

    equations = {
        str(at): EquationForm(reads=numbered(e.reads), writes=numbered(e.writes))
        for at, e in accesses.items()
    }
    return AccessesForm(layouts=tuple(number), equations=equations)


def from_json(data: Any, where: str = "layout") -> PlanData:
    """Read the object; PaseError names the place of what is wrong. ``where`` names it in messages."""
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise PaseError(
            f"{where}: schema is {version!r}, and this pase reads '{SCHEMA}'; "
            f"use the version of pase that wrote it, or compile again"
        )
    form = convert(data, LayoutForm, where)
    for problem in _problems(form):
        raise PaseError(f"{where}: at {problem}")
    plan = _plan_of(form)
    if plan.buckets is not None:
        from pase.plan.buckets import read_buckets

        read_buckets(plan, plan.buckets, f"{where}: at bucket_plan")
    return plan


def _plan_of(form: LayoutForm) -> PlanData:
    def tensor(t: TensorForm) -> TensorPlan:
        state = None if t.state is UNSET else t.state
        return TensorPlan(shape=t.shape, dtype=t.dtype, storage=t.storage, used_as=t.used_as, state=state)

    cost, nothing = form.cost, NodeCost(compute=0.0, communication=0.0, update=0.0)
    return PlanData(
        model=form.model,
        devices=form.devices,
        machine=form.machine.name,
        machine_digest=form.machine.digest,
        device_memory=form.machine.memory_bytes,
        cost_model=cost.model,
        unit=cost.unit,
        optimizer=form.optimizer,
        mesh=Mesh(names=tuple(form.mesh), sizes=tuple(form.mesh.values())),
        nodes=tuple(
            NodePlan(
                name=n.node,
                op=n.op,
                einsum=n.einsum,
                sizes=n.sizes,
                split=n.split,
                times=n.times,
                source=n.source,
                cost=cost.by_node.get(n.node, nothing),
            )
            for n in form.strategy
        ),
        parameters={path: tensor(t) for path, t in form.parameters.items()},
        inputs={path: tensor(t) for path, t in form.inputs.items()},
        define={
            name: Route(form.layouts.get(name, ()), form.gradients.get(name))
            for name in dict.fromkeys((*form.layouts, *form.gradients))
        },
        read={
            Reading(Place.parse(r.at), r.tensor): Route(
                r.layouts, None if r.gradient is UNSET else r.gradient
            )
            for r in form.reshards
        },
        copies=_copies_by_name(form.layouts) if form.copies is UNSET else form.copies,
        collectives=tuple(_copied(c, Collective) for c in form.collectives),
        memory_limit=None if form.memory_limit is UNSET else form.memory_limit,
        misfit=None if form.misfit is UNSET else form.misfit,
        baseline_memory=cost.baseline_memory or {},
        accumulate=form.accumulate,
        remat=form.remat,
        memory=form.memory,
        work=None if form.work is UNSET else form.work,
        cost=cost.total,
        optimal=cost.optimal,
        bound=cost.bound,
        baselines=cost.baselines,
        skipped=cost.skipped,
        tried=cost.meshes,
        seconds=form.seconds,
        graph_digest=form.graph_digest,
        provenance=form.provenance,
        accesses={} if form.accesses is UNSET else _accesses_of(form.accesses),
        buckets=None if form.bucket_plan is UNSET else form.bucket_plan,
        pipeline=None if form.pipeline is UNSET else form.pipeline,
    )


def _copies_by_name(tensors: Iterable[str]) -> dict[str, str]:
    """Files of before ``copies`` was written: there the copies of t27 were named t27c, t27c1, …"""
    return {t: m[1] for t in tensors if (m := re.fullmatch(r"(t\d+)c\d*", t))}


def _accesses_of(form: AccessesForm) -> dict[Place, EquationLayouts]:
    def laid_out(numbers: Mapping[str, int]) -> dict[str, Digits]:
        return {t: form.layouts[i] for t, i in numbers.items()}

    return {
        Place.parse(at): EquationLayouts(reads=laid_out(e.reads), writes=laid_out(e.writes))
        for at, e in form.equations.items()
    }


def _problems(form: LayoutForm) -> Iterator[str]:
    """What types cannot say, each as "place: what": axes exist, a tensor uses an axis once, shards divide."""
    size = form.mesh
    devices = 1 if form.pipeline is UNSET else form.pipeline.degree
    for ways in size.values():
        devices *= ways
    if devices != form.devices:
        yield f"mesh: {size} is not {form.devices} devices" + (
            "" if form.pipeline is UNSET else f" in {form.pipeline.degree} ranks"
        )
    yield from _stage_problems(form)
    for kind, tensors in (("parameters", form.parameters), ("inputs", form.inputs)):
        for path, t in tensors.items():
            yield from _misplaced(f"{kind}/{path}/storage", t.storage, size, t.shape)
            if t.state is not UNSET:
                yield from _misplaced(f"{kind}/{path}/state", t.state, size, t.shape)
    for n in form.strategy:
        yield from _misplaced(f"strategy/{n.node}/split", list(n.split.values()), size)
    for name, layouts in form.layouts.items():
        for layout in layouts:
            yield from _misplaced(f"layouts/{name}", layout, size)
    for name, layout in form.gradients.items():
        yield from _misplaced(f"gradients/{name}", layout, size)
    for i, c in enumerate(form.collectives):
        yield from _misplaced(f"collectives/{i}/axes", [c.axes], size)
    for r in form.reshards:
        for layout in (*r.layouts, *(() if r.gradient is UNSET else (r.gradient,))):
            yield from _misplaced(f"reshards/{r.at} of {r.tensor}", layout, size)
    if form.accesses is not UNSET:
        known = len(form.accesses.layouts)
        for at, e in form.accesses.equations.items():
            if max((*e.reads.values(), *e.writes.values()), default=-1) >= known:
                yield f"accesses/equations/{at}: there are {known} layouts, counted from 0"


def _stage_problems(form: LayoutForm) -> Iterator[str]:
    """Stages are of ranks and strategies that there are, and as many as the cuts."""
    p = form.pipeline
    if p is UNSET:
        return
    if not len(p.cuts) == len(p.stages) == p.degree * p.chunks:
        yield f"pipeline: {len(p.cuts)} cuts, {len(p.stages)} stages for {p.degree} ranks of {p.chunks}"
    for i, s in enumerate(p.stages):
        if s.rank >= p.degree or s.strategy >= len(p.strategies):
            yield f"pipeline/stages/{i}: rank {s.rank}, strategy {s.strategy} are not there"
    for i, strategy in enumerate(p.strategies):
        for node, split in strategy.items():
            yield from _misplaced(f"pipeline/strategies/{i}/{node}", list(split.values()), form.mesh)


def _misplaced(
    place: str, layout: Sequence[Sequence[str]], size: Mapping[str, int], shape: Sequence[int] | None = None
) -> Iterator[str]:
    """What is wrong with a layout on a mesh (axis -> size), for a tensor of this shape."""
    used = [a for axes in layout for a in axes]
    for a in used:
        if a not in size:
            yield f"{place}: mesh axis '{a}' does not exist; the mesh has {', '.join(size)}"
            return
    if len(set(used)) != len(used):
        yield f"{place}: a mesh axis is used twice in {[list(x) for x in layout]}"
    if shape is None:
        return
    if len(layout) != len(shape):
        yield f"{place}: a layout of {len(layout)} dims for shape {list(shape)}"
        return
    for extent, axes in zip(shape, layout, strict=True):
        ways = 1
        for a in axes:
            ways *= size[a]
        if extent % ways:
            yield f"{place}: a dim of {extent} elements in {ways} shards is uneven"


def save(plan: PlanData, path: str | Path) -> None:
    """Write layout.json, whole or not at all."""
    write_atomically(path, json.dumps(to_json(plan), indent=1) + "\n")


def load(path: str | Path) -> PlanData:
    """Read a layout.json; PaseError where it is missing, corrupt, of another version, or too large to be one."""
    return from_json(read_json(path, "a layout", _MAX_BYTES), str(path))


def diff(a: PlanData, b: PlanData) -> list[str]:
    """What differs between two plans' layouts, one line each."""
    out = []
    for what in ("accumulate", "remat"):
        if getattr(a, what) != getattr(b, what):
            out.append(f"{what}: {_variant(getattr(a, what))} -> {_variant(getattr(b, what))}")
    mesh_a, mesh_b = (dict(zip(p.mesh.names, p.mesh.sizes, strict=True)) for p in (a, b))
    if mesh_a != mesh_b:
        out.append(f"mesh: {mesh_a} -> {mesh_b}")
    for what, left, right in (
        ("parameter", _stored(a.parameters), _stored(b.parameters)),
        ("input", _stored(a.inputs), _stored(b.inputs)),
        ("node", a.strategy, b.strategy),
    ):
        for name in dict.fromkeys((*left, *right)):
            x, y = left.get(name), right.get(name)
            if x != y:
                out.append(f"{what} {name}: {_short(x)} -> {_short(y)}")
    return out


def _stored(tensors: Mapping[str, TensorPlan]) -> Mapping[str, Any]:
    return {
        k + what: layout
        for k, t in tensors.items()
        for what, layout in (("", t.storage), (" (its state)", t.state))
        if layout is not None
    }


def _variant(x: Any) -> str:
    return str(x) if isinstance(x, int) else f"{len(x)} blocks"


def _short(x: Any) -> str:
    if x is None:
        return "absent"
    if isinstance(x, Mapping):
        return " ".join(f"{d}:{'·'.join(axes)}" for d, axes in x.items()) or "replicated"
    return "[" + ", ".join("·".join(axes) or "-" for axes in x) + "]"
