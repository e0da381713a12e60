"""The circular schedule: a pipelined plan in JAX as one program with a scan, each iteration of which runs all stages.

The stages are stacked along a mesh axis of their own, ``stage``. In an iteration, each rank runs its stage on the
micro-batch that it has (``vmap`` over the stacked stages). Then activations move on by one rank (a roll of the stack,
which XLA turns into a permutation). The parts of the model before and after the layers run before and after the scan,
with the micro-batches spread over the ranks. ``jax.grad`` differentiates the whole program. (praxis,
layers/pipeline.py, LayerwiseShardablePipelined.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from pase.backends.jax.gspmd import JaxprWalk
from pase.backends.jax.ops.draws import Examples
from pase.backends.jax.pipeline.stages import Stage, StageWeight, stages_of
from pase.backends.jax.pipeline.unreduced import UnreducedGroups, first_examples, unreduced_groups
from pase.backends.jax.plan import JaxPlan
from pase.backends.jax.spmd.lower import Lowering
from pase.backends.jax.steps.micro_batches import micro_batch_stack, stacked_outs
from pase.errors import PaseError
from pase.frontends.jax.blocks import loop_line, loops_of, split_inputs, why_no_program
from pase.frontends.jax.contexts import in_any_context
from pase.machine import Mesh
from pase.plan.constraints import Placement
from pase.plan.pipeline import PipelinePlan
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec


__all__ = ["JaxCircular", "circular_of"]

STAGE = "stage"
"""The mesh axis of the ranks."""


@dataclass(frozen=True, kw_only=True)
class JaxCircular(JaxPlan):
    """A plan with the circular schedule, as returned by ``plan.jax``.

    Parameters keep the pytree of the model. Stacks of layers are split over the ranks; all other parameters are
    replicated over the ranks. split: the model on the mesh of one rank.
    """

    pipeline: PipelinePlan
    split: JaxPlan

    def loss(self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        """loss(params, *batch) -> the mean over the micro-batches, or (the mean, aux)."""
        _refuse_manual(lowering)
        self._functions.append("loss")
        return in_any_context(_CircularLoss(plan=self, mesh=self.mesh() if mesh is None else mesh))

    def value_and_grad(
        self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., Tree]:
        """f(params, *batch) -> (loss, grads), or ((loss, aux), grads).

        The gradients have the layouts of ``gradient_shardings``.
        """
        _refuse_manual(lowering)
        self._functions.append("value_and_grad")
        mesh = self.mesh() if mesh is None else mesh
        return in_any_context(self.graded(_CircularLoss(plan=self, mesh=mesh), mesh))

    def _lowerings(self, lowering: Lowering, mesh: JaxMesh) -> tuple[Lowering, ...]:
        _refuse_manual(lowering)
        return ("annotated",)

    def gathered(self, tree: Tree) -> Tree:
        """A tree of parameters, gradients or an optimizer's state on the host, like ``JaxPipeline.gathered``."""
        import jax
        import numpy as np

        return jax.tree.map(np.asarray, tree)

    @cached_property
    def unreduced_groups(self) -> UnreducedGroups | None:
        """The groups of devices that keep unreduced gradients until the end of the step.

        None if gradients are reduced in each iteration.
        """
        return unreduced_groups(self.pipeline, self.split)

    @cached_property
    def stages(self) -> tuple[Stage, Stage, Stage]:
        """(the part before the layers, the layers of one rank, the part after them).

        They are those of one unreduced group, if there are such groups.
        """
        return _stages_of(
            self.split if self.unreduced_groups is None else self.unreduced_groups.split, self.pipeline
        )


def circular_of(split: JaxPlan, pipeline: PipelinePlan) -> JaxCircular:
    """A plan with the circular schedule in JAX.

    split: the model on one micro-batch and one rank's mesh. Raises PaseError if the plan cannot run as one program.
    """
    p, traced = pipeline, split.traced
    if p.chunks > 1 or p.micro_batches % p.degree:
        raise PaseError(
            f"it needs one stage on each rank and a multiple of {p.degree} micro-batches, but the plan has {p.chunks} "
            f"stages on each rank and {p.micro_batches} micro-batches",
            where="the circular schedule",
            fix="change the number of micro-batches, or choose another schedule",
        )
    if len(set(p.cuts)) > 1 or len({s.strategy for s in p.stages}) > 1:
        raise PaseError(
            f"it runs the program of one stage on all ranks, but the stages have {p.cuts} blocks and "
            f"{len({s.strategy for s in p.stages})} different strategies",
            where="the circular schedule",
            fix="choose another schedule",
        )
    leaf, inner, c = split.leaf_names(), split.logical_mesh, split.constraints
    stacks = {leaf[w.leaf] for w in _stages_of(split, p)[1].weights if w.rows is not None}

    def over_ranks(name: str, where: Placement) -> Placement:
        return ((STAGE,), *where[1:]) if name in stacks else where

    stored = {name: over_ranks(name, c.storage.get(name, ())) for name in {*c.storage, *stacks}}
    return JaxCircular(
        traced=traced,
        logical_mesh=Mesh(names=(STAGE, *inner.names), sizes=(p.degree, *inner.sizes)),
        constraints=replace(
            c, storage=stored, state={name: over_ranks(name, where) for name, where in c.state.items()}
        ),
        accumulate=p.micro_batches,
        blocks=split.blocks,
        pipeline=p,
        split=split,
    )


def _refuse_manual(lowering: str) -> None:
    """Raise PaseError if the manual lowering is asked for."""
    if lowering == "manual":
        raise PaseError(
            "the circular schedule does not support the manual lowering yet",
            where=f"lowering='{lowering}'",
            fix="leave out lowering=",
        )


def _stages_of(split: JaxPlan, p: PipelinePlan) -> tuple[Stage, Stage, Stage]:
    """(the part before the layers, the layers of one rank, the part after them).

    Raises PaseError if the program has no equal stages between its ends.
    """
    traced = split.traced
    loops = loops_of(traced, sum(p.cuts))
    if p.cut_points or len(loops) != 1:
        raise PaseError(
            f"it cannot be run as one program: the circular schedule needs one loop over its layers (scan), but it has "
            f"{len(loops)} loops with {sum(p.cuts)} iterations",
            where=f"'{traced.graph.name}'",
            fix="write the layers as one loop, or choose another schedule",
        )
    first, *layers, last = stages_of(traced, split.leaf_names(), (0, *p.cuts, 0), split.blocks)
    stacked = [(w.leaf, w.rows is None) for w in layers[0].weights]
    if len({s.alike for s in layers}) > 1 or any(
        w.rows is not None and w.rows[0] != k * n
        for k, (s, n) in enumerate(zip(layers, p.cuts, strict=True))
        for w in s.weights
    ):
        why = (
            why_no_program(traced, sum(p.cuts))
            or "is not the same program in all stages, which read other values"
        )
        raise PaseError(
            f"it cannot be run as one program: the loop over its layers at {loop_line(traced, sum(p.cuts))} {why}",
            where=f"'{traced.graph.name}'",
            fix="choose another schedule than circular",
        )
    assert all([(w.leaf, w.rows is None) for w in s.weights] == stacked for s in layers)
    return first, layers[0], last


@dataclass(frozen=True, kw_only=True, eq=False)
class _CircularLoss:
    """loss(params, *batch) on a mesh.

    Values of stages have the leading dims [ranks, groups], or [ranks] if there are no unreduced groups.
    """

    plan: JaxCircular
    mesh: JaxMesh

    def __call__(self, *args: Tree) -> Tree:
        import jax
        import jax.numpy as jnp

        plan, m, p = self.plan, self.plan.accumulate, self.plan.pipeline.degree
        leaves = plan.checked(args, full=True)
        n = len(plan.traced.param_paths)
        batch = [self._micro_batches(i, x) for i, x in enumerate(leaves[n:])]
        split = plan.split if plan.unreduced_groups is None else plan.unreduced_groups.split
        firsts = jax.vmap(partial(first_examples, split.traced, m, plan.unreduced_groups))(jnp.arange(m))
        before, layers, after = plan.stages

        def each(stage: Stage, xs: Sequence[Array]) -> list[Array]:
            """Run one end of the model on all micro-batches, one per rank at a time."""
            weights, run = self._weights(stage, leaves), self._mapped(stage)
            groups = [self._constrained(x.reshape(m // p, p, *x.shape[1:]), 1) for x in xs]
            mine = [
                self._constrained(x.reshape(m // p, p, *x.shape[1:]), 1)
                for x in (*(batch[i] for i in stage.batch), *firsts)
            ]
            _, outs = jax.lax.scan(lambda _, x: (None, run(weights, x[0], x[1])), None, (mine, groups))
            return [y.reshape(m, *y.shape[2:]) for y in outs]

        entered = each(before, [])
        weights, run, iterations = self._weights(layers, leaves), self._mapped(layers), m + p - 1
        rank = jnp.arange(p)
        # Idle ranks work on real activations. On zeros, a norm's derivative may be infinite, and 0 · inf is NaN.
        fed = [x[jnp.minimum(jnp.arange(iterations), m - 1)] for x in entered]
        fed = [
            self._constrained(jnp.pad(x[:, None], [(0, 0), (0, p - 1)] + [(0, 0)] * (x.ndim - 1)), 1)
            for x in fed
        ]
        begin = [self._constrained(jnp.broadcast_to(x[0], (p, *x.shape[1:])), 0) for x in entered]

        def iteration(held: list[Array], given: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
            t, new = given
            x = [
                jnp.where((rank == 0).reshape(p, *[1] * (a.ndim - 1)), b, a)
                for a, b in zip(held, new, strict=True)
            ]
            at = jnp.clip(t - rank, 0, m - 1)
            mine = [
                self._constrained(jnp.take(x, at, axis=0), 0)
                for x in (*(batch[i] for i in layers.batch), *firsts)
            ]
            made = run(weights, mine, x)
            return [self._constrained(jnp.roll(y, 1, axis=0), 0) for y in made], made

        _, made = jax.lax.scan(iteration, begin, (jnp.arange(iterations), fed))
        outs = each(after, [y[p - 1 :, p - 1] for y in made])
        loss, rest = jnp.mean(outs[0]), outs[1:]
        return stacked_outs(plan, [loss, *rest], []) if plan.traced.has_aux else loss

    def _mapped(self, stage: Stage) -> Callable[..., list[Array]]:
        """The stage mapped over all ranks, and over the unreduced groups."""
        import jax

        plan, groups = self.plan, self.plan.unreduced_groups
        walk = JaxprWalk(plan=plan.split if groups is None else groups.split, mesh=self.mesh)

        def run(weights: list[Array], batch: list[Array], entered: list[Array]) -> list[Array]:
            mine = walk
            if walk.plan.traced.drawn:
                *batch, first = batch
                mine = replace(walk, examples=Examples(first=first, step=plan.accumulate))
            given = zip(stage.given, (*weights, *batch, *entered), strict=True)
            return stage.run(mine, [mine.defined(x, stage.names.get(key)) for key, x in given], {})

        if groups is not None:
            run = jax.vmap(run, spmd_axis_name=groups.axes)
        mapped: Callable[..., list[Array]] = jax.vmap(run, spmd_axis_name=STAGE)
        return mapped

    def _weights(self, stage: Stage, leaves: Sequence[Array]) -> list[Array]:
        """A stage's weights with a part or a copy for each rank and unreduced group.

        With these copies, gradients are reduced once after the scan and not in each iteration.
        """
        return [self._copied(leaves[w.leaf], w) for w in stage.weights]

    def _copied(self, x: Array, w: StageWeight) -> Array:
        import jax.numpy as jnp

        p = self.plan.pipeline.degree
        if w.rows is None:
            x = jnp.broadcast_to(x, (p, *x.shape))
        else:
            x = x.reshape(p, x.shape[0] // p, *x.shape[1:])
        spec = tuple(self._spec(w.leaf))
        if self.plan.unreduced_groups is not None:
            x = jnp.broadcast_to(x[:, None], (p, self.plan.unreduced_groups.many, *x.shape[1:]))
        return self._constrained(x, 0, spec if w.rows is None else (None, *spec[1:]))

    def _spec(self, leaf: int) -> PartitionSpec:
        """A parameter's layout on one rank, without the axes of unreduced groups."""
        plan = self.plan
        split = plan.split if plan.unreduced_groups is None else plan.unreduced_groups.split
        return split.spec(plan.split.constraints.storage.get(split.leaf_names()[leaf], ()))

    def _micro_batches(self, i: int, x: Array) -> Array:
        """A leaf of the batch as [micro-batches, …] or [micro-batches, groups, …].

        A leaf without a batch dim is copied for each micro-batch and group.
        """
        import jax
        import jax.numpy as jnp

        plan, m, groups = self.plan, self.plan.accumulate, self.plan.unreduced_groups
        if not split_inputs(plan.traced)[i]:
            return jnp.broadcast_to(x, (m, *(() if groups is None else (groups.many,)), *x.shape))
        placement = jax.tree.leaves(plan._in_shardings(self.mesh)[1:])[i]
        x = micro_batch_stack(x, m, placement, self.mesh)
        return x if groups is None else x.reshape(m, groups.many, x.shape[1] // groups.many, *x.shape[2:])

    def _constrained(self, x: Array, dim: int, rest: Sequence[object] | None = None) -> Array:
        """The value with dim ``dim`` split over the ranks and the next one over the unreduced groups, if there are any.

        rest: the layout of the dims after them, or None to leave it to XLA.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        groups = () if self.plan.unreduced_groups is None else (self.plan.unreduced_groups.axes,)
        free = PartitionSpec.UNCONSTRAINED
        many = x.ndim - dim - 1 - len(groups)
        tail = [free] * many if rest is None else [*rest, *[None] * (many - len(rest))]
        spec = PartitionSpec(*[None] * dim, STAGE, *groups, *tail)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
