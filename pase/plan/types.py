"""A plan as data: a strategy with everything that follows from it.

The methods that users call on a plan (``plan.jax``, ``plan.save``, ``print(plan)``) are in ``pase.api.Plan``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.ir import Graph, Place, Remark, digest, named, simplify
from pase.ir.blocks import Block, Hoisted
from pase.ir.types import PRODUCTS, itemsize
from pase.machine import BUCKET_BYTES, Mesh
from pase.memory.account import Memory, MemoryKind
from pase.plan.accesses import EquationLayouts, Reading, access_layouts, equation_layouts
from pase.plan.constraints import Route
from pase.plan.pipeline import PipelinePlan
from pase.plan.throughput import StepWork, Throughput
from pase.tables.axis_layout import Placement
from pase.tables.itemize import Collective, LocalWork, NodeCost, config_of

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["NodePlan", "PlanData", "TensorPlan", "Tried"]

T = TypeVar("T")

_ROUNDING = 1e-6
"""The most by which rounding may make the sum of a plan's parts differ from its cost, relative to the cost."""


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node of the graph and how it is split.

    split: iteration dim -> mesh axes, major to minor.
    cost: in the cost model's unit.
    reads: the nodes that make what it reads.
    work: what one device does for it in a step.
    keeps: bytes that a device keeps for it, throughout the step or for a part of it. What a node reads gathered or in
        another layout for backward counts for that node.
    kept_for_recompute: bytes kept while its rematerialized region is recomputed.
    recomputed_in: the number of that region, from 1; 0 for none.

    The last five are empty in layouts that were written before these fields existed.
    """

    name: str
    op: str
    einsum: str
    sizes: Mapping[str, int]
    split: Mapping[str, tuple[str, ...]]
    times: int
    source: str
    cost: NodeCost
    reads: tuple[str, ...] = ()
    work: tuple[LocalWork, ...] = ()
    keeps: Mapping[MemoryKind, int] = field(default_factory=dict)
    kept_for_recompute: int = 0
    recomputed_in: int = 0

    @property
    def kept_again(self) -> int:
        """The former name of ``kept_for_recompute``."""
        return self.kept_for_recompute


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """A parameter or a batch input: its shape, dtype and storage (for each tensor dim, the mesh axes that split it).

    used_as: the layouts in which it is used, if they differ from the storage.
    state: the layout of its gradient and optimizer state, if these are split further than the parameter (ZeRO-2). None
        means the same as the storage.
    unpadded: the shape in the user's program, if dims are padded at their end; ``shape`` is then the padded one. None
        means that nothing is padded.
    """

    shape: tuple[int, ...]
    dtype: str
    storage: Placement
    used_as: tuple[Placement, ...] = ()
    state: Placement | None = None
    unpadded: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """The number of elements in the user's program, without padding."""
        return math.prod(self.shape if self.unpadded is None else self.unpadded)

    def local_bytes(self, mesh: Mesh, placement: Placement | None = None) -> int:
        """Bytes on a device, in the storage or in another placement."""
        ways = (mesh.sizes[mesh.names.index(a)] for axes in placement or self.storage for a in axes)
        return math.prod(self.shape) * itemsize(self.dtype) // math.prod(ways)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A mesh that was searched, and the best cost on it."""

    mesh: tuple[int, ...]
    cost: float


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """What ``pase.compile`` returns and ``layout.json`` holds. Costs are in ``unit``, predicted, not measured."""

    model: str
    devices: int
    machine: str
    machine_digest: str
    device_memory: int
    cost_model: str
    unit: str
    optimizer: str
    mesh: Mesh
    nodes: tuple[NodePlan, ...]
    parameters: Mapping[str, TensorPlan]
    inputs: Mapping[str, TensorPlan]
    define: Mapping[str, Route]
    read: Mapping[Reading, Route]
    collectives: tuple[Collective, ...]
    memory: Memory
    cost: float
    optimal: bool
    bound: float
    baselines: Mapping[str, float]
    skipped: Mapping[str, str]
    tried: tuple[Tried, ...]
    seconds: Mapping[str, float]
    graph_digest: str
    provenance: Mapping[str, str]
    accumulate: int = 1
    """The number of micro-batches in a step, over which gradients are summed."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """A copy that several readers share -> the tensor that it copies."""
    accesses: Mapping[Place, EquationLayouts] = field(default_factory=dict, repr=False)
    """Equation -> the layouts in which it reads and writes. Empty in layouts written before this field existed."""
    remat: tuple[Block, ...] = ()
    """Blocks of equations that backward recomputes, in addition to those that the model itself rematerializes."""
    once: Hoisted = "none"
    """Which collectives of parameters are hoisted: they run once per step, not per micro-batch and per read."""
    gathers_again: bool = False
    """Whether backward gathers parameters again, instead of keeping them gathered from forward on."""
    buckets: JsonObject | None = field(default=None, repr=False)
    """A bucket plan as layout.json holds it, with the links that it was made for. None if no bucket plan was chosen."""
    overlap: float | None = None
    """The fraction of the device that collectives of parameters occupy while they overlap with compute, if the price
    includes such overlap (``pase.tables.overlap``). None if nothing overlaps."""
    bucket_bytes: float = BUCKET_BYTES
    """The size of the messages in which parameters and gradients are sent (``Machine.bucket_bytes``). 0: one by one."""
    memory_limit: int | None = None
    """The bytes that the plan may use on a device. None if the plan was made without a limit."""
    misfit: str | None = None
    """If no strategy fits the limit: the least memory needed, and what would fit. The plan then ignores the limit."""
    baseline_memory: Mapping[str, int] = field(default_factory=dict)
    """Strategy of ``baselines`` -> bytes that it needs on a device. Empty without a limit."""
    pipeline: PipelinePlan | None = None
    """The stages of the model; the mesh is then that of one rank. None if every device works on the whole model."""
    padding: Mapping[int, int] = field(default_factory=dict)
    """Extent -> the padded extent of every dim of that extent, because the devices do not divide it."""
    work: StepWork | None = None
    """The work of a step. None in layouts written before this field existed."""
    noted: tuple[Remark, ...] = ()
    """What the price assumes, and reasons to doubt it (``pase.plan.remarks``)."""
    idle: int = 0
    """The number of devices that the user offered, in addition to ``devices``, and that the plan leaves idle."""
    traced: Traced | None = field(default=None, repr=False, compare=False)

    @cached_property
    def strategy(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """Node name -> iteration dim -> mesh axes."""
        return {n.name: n.split for n in self.nodes}

    @cached_property
    def graph(self) -> Graph:
        """The model's loop nests, which the strategy splits.

        Raises PaseError if the plan was loaded without its model.
        """
        if self.traced is None:
            raise PaseError(
                "it was loaded without its model",
                where=f"the plan for '{self.model}'",
                fix="call plan.bind(fn, params, batch) first",
            )
        return named(simplify(self.traced.graph))

    @cached_property
    def whole_step(self) -> bool:
        """Whether the program makes its own gradients and updates (``pase.ir.whole_step``). Its nodes are then in the
        order in which they run."""
        of = {(n.op == "parameter", w.phase) for n in self.nodes for w in n.work}
        return (True, "update") not in of and bool(of & {(False, "backward"), (False, "update")})

    @cached_property
    def trained(self) -> Mapping[str, TensorPlan]:
        """The parameters without what a whole step keeps beside them as optimizer state."""
        state = {
            n.name for n in self.nodes if n.op == "parameter" and n.keeps and "parameters" not in n.keeps
        }
        return {path: t for path, t in self.parameters.items() if path not in state}

    @property
    def beside(self) -> float | None:
        """The former name of ``overlap``."""
        return self.overlap

    def check_emitted(self) -> None:
        """Raise PaseError for a pipelined plan. It is for callers that need a plan without stages."""
        if self.pipeline is not None:
            raise PaseError(
                f"it is a pipeline ({self.pipeline}), which this function does not support",
                where=f"the plan for '{self.model}'",
                fix="run it with plan.jax or plan.torch, write its list of actions with 'pase emit --to "
                "torch-schedule', or compile with pipeline='none' for a plan without stages",
            )

    def traced_as(self, kind: type[T], arguments: str, instead: str) -> T:
        """Return the model as the frontend of one framework read it.

        Raises PaseError if the plan was loaded without its model, or if another frontend read the model.

        arguments: the arguments that ``plan.bind`` needs.
        instead: the end of the message for another frontend: what is not available, and what to use instead.
        """
        if self.traced is None:
            raise PaseError(
                "it was loaded without its model",
                where=f"the plan for '{self.model}'",
                fix=f"call plan.bind({arguments})",
            )
        if not isinstance(self.traced, kind):
            raise PaseError(f"'{self.model}' was read by the {self.traced.frontend} frontend, so {instead}")
        return self.traced

    @cached_property
    def laid_out(self) -> Mapping[Place, EquationLayouts]:
        """``accesses``, computed from the strategy if the layout was written before that field existed."""
        if self.accesses:
            return self.accesses
        graph = self.split_graph
        configs = {n.name: config_of(n, self.strategy[n.name], self.mesh) for n in graph.nodes}
        return equation_layouts(graph, access_layouts(graph, self.mesh, configs))

    @property
    def split_graph(self) -> Graph:
        """``graph``. Raises PaseError if its nodes are not those of the strategy."""
        other = sorted({n.name for n in self.graph.nodes} ^ set(self.strategy))
        if other:
            raise PaseError(
                f"this is not the model of the plan for '{self.model}': they differ at node '{other[0]}'",
                fix="bind the model that was compiled, or compile this one",
            )
        return self.graph

    @property
    def memory_there(self) -> int:
        """The bytes of a device that the plan may use: the limit, or all of the device's memory without a limit."""
        return self.device_memory if self.memory_limit is None else self.memory_limit

    @property
    def waiting_bytes(self) -> int:
        """Bytes of gradients that wait on a device for later steps under the bucket plan, in addition to ``memory``."""
        figures = {} if self.buckets is None else self.buckets.get("evaluation")
        nbytes = figures.get("waiting_bytes") if isinstance(figures, dict) else None
        return nbytes if isinstance(nbytes, int) else 0

    @property
    def fits(self) -> bool:
        return self.memory.total + self.waiting_bytes <= self.memory_there

    @property
    def too_large(self) -> tuple[str, ...]:
        """Strategies of ``baselines`` that do not fit."""
        return tuple(name for name, nbytes in self.baseline_memory.items() if nbytes > self.memory_there)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the price assumes (trip counts of while loops, branches taken), and reasons to doubt it, as text.

        ``noted`` has their kinds and places.
        """
        return tuple(map(str, self.noted))

    @property
    def sound(self) -> bool:
        """Whether the plan fits and no remark gives a reason to doubt it. ``--strict`` requires this."""
        return self.fits and not any(r.doubtful for r in self.noted)

    @property
    def objective(self) -> str:
        """What ``cost`` and ``bound`` measure, in words. The plan is proven cheapest only by this measure."""
        if self.pipeline is not None:
            hides = "not " if self.overlap is None else ""
            return f"the schedule's simulated step, collectives of parameters {hides}hidden behind compute"
        if self.overlap is not None or self.hidden:
            return "collectives of parameters hidden behind compute"
        return "nothing hidden behind compute"

    @property
    def compute(self) -> float:
        return sum(n.cost.compute + n.cost.update for n in self.nodes)

    @property
    def communication(self) -> float:
        return sum(n.cost.communication for n in self.nodes)

    @property
    def exposed(self) -> float:
        """Communication that compute does not hide."""
        return max(self.communication - self.hidden, 0.0)

    @property
    def hidden(self) -> float:
        """The part of ``communication`` that overlaps with compute, minus the slowdown of compute, if the plan was made
        with that overlap.
        """
        if self.pipeline is not None:
            return self.pipeline.hidden_s
        beside = self.compute + self.communication - self.cost
        return beside if beside > _ROUNDING * self.cost else 0.0

    @property
    def throughput(self) -> Throughput | None:
        """MFU, and FLOP/s, tokens and examples per second and device. None if costs are not in seconds."""
        if self.work is None or self.unit != "s" or not self.cost:
            return None
        return self.work.at(self.cost, self.devices)

    @property
    def peak(self) -> tuple[str, float] | None:
        """What MFU refers to: the dtype of most products, and a device's peak in FLOP/s for the products as they are.

        None if nothing is multiplied, or costs are not in seconds.
        """
        flops: dict[str, float] = {}
        for n in self.nodes:
            for w in n.work:
                if w.kind in PRODUCTS:
                    flops[w.dtype] = flops.get(w.dtype, 0.0) + w.flops * w.times
        if self.work is None or self.unit != "s" or not flops or not self.work.at_peak_s:
            return None
        return max(flops, key=lambda dtype: flops[dtype]), self.work.flops / self.work.at_peak_s

    def with_model(self, traced: Traced) -> Self:
        """Return the plan with its model's trace attached. Raises PaseError if it is not the model of the plan."""
        if self.graph_digest not in (digest(traced.graph), _digest_with_remarks(traced.graph)):
            raise PaseError(
                f"this is not the model that the plan for '{self.model}' was made for: its traced graph differs "
                f"(another size, dtype, or version of the code)",
                fix="compile it again",
            )
        return replace(self, traced=traced)


def _digest_with_remarks(graph: Graph) -> str:
    """Return the graph's digest as it was computed when remarks were part of it, for layouts written then."""
    return digest(graph, remarks=True)
