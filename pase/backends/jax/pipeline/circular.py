"""The circular schedule: a pipelined plan in JAX as one program with a scan, each iteration of which runs all stages.

The program is one ``shard_map`` over the ranks, which are a mesh axis of their own, ``stage``, and the mesh of a rank.
In an iteration, each rank runs its stage's local program on the micro-batch that it has. Then activations move on by
one rank. The parts of the model before and after the layers run before and after the scan, on each rank's share of the
micro-batches. JAX differentiates the whole program on a device. (praxis, layers/pipeline.py,
LayerwiseShardablePipelined.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from pase.backends.jax.one_program import OneProgramPlan
from pase.backends.jax.pipeline.local_stage import LocalStage, check_lowering, refusals, stage_gathers
from pase.backends.jax.pipeline.stages import Stage, stages_of
from pase.backends.jax.spmd.collectives import there_and_back
from pase.backends.jax.spmd.lower import Lowering, Manual, not_differentiable
from pase.backends.jax.spmd.values import Arrivals, DeviceValue, NotManual
from pase.backends.jax.steps.hoisted import StepGathers
from pase.backends.jax.steps.micro_batches import stacked_outs
from pase.errors import PaseError
from pase.frontends.jax.blocks import loop_line, loops_of, why_no_program
from pase.frontends.jax.contexts import in_any_context
from pase.ir.batch_sums import BatchSums
from pase.machine import Mesh
from pase.plan.pipeline import PipelinePlan
from pase.pytree import Tree
from pase.tables.axis_layout import Placement

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec


__all__ = ["JaxCircular", "circular_of"]

STAGE = "stage"
"""The mesh axis of the ranks."""


@dataclass(frozen=True, kw_only=True)
class JaxCircular(OneProgramPlan):
    """A plan in JAX that runs as one program in which each rank has its stage.

    Parameters keep the pytree of the model. Stacks of layers are split over the ranks; all other parameters are
    replicated over the ranks. split: the model on the mesh of one rank.
    """

    pipeline: PipelinePlan
    split: OneProgramPlan

    @property
    def sums(self) -> BatchSums:
        return self.split.sums

    def loss(self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        return self._lowered("loss", mesh, lowering)

    def value_and_grad(
        self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., Tree]:
        return self._lowered("value_and_grad", mesh, lowering)

    def _lowered(self, what: str, mesh: JaxMesh | None, lowering: Lowering) -> Callable[..., Tree]:
        check_lowering(lowering)
        self._functions.append(what)
        run = _Circular(plan=self, mesh=self.mesh() if mesh is None else mesh)
        return in_any_context(run.loss() if what == "loss" else run.value_and_grad())

    def _lowerings(self, lowering: Lowering, mesh: JaxMesh) -> tuple[Lowering, ...]:
        check_lowering(lowering)
        return ("manual",)

    @cached_property
    def stages(self) -> tuple[Stage, Stage, Stage]:
        """(the part before the layers, the layers of one rank, the part after them)."""
        return _stages_of(self.split, self.pipeline)

    @cached_property
    def stacks(self) -> frozenset[int]:
        """The leaves of which each rank has its own rows."""
        return frozenset(w.leaf for w in self.stages[1].weights if w.rows is not None)


def circular_of(split: OneProgramPlan, pipeline: PipelinePlan) -> JaxCircular:
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


def _stages_of(split: OneProgramPlan, p: PipelinePlan) -> tuple[Stage, Stage, Stage]:
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
class _Circular:
    """The functions of a circular plan on a JAX mesh."""

    plan: JaxCircular
    mesh: JaxMesh

    @cached_property
    def manual(self) -> Manual:
        """The model on one rank, which has its rows of the stacks."""
        return Manual(plan=self.plan.split, mesh=self.mesh, rows=self.plan.stages[1].rows)

    def loss(self) -> Callable[..., Tree]:
        """``JaxCircular.loss``."""

        def local(*leaves: Array) -> Tree:
            return self._results(*self._device(leaves).loss())

        run = not_differentiable(self._mapped(local, self._returns()), "use plan.jax.value_and_grad()")
        return lambda *args: self._value(run(*self.plan.checked(args, full=True)))

    def value_and_grad(self) -> Callable[..., Tree]:
        """``JaxCircular.value_and_grad``."""
        stacks, split = self.plan.stacks, self.plan.split

        def local(*leaves: Array) -> Tree:
            import jax

            value, grads = self._device(leaves).value_and_grad()
            summed = [
                split.of_batch(g if i in stacks else jax.lax.psum(g, STAGE))
                for i, g in zip(self.manual.trained, grads, strict=True)
            ]
            return self._results(*value), summed

        gradients = map(self._over_ranks, self.manual.trained, self.manual.gradient_specs())
        run = self._mapped(local, (self._returns(), list(gradients)))

        def graded(params: Tree, *batch: Tree) -> Tree:
            outs, grads = run(*self.plan.checked((params, *batch), full=True))
            return self._value(outs), self.manual.gradients(grads)

        return graded

    def _device(self, leaves: Sequence[Array]) -> _CircularDevice:
        return _CircularDevice(plan=self.plan, manual=self.manual, leaves=leaves)

    def _results(self, total: Array, rest: Sequence[Array]) -> tuple[Array, list[Array]]:
        """(the loss, other results with dims [micro-batch of the rank, rank, …]). total: the rank's sum of losses."""
        import jax

        return self.plan.split.of_batch(jax.lax.psum(total, STAGE)), [x[:, None] for x in rest]

    def _returns(self) -> tuple[PartitionSpec, list[PartitionSpec]]:
        """PartitionSpecs of ``_results``."""
        from jax.sharding import PartitionSpec

        loss, *rest = self.manual.returns()
        return loss, [PartitionSpec(None, STAGE, *spec) for spec in rest]

    def _value(self, outs: tuple[Array, list[Array]]) -> Tree:
        """The result of the user's function. outs: ``_results`` on the whole mesh."""
        loss, rest = outs
        if not self.plan.traced.has_aux:
            return loss
        return stacked_outs(self.plan, [loss, *(x.reshape(-1, *x.shape[2:]) for x in rest)], [])

    def _mapped(self, fn: Callable[..., Tree], outs: Tree) -> Callable[..., Tree]:
        """``fn`` of the leaves of (params, *batch) on each device. outs: PartitionSpecs of its results."""
        run = self.manual.mapped(fn, outs, among=self._over_ranks)

        def refusing(*leaves: Array) -> Tree:
            with refusals():
                return run(*leaves)

        return refusing

    def _over_ranks(self, leaf: int, spec: PartitionSpec) -> PartitionSpec:
        """The PartitionSpec of a leaf on the whole mesh. spec: on the mesh of a rank."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(STAGE, *spec[1:]) if leaf in self.plan.stacks else spec


@dataclass(frozen=True, kw_only=True, eq=False)
class _CircularDevice:
    """One device of the circular schedule, inside of ``shard_map``. leaves: its parts of (params, *batch)."""

    plan: JaxCircular
    manual: Manual
    leaves: Sequence[Array]

    @property
    def ranks(self) -> int:
        return self.plan.pipeline.degree

    @property
    def micro_batches(self) -> int:
        return self.plan.accumulate

    @property
    def rank(self) -> Array:
        import jax

        return jax.lax.axis_index(STAGE)

    @cached_property
    def stages(self) -> list[LocalStage]:
        """(the part before the layers, the layers of one rank, the part after them)."""
        m = self.micro_batches
        return [
            LocalStage(
                stage=s, manual=self.manual, last=s is self.plan.stages[-1], micro_batches=m, first=0, every=m
            )
            for s in self.plan.stages
        ]

    @cached_property
    def carriers(self) -> dict[int, Array]:
        return self.manual.gradient_carriers(self.leaves)

    @cached_property
    def weights(self) -> dict[int, Array]:
        """Leaf -> the parameter."""
        return dict(enumerate(self.leaves[: len(self.plan.traced.param_paths)]))

    @cached_property
    def gathers(self) -> StepGathers | None:
        """The all-gathers that run once per step; None if weights are gathered in each iteration."""
        if any(s.weights == "each" for s in self.plan.pipeline.stages):
            return None
        return stage_gathers(self.stages, self.weights, self.carriers)

    def loss(self) -> tuple[Array, list[Array]]:
        """(the sum of the rank's losses, the other results of its micro-batches, stacked)."""
        gathers = self.gathers
        arrived = [] if gathers is None else gathers.run(self.weights, self.carriers)
        return self._loss(arrived, self.carriers, [] if gathers is None else gathers.zeros(arrived))

    def value_and_grad(self) -> tuple[tuple[Array, list[Array]], list[Array]]:
        """(``loss``, the sums of the gradients of the trained leaves over the rank's share of the loss)."""
        import jax

        gathers, own = self.gathers, self.carriers
        if gathers is None:
            run = jax.value_and_grad(partial(self._loss, []), has_aux=True)
            (total, rest), grads = run(own, [])
        else:
            arrived, back = jax.vjp(partial(gathers.run, self.weights), own)
            run = jax.value_and_grad(partial(self._loss, arrived), argnums=(0, 1), has_aux=True)
            (total, rest), (grads, sums) = run(own, gathers.zeros(arrived))
            (reduced,) = back(gathers.gradients(arrived, sums))
            grads = {i: g + reduced[i] for i, g in grads.items()}
        return (total, rest), [grads[i] for i in self.manual.trained]

    def _loss(
        self, arrived: Sequence[Array], own: dict[int, Array], sums: Sequence[Array]
    ) -> tuple[Array, list[Array]]:
        """``loss``.

        arrived: the gathered weights. own: the gradient carriers. sums: zeros to which the gradients of the gathered
        weights are added.
        """
        import jax
        import jax.numpy as jnp

        m, p, rank = self.micro_batches, self.ranks, self.rank
        before, layers, after = self.stages
        shares = {stage: stage.shares(partial(self._batch, stage)) for stage in self.stages}
        self.plan.check_found({t for found in shares.values() for t in found})

        def run(stage: LocalStage, micro: Array, entered: Sequence[Array]) -> list[Array]:
            values = list(map(stage.entering, stage.stage.enters, entered))
            arrivals, totals = self._arrivals(arrived, sums), stage.totals(shares[stage])
            batch, examples = self._batch(stage, micro), stage.examples(micro)
            outs = stage.run(self.weights, own, batch, values, examples, arrivals, totals)
            return [_sent(h) for h in outs]

        def each(stage: LocalStage, entered: Sequence[Array]) -> list[Array]:
            """The outputs of one end of the model, stacked over the rank's micro-batches."""
            numbers = jnp.arange(m // p) * p + rank
            _, outs = jax.lax.scan(lambda _, x: (None, run(stage, *x)), None, (numbers, entered))
            return outs

        def iteration(held: list[Array], given: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
            t, new = given
            x = [jnp.where(rank == 0, a, b) for a, b in zip(new, held, strict=True)]
            made = run(layers, jnp.clip(t - rank, 0, m - 1), x)
            return list(map(self._to_next, made)), made

        # Idle ranks work on real activations. On zeros, a norm's derivative may be infinite, and 0 · inf is NaN.
        entered = each(before, [])
        begin = [jax.lax.stop_gradient(x[0]) for x in entered]
        fed = [self._longer(self._to_first(x)) for x in entered]
        _, made = jax.lax.scan(iteration, begin, (jnp.arange(m + p - 1), fed))
        losses, *rest = each(after, [self._from_last(y[p - 1 :]) for y in made])
        return losses.sum(), rest

    def _batch(self, stage: LocalStage, micro: Array) -> list[Array]:
        """The leaves of a micro-batch that a stage reads."""
        n = len(self.plan.traced.param_paths)
        return stage.micro_batch([self.leaves[n + i] for i in stage.stage.batch], micro)

    def _arrivals(self, arrived: Sequence[Array], sums: Sequence[Array]) -> Arrivals | None:
        """What a stage receives, with gradients that are added in the dtypes of ``sums``."""
        if self.gathers is None:
            return None

        def of(x: Array, onto: Array) -> Array:
            return there_and_back(x, onto, lambda x: x, lambda g: g.astype(onto.dtype))

        mine = list(map(of, self.gathers.smooth(arrived), sums))
        return self.gathers.arrivals(self.gathers.whole(arrived, mine))

    def _to_next(self, x: Array) -> Array:
        """What the rank before this one has."""
        import jax

        return jax.lax.ppermute(x, STAGE, [(r, r + 1) for r in range(self.ranks - 1)])

    def _to_first(self, x: Array) -> Array:
        """On the first rank, the values of all micro-batches. x: those of this rank's, stacked."""
        import jax
        import jax.numpy as jnp

        parts = [x, *(jax.lax.ppermute(x, STAGE, [(r, 0)]) for r in range(1, self.ranks))]
        return jnp.stack(parts, 1).reshape(-1, *x.shape[1:])

    def _from_last(self, x: Array) -> Array:
        """The values of this rank's micro-batches. x: on the last rank, those of all."""
        import jax
        import jax.numpy as jnp

        last = self.ranks - 1
        x = x.reshape(-1, self.ranks, *x.shape[1:])
        mine = x[:, last]
        for r in range(last):
            mine = jnp.where(self.rank == r, jax.lax.ppermute(x[:, r], STAGE, [(last, r)]), mine)
        return mine

    def _longer(self, x: Array) -> Array:
        """A value of each iteration. x: of each micro-batch; the last one is repeated."""
        import jax
        import jax.numpy as jnp

        again = jax.lax.stop_gradient(x[-1:])
        return jnp.concatenate([x, *[again] * (self.ranks - 1)])


def _sent(value: DeviceValue) -> Array:
    """The array of an activation, whose gradient returns in the same layout."""
    if value.gradient_carrier is not None:
        raise NotManual(
            f"'{value.tensor}' crosses between stages, but its gradient has another layout than it has"
        )
    return value.array
