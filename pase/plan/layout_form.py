"""The contents of layout.json as types, and checks that types cannot express."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from pase.files.codec import AtLeastOne, Count, NotNegative
from pase.files.json_values import JsonObject
from pase.ir import Remark
from pase.ir.blocks import Block, Hoisted
from pase.memory.account import Memory, MemoryKind
from pase.plan.pipeline import PipelinePlan
from pase.plan.throughput import StepWork, Throughput
from pase.plan.types import Tried
from pase.tables.itemize import LocalWork, NodeCost
from pase.tables.work import Phase

__all__ = [
    "SCHEMA",
    "AccessesForm",
    "CollectiveForm",
    "CostForm",
    "EquationForm",
    "LayoutForm",
    "MachineForm",
    "NodeForm",
    "ReshardForm",
    "TensorForm",
    "problems",
]

LayoutVersion = Literal["pase.layout/1"]
SCHEMA: LayoutVersion = "pase.layout/1"

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
    """A parameter or an input.

    state: the layout of its gradient and optimizer state, if these are split further than the parameter.
    unpadded: the model's own shape, if dims are padded at their end; shape is then the padded one.
    """

    shape: Annotated[tuple[AtLeastOne, ...], Meta(max_length=64)]
    dtype: str
    storage: PlacementForm
    used_as: tuple[PlacementForm, ...]
    state: PlacementForm | UnsetType = UNSET
    unpadded: Annotated[tuple[AtLeastOne, ...], Meta(max_length=64)] | UnsetType = UNSET


class NodeForm(Struct, kw_only=True):
    """A node of the graph and how it is split: iteration dim -> mesh axes.

    reads: the nodes that make what it reads. work: what one device does for it in a step. keeps: bytes that a device
    keeps for it; for a parameter, without what is counted elsewhere. kept_for_recompute: bytes kept while its region is
    recomputed. recomputed_in: the number of that region, from 1.
    """

    node: str
    op: str
    einsum: str
    sizes: dict[str, AtLeastOne]
    split: dict[str, Axes]
    times: Count
    source: str
    reads: tuple[str, ...] | UnsetType = UNSET
    work: tuple[LocalWork, ...] | UnsetType = UNSET
    keeps: dict[MemoryKind, int] | UnsetType = UNSET
    kept_for_recompute: Count | UnsetType = UNSET
    recomputed_in: Count | UnsetType = UNSET


class ReshardForm(Struct, kw_only=True):
    """A read of a tensor, by one op, in another layout than it was made in.

    layouts: the layouts that it passes through, in order; the last one is used. gradient: the layout to which its
    gradient is resharded in one step.
    """

    at: str
    tensor: str
    layouts: tuple[PlacementForm, ...]
    gradient: PlacementForm | UnsetType = UNSET


class CollectiveForm(Struct, kw_only=True, rename={"nbytes": "bytes"}):
    """A collective of a step. bytes: the larger local buffer on one device. cost: the cost of all repetitions."""

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
    """Tensor -> the number of the layout in which an equation reads or writes it."""

    reads: dict[str, Count]
    writes: dict[str, Count]


class AccessesForm(Struct, kw_only=True):
    """The layouts in which each equation of the model reads and writes its tensors.

    layouts: per mesh axis, what it selects of the tensor, (dim, blocks), or null if the tensor is replicated.
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
        Meta(description="tensor -> the layouts that it passes through where it is made"),
    ]
    gradients: Annotated[
        dict[str, PlacementForm],
        Meta(
            description="tensor made from a parameter -> the layout to which its gradient is resharded, if it differs "
            "from the tensor's own"
        ),
    ] = {}
    copies: (
        Annotated[
            dict[str, str],
            Meta(description="copy that several readers share -> the tensor that it copies"),
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
        Annotated[Throughput, Meta(description="throughput of the predicted step, per device")] | UnsetType
    ) = UNSET
    overlap: (
        Annotated[
            NotNegative,
            Meta(
                description="the fraction of the device that collectives of parameters occupy while they overlap with "
                "compute; absent: the cost has no overlap"
            ),
        ]
        | UnsetType
    ) = UNSET
    bucket_bytes: (
        Annotated[
            NotNegative,
            Meta(
                description="bytes of a message that joins parameters or gradients; 0: one by one; absent: 25 MiB"
            ),
        ]
        | UnsetType
    ) = UNSET
    memory_limit: (
        Annotated[Count, Meta(description="bytes that a device may hold; absent: no limit")] | UnsetType
    ) = UNSET
    misfit: Annotated[str, Meta(description="what would fit, if no strategy fits the limit")] | UnsetType = (
        UNSET
    )
    accumulate: AtLeastOne = 1
    remat: tuple[Block, ...] = ()
    once: (
        Annotated[
            Hoisted,
            Meta(
                description="which collectives of parameters run once per step instead of once per micro-batch"
            ),
        ]
        | UnsetType
    ) = UNSET
    gathers_again: (
        Annotated[
            bool,
            Meta(description="whether backward gathers parameters again instead of keeping them gathered"),
        ]
        | UnsetType
    ) = UNSET
    padding: (
        Annotated[
            dict[int, AtLeastOne],
            Meta(
                description="extent -> the padded extent of every dim of that extent, so that devices divide it"
            ),
        ]
        | UnsetType
    ) = UNSET
    remarks: (
        Annotated[
            tuple[Remark, ...],
            Meta(description="what the price assumes, and reasons to doubt it, by kind"),
        ]
        | UnsetType
    ) = UNSET
    idle: (
        Annotated[
            Count, Meta(description="devices that the user offered besides, and that the plan leaves idle")
        ]
        | UnsetType
    ) = UNSET
    graph_digest: str
    seconds: dict[str, float]
    provenance: dict[str, str]
    accesses: AccessesForm | UnsetType = UNSET
    bucket_plan: JsonObject | UnsetType = UNSET
    pipeline: Annotated[PipelinePlan, Meta(description="stages; the mesh is one rank's")] | UnsetType = UNSET


class LayoutFault(NamedTuple):
    """What is wrong with a layout, and the place in the file that has it."""

    place: str
    what: str


def problems(form: LayoutForm) -> Iterator[LayoutFault]:
    """Yield errors that types cannot express.

    Axes must exist, a tensor may use an axis only once, and shards must divide dims evenly.
    """
    size = form.mesh
    p = form.pipeline
    devices = (1 if p is UNSET else p.degree) * math.prod(size.values())
    if p is not UNSET and p.replicas:
        devices = sum(r.pipeline.degree * math.prod(r.mesh.values()) for r in p.replicas)
    if devices != form.devices:
        ranks = "" if form.pipeline is UNSET else f" in {form.pipeline.degree} ranks"
        yield LayoutFault("mesh", f"{size} is not {form.devices} devices{ranks}")
    if p is not UNSET:
        yield from _stage_problems(p, size, "pipeline")
        for i, replica in enumerate(p.replicas):
            yield from _stage_problems(replica.pipeline, replica.mesh, f"pipeline/replicas/{i}/pipeline")
    for kind, tensors in (("parameters", form.parameters), ("inputs", form.inputs)):
        for path, t in tensors.items():
            yield from _misplaced(f"{kind}/{path}/storage", t.storage, size, t.shape)
            if t.state is not UNSET:
                yield from _misplaced(f"{kind}/{path}/state", t.state, size, t.shape)
    names = {n.node for n in form.strategy}
    for n in form.strategy:
        yield from _misplaced(f"strategy/{n.node}/split", list(n.split.values()), size)
        for read in n.reads or ():
            if read not in names:
                yield LayoutFault(f"strategy/{n.node}/reads", f"there is no node '{read}'")
    for name, layouts in form.layouts.items():
        for layout in layouts:
            yield from _misplaced(f"layouts/{name}", layout, size)
    for name, layout in form.gradients.items():
        yield from _misplaced(f"gradients/{name}", layout, size)
    for i, c in enumerate(form.collectives):
        yield from _misplaced(f"collectives/{i}/axes", [c.axes], size)
        if not c.axes:
            yield LayoutFault(f"collectives/{i}/axes", "a collective must run along at least one mesh axis")
    for r in form.reshards:
        for layout in (*r.layouts, *(() if r.gradient is UNSET else (r.gradient,))):
            yield from _misplaced(f"reshards/{r.at} of {r.tensor}", layout, size)
    if form.accesses is not UNSET:
        known = len(form.accesses.layouts)
        for at, e in form.accesses.equations.items():
            if max((*e.reads.values(), *e.writes.values()), default=-1) >= known:
                yield LayoutFault(
                    f"accesses/equations/{at}",
                    f"a layout number is out of range; there are {known}, counted from 0",
                )


def _stage_problems(p: PipelinePlan, size: Mapping[str, int], place: str) -> Iterator[LayoutFault]:
    """Check that the stages refer to existing ranks and strategies, and that there are as many stages as cuts."""
    if not len(p.cuts) == len(p.stages) == p.degree * p.chunks:
        yield LayoutFault(
            place, f"{len(p.cuts)} cuts and {len(p.stages)} stages for {p.degree} ranks of {p.chunks} chunks"
        )
    if len(p.groups) not in (0, p.degree):
        yield LayoutFault(f"{place}/groups", f"{len(p.groups)} groups for {p.degree} ranks")
    for i, s in enumerate(p.stages):
        if s.rank >= p.degree or s.strategy >= len(p.strategies):
            yield LayoutFault(f"{place}/stages/{i}", f"rank {s.rank} or strategy {s.strategy} does not exist")
    for i, strategy in enumerate(p.strategies):
        for node, split in strategy.items():
            yield from _misplaced(f"{place}/strategies/{i}/{node}", list(split.values()), size)
    for node, stages in p.stages_of.items():
        if max(stages, default=0) >= len(p.stages):
            yield LayoutFault(
                f"{place}/stages_of/{node}",
                f"a stage is out of range; there are {len(p.stages)}, counted from 0",
            )


def _misplaced(
    place: str, layout: Sequence[Sequence[str]], size: Mapping[str, int], shape: Sequence[int] | None = None
) -> Iterator[LayoutFault]:
    """Yield what is wrong with a layout on a mesh (axis -> size), for a tensor of this shape."""
    used = [a for axes in layout for a in axes]
    for a in used:
        if a not in size:
            yield LayoutFault(place, f"mesh axis '{a}' does not exist; the mesh has {', '.join(size)}")
            return
    if len(set(used)) != len(used):
        yield LayoutFault(place, f"a mesh axis is used twice in {[list(x) for x in layout]}")
    if shape is None:
        return
    if len(layout) != len(shape):
        yield LayoutFault(place, f"the layout has {len(layout)} dims, but the shape is {list(shape)}")
        return
    for extent, axes in zip(shape, layout, strict=True):
        ways = 1
        for a in axes:
            ways *= size[a]
        if extent % ways:
            yield LayoutFault(place, f"a dim of {extent} elements cannot be split evenly into {ways} shards")
