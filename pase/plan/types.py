"""The Plan: a strategy with all that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.ir.blocks import Block
from pase.machine import Mesh
from pase.memory.account import Memory
from pase.plan.itemize import Collective, NodeCost

if TYPE_CHECKING:
    from pase.backends.to_jax import JaxPlan
    from pase.frontends.registry import Traced
    from pase.replay.types import Timeline
    from pase.schedule.plan import BucketPlan
    from pase.schedule.registry import Options
    from pase.schedule.types import Problem

__all__ = ["NodePlan", "Plan", "TensorPlan", "Tried"]

Placement = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node of the graph and how it is split.

    split: iteration dim -> mesh axes, major to minor. cost: in the cost model's unit.
    """

    name: str
    op: str
    einsum: str
    sizes: Mapping[str, int]
    split: Mapping[str, tuple[str, ...]]
    times: int
    source: str
    cost: NodeCost


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """A parameter or a batch input: shape, dtype and storage, per tensor dim the mesh axes that split it.

    used_as: the layouts in which it is used, where they differ from the storage. state: the layout of its gradient
    and optimizer state, where they are split further than the parameter (ZeRO-2); None: as it is stored.
    """

    shape: tuple[int, ...]
    dtype: str
    storage: Placement
    used_as: tuple[Placement, ...] = ()
    state: Placement | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A mesh that was searched, and the best cost on it."""

    mesh: tuple[int, ...]
    cost: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``pase.compile`` returns and ``layout.json`` holds. Costs are in ``unit``: predicted, not measured."""

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
    define: Mapping[str, tuple[Placement, ...]]
    read: Mapping[str, tuple[Placement, ...]]
    gradient: Mapping[str, Placement]
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
    """Micro-batches of a step, over which gradients are summed."""
    remat: tuple[Block, ...] = ()
    """Blocks of equations that backward computes again, besides those that the model itself rematerialises."""
    buckets: Mapping[str, Any] | None = field(default=None, repr=False)
    """A bucket plan as layout.json holds it, with the links that it was made for; None: none was chosen."""
    traced: Traced | None = field(default=None, repr=False, compare=False)

    @cached_property
    def strategy(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """Node name -> iteration dim -> mesh axes."""
        return {n.name: n.split for n in self.nodes}

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device_memory

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the price takes for granted: turns of while loops, branches taken."""
        return tuple(self.provenance.get("remarks", "").splitlines())

    @property
    def compute(self) -> float:
        return sum(n.cost.compute + n.cost.update for n in self.nodes)

    @property
    def communication(self) -> float:
        return sum(n.cost.communication for n in self.nodes)

    @property
    def hidden(self) -> float:
        """What of ``communication`` runs behind backward's compute, where the plan was made with that overlap."""
        return max(0.0, self.compute + self.communication - self.cost)

    def __str__(self) -> str:
        from pase.plan.table import as_text

        return as_text(self)

    def save(self, path: str | Path) -> None:
        """Write layout.json, whole or not at all."""
        from pase.plan.layout import save

        save(self, path)

    def diff(self, other: Plan) -> list[str]:
        """What differs, one line each; empty where both lay everything out alike."""
        from pase.plan.layout import diff

        return diff(self, other)

    def bind(self, fn: Callable[..., Any], params: Any, *batch: Any) -> Plan:
        """Give a loaded plan its model again, traced anew; PaseError where it is not the model of the plan."""
        from pase.frontends.from_jax import trace

        return self.with_model(trace(fn, params, *batch, name=self.model))

    def with_model(self, traced: Traced) -> Plan:
        from pase.ir import digest

        if digest(traced.graph) != self.graph_digest:
            raise PaseError(
                f"this is not the model that the plan for '{self.model}' was made for: its traced graph differs "
                f"(another size, dtype, or version of the code); compile it again"
            )
        return replace(self, traced=traced)

    @cached_property
    def bucket_plan(self) -> BucketPlan | None:
        """Which of a step's collectives travel together, in which order, on which link; None where nothing moves.

        The one that ``scheduled`` chose or the layout holds, else ours with plain updates.
        """
        return None if self._schedule is None else self._schedule[1]

    @cached_property
    def bucket_problem(self) -> Problem | None:
        """What ``bucket_plan`` solves: the step's blocks of compute, its tensors to send, and its links."""
        return None if self._schedule is None else self._schedule[0]

    @cached_property
    def timeline(self) -> Timeline | None:
        """The predicted step under the bucket plan, as `pase replay` reads it; None where nothing moves."""
        from pase.plan.buckets import timeline_of

        return None if self._schedule is None else timeline_of(*self._schedule)

    @cached_property
    def _schedule(self) -> tuple[Problem, BucketPlan] | None:
        from pase.plan.buckets import schedule_of

        return schedule_of(self)

    def scheduled(self, policy: str = "ours", options: Options | None = None) -> Plan:
        """This plan with the policy's bucket plan in it, for ``save`` and ``bucket_plan``; as it is where nothing
        moves. ``options`` allow delayed updates, and more: `pase.schedule.Options`.
        """
        from pase.plan.buckets import with_buckets

        return with_buckets(self, policy=policy, options=options)

    @cached_property
    def jax(self) -> JaxPlan:
        """Shardings, the constrained loss and a train step in JAX. A loaded plan of a zoo model finds its model by
        itself; others need ``plan.bind(fn, params, batch)`` first."""
        from pase.backends.to_jax import JaxPlan
        from pase.frontends import from_jax
        from pase.plan.constraints import Constraints

        if self.traced is None and self.model.startswith("zoo:"):
            from pase.compiler.resolve import resolve

            return self.with_model(resolve(self.model)).jax
        if self.traced is None:
            raise PaseError(
                f"the plan for '{self.model}' was loaded without its model: call plan.bind(loss_fn, params, batch)"
            )
        traced = self.traced
        if not isinstance(traced, from_jax.Traced):
            raise PaseError(
                f"'{self.model}' was read by the {traced.frontend} frontend, so there is no JAX program of it to "
                f"constrain: 'pase emit' writes the plan for other frameworks"
            )
        names = {t.path: t.name for t in traced.graph.tensors.values() if t.role in ("parameter", "input")}
        stored = {names[p]: t.storage for p, t in (*self.parameters.items(), *self.inputs.items())}
        state = {names[p]: t.state for p, t in self.parameters.items() if t.state is not None}
        from pase.frontends.jax_blocks import micro

        return JaxPlan(
            traced=micro(traced, self.accumulate),
            accumulate=self.accumulate,
            blocks=self.remat,
            logical_mesh=self.mesh,
            constraints=Constraints(
                storage=stored, state=state, define=self.define, read=self.read, gradient=self.gradient
            ),
        )
