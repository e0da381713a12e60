"""A pipelined plan in JAX: each stage runs on its rank's devices, in the order of the schedule's list of actions.

One process controls all devices. It calls the stages' programs in the order of the schedule. Calls return immediately,
and devices work through their queues. Transfers are copies between the ranks' meshes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pase.backends.jax.one_program import OneProgramPlan
from pase.backends.jax.pipeline.arrays import StackCut, is_cut, merged, registered
from pase.backends.jax.pipeline.check import StagedGradient, check_stages
from pase.backends.jax.pipeline.circular import JaxCircular, circular_of
from pase.backends.jax.pipeline.local_stage import check_lowering
from pase.backends.jax.pipeline.optimizer import StagedOptimizer
from pase.backends.jax.pipeline.placement import StagePlacement
from pase.backends.jax.pipeline.run import RunningStages
from pase.backends.jax.pipeline.stages import Stage, stages_of
from pase.backends.jax.plan import Against, JaxPlan
from pase.backends.jax.spmd.lower import Lowering
from pase.backends.jax.steps.stepper import host_arrays
from pase.errors import PaseError
from pase.frontends.jax.blocks import blocks_of
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.leaves import arrays, trained, untrained
from pase.ir import named, simplify
from pase.ir.blocks import Block, accumulated, rematerialised
from pase.ir.cut_points import UnitChain, chain_of
from pase.machine import Mesh
from pase.machine.jax_devices import as_linked
from pase.pipeline.types import Schedule
from pase.plan.accesses import access_layouts
from pase.plan.constraints import constraints
from pase.plan.gradient_lines import CheckLines
from pase.plan.pipeline import PipelinePlan
from pase.pytree import Tree
from pase.tables.itemize import config_of

if TYPE_CHECKING:
    from jax import Array
    from jax import Device as JaxDevice
    from jax.sharding import Mesh as JaxMesh
    from optax import GradientTransformation

    from pase.frontends.jax.frontend import TracedJax
    from pase.plan.gradient_check import GradientCheck

__all__ = ["JaxPipeline", "MicroBatchShare", "StagedStep", "one_program_of", "pipeline_of"]


class MicroBatchShare(NamedTuple):
    """Consecutive micro-batches of a step: the number of the first one, and how many the whole step has."""

    first: int
    of: int


@dataclass(frozen=True, kw_only=True)
class JaxPipeline(JaxPlan["JaxMesh", "StagedStep"]):
    """A plan in JAX that runs in stages.

    Parameters keep the pytree of the model. Each is stored on the ranks that read it. If a stack of layers belongs to
    several stages, its leaf is a ``StackCut``.
    """

    pipeline: PipelinePlan
    splits: tuple[OneProgramPlan, ...]
    """The model on one micro-batch under each of the pipeline's strategies, on the mesh of one rank."""
    share: MicroBatchShare | None = None
    """Which of the step's micro-batches it runs; None for all of them."""
    _made: dict[JaxMesh, RunningStages] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        import jax

        registered(StackCut)
        if jax.process_count() > 1:
            raise PaseError(
                f"stages need one process that sees all devices, but there are {jax.process_count()} processes",
                fix="use one process, or compile with pipeline='none'",
            )

    @property
    def traced(self) -> TracedJax:
        return self.splits[0].traced

    @property
    def micro_batches(self) -> MicroBatchShare:
        """Which of the step's micro-batches it runs."""
        return self.share or MicroBatchShare(first=0, of=self.pipeline.micro_batches)

    @cached_property
    def schedule(self) -> Schedule:
        return self.pipeline.actions()

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        recomputed = [b for s in self.splits for b in s.blocks]
        return stages_of(self.traced, self.splits[0].leaf_names(), self.pipeline.cuts, recomputed, self.chain)

    @cached_property
    def chain(self) -> UnitChain | None:
        """The chain of units between which the model is cut, or None if it is cut between equal blocks."""
        if not self.pipeline.cut_points:
            return None
        found = chain_of(simplify(self.traced.graph), blocks_of(self.traced))
        if found.units != sum(self.pipeline.cuts):
            raise PaseError(
                f"the plan has cuts for a model of {sum(self.pipeline.cuts)} units, but this model has {found.units}",
                where=f"'{self.traced.graph.name}'",
                fix="compile it again",
            )
        return found

    def mesh(self, devices: Sequence[JaxDevice] | None = None) -> JaxMesh:
        import jax
        import numpy as np

        inner = self.splits[0].logical_mesh
        many = self.pipeline.degree * inner.devices
        found = jax.devices() if devices is None else devices
        if len(found) < many:
            raise PaseError(
                f"the plan is for {many} devices, but JAX sees {len(found)}",
                fix=f"on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={many} before JAX starts, or "
                "compile for fewer devices",
            )
        grid = np.array(as_linked(found)[:many], dtype=object).reshape(self.pipeline.degree, *inner.sizes)
        return jax.sharding.Mesh(grid, ("stage", *inner.names))

    @without_mesh()
    def device_put(self, params: Tree, *batch: Tree, mesh: JaxMesh | None = None) -> tuple[Tree, ...]:
        import jax

        def mine(
            x: Tree,
        ) -> (
            Tree
        ):  # the step donates its arguments, so none of them may share memory with the caller's arrays
            return jax.numpy.array(x, copy=True) if isinstance(x, jax.Array) else x

        placed = self.on(mesh).placement.placed(jax.tree.map(mine, arrays((params, *batch))))
        return tuple(merged(x, kept) for x, kept in zip(placed, self.traced.kept, strict=False))

    def gathered(self, tree: Tree) -> Tree:
        import jax
        import numpy as np

        def whole(x: Array | StackCut) -> Tree:
            return np.concatenate(host_arrays(x.parts)) if is_cut(x) else host_arrays(x)

        return jax.tree.map(whole, tree, is_leaf=is_cut)

    @without_mesh()
    def init(self, optimizer: GradientTransformation, params: Tree, mesh: JaxMesh | None = None) -> Tree:
        return StagedOptimizer(placement=self.on(mesh).placement, optimizer=optimizer).init(params)

    def loss(self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        check_lowering(lowering)
        return self.on(mesh).loss

    def value_and_grad(
        self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., tuple[Tree, Tree]]:
        check_lowering(lowering)
        return self.on(mesh).value_and_grad

    def checked_along(
        self,
        lines: CheckLines,
        given: tuple[Tree, ...],
        mesh: JaxMesh | None,
        lowering: Lowering,
        against: Against,
    ) -> GradientCheck:
        check_lowering(lowering)
        running = self.on(mesh)
        placement = running.placement
        params, *batch = given
        step = StagedGradient(
            graded=running.value_and_grad,
            params=params,
            batch=tuple(batch),
            placed=tuple(placement.placed(arrays(given))),
            devices=placement.grid.size,
            micro_batches=self.pipeline.micro_batches,
        )
        return check_stages(placement, step, against, lines)

    def plain_step(
        self, optimizer: GradientTransformation, mesh: JaxMesh | None, donate: bool, lowering: Lowering
    ) -> StagedStep:
        check_lowering(lowering)
        running = self.on(mesh)
        return StagedStep(
            running=running,
            optimizer=StagedOptimizer(placement=running.placement, optimizer=optimizer),
            donate=donate,
        )

    @without_mesh()
    def on(self, mesh: JaxMesh | None) -> RunningStages:
        """The stages on a mesh that ``mesh`` returned. They are compiled once per mesh."""
        made = self.mesh() if mesh is None else mesh
        if made not in self._made:
            placement = StagePlacement(plan=self, grid=made.devices)
            if placement.copied:
                some = ", ".join(placement.copied[:3]) + (", …" if len(placement.copied) > 3 else "")
                warnings.warn(
                    f"several stages read {some}: each of their ranks holds a whole copy. If these are layers, write "
                    f"them as a loop (scan), or make each layer a leaf of its own",
                    stacklevel=3,
                )
            self._made[made] = RunningStages(placement=placement)
        return self._made[made]


@dataclass(frozen=True, kw_only=True)
class StagedStep:
    """A train step in stages. ``JaxPlan.train_step`` describes its arguments and results."""

    running: RunningStages
    optimizer: StagedOptimizer
    donate: bool

    @without_mesh()
    def __call__(self, params: Tree, opt_state: Tree, *batch: Tree) -> tuple[Tree, Tree, Tree]:
        mine, *given = self.placed(params, *batch)
        value, grads = self.running.value_and_grad(mine, *given)
        return *self.updated(mine, opt_state, grads, value), value

    def placed(self, params: Tree, *batch: Tree) -> list[Tree]:
        """The arrays of (params, *batch) where the plan stores them."""
        return self.running.placement.placed(arrays((params, *batch)))

    def updated(self, params: Tree, opt_state: Tree, grads: Tree, value: Tree) -> tuple[Tree, Tree]:
        """(parameters, state) after the update. params: where the plan stores them. value: what the step returns."""
        import jax

        state, loss = self.optimizer.placed(opt_state), jax.tree.leaves(arrays(value))[0]
        updated, state = self.optimizer.updated(grads, state, trained(params), loss, self.donate)
        return merged(updated, untrained(params), self.running.placement.plan.traced.kept[0]), state


def pipeline_of(
    traced: TracedJax,
    whole: TracedJax | None,
    pipeline: PipelinePlan,
    logical_mesh: Mesh,
    remat: tuple[Block, ...],
    share: MicroBatchShare | None = None,
) -> JaxPipeline:
    """A pipelined plan in JAX whose stages are separate programs.

    traced: the model on one micro-batch. whole: on the whole batch; None if the step takes the mean of the
    micro-batches' losses. logical_mesh: the mesh of one rank. remat: the blocks to recompute for stages
    for which the pipeline does not specify any. share: as in ``JaxPipeline``.
    """
    many = range(len(pipeline.strategies))
    splits = tuple(_split(traced, whole, pipeline, logical_mesh, remat, i) for i in many)
    return JaxPipeline(pipeline=pipeline, splits=splits, share=share)


def one_program_of(
    traced: TracedJax,
    whole: TracedJax,
    pipeline: PipelinePlan,
    logical_mesh: Mesh,
    remat: tuple[Block, ...],
) -> JaxCircular:
    """Like ``pipeline_of``, for a schedule that runs as one program."""
    number = pipeline.stages[0].strategy
    return circular_of(_split(traced, whole, pipeline, logical_mesh, remat, number), pipeline)


def _split(
    traced: TracedJax,
    whole: TracedJax | None,
    pipeline: PipelinePlan,
    logical_mesh: Mesh,
    remat: tuple[Block, ...],
    i: int,
) -> OneProgramPlan:
    """The model on one rank's mesh under strategy ``i`` of the pipeline."""
    if traced.mode != "train":
        raise PaseError(
            "stages can only run a loss and its gradients",
            where=f"mode='{traced.mode}'",
            fix="compile a loss function with mode='train', or compile with pipeline='none'",
        )
    if traced.carried:
        raise PaseError(
            "stages cannot pass values on to the next step yet",
            where="carry",
            fix="compile with pipeline='none'",
        )
    strategy, blocks = pipeline.strategies[i], pipeline.recomputed_blocks(i, remat)
    m = pipeline.micro_batches
    graph = accumulated(named(simplify(rematerialised(traced.graph, blocks))), m)
    configs = {n.name: config_of(n, strategy[n.name], logical_mesh) for n in graph.nodes}
    layouts = access_layouts(graph, logical_mesh, configs)
    return OneProgramPlan(
        traced=traced,
        whole=whole,
        accumulate=m,
        hoisted="all",
        blocks=blocks,
        strategy=strategy,
        logical_mesh=logical_mesh,
        constraints=constraints(graph, logical_mesh, layouts),
    )
