"""Runs one step of a pipelined plan: calls the stages' programs in the order of the schedule's list of actions.

One process controls all devices. Calls return immediately, and devices work through their queues. Transfers are copies
between the ranks' meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.gspmd import JaxprWalk
from pase.backends.jax.pipeline.arrays import is_cut, joined, on_rank
from pase.backends.jax.pipeline.placement import StagePlacement
from pase.backends.jax.pipeline.programs import StageProgram, StagePrograms, stage_programs
from pase.backends.jax.pipeline.stages import Stage, StageWeight
from pase.backends.jax.pipeline.unreduced import first_examples
from pase.frontends.jax.blocks import split_inputs
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.leaves import arrays, combine
from pase.frontends.jax.types import Var
from pase.frontends.jax.versions import is_literal, value_of
from pase.pipeline.order import order_of
from pase.pipeline.types import Kind
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct
    from jax.sharding import NamedSharding, Sharding
    from jax.typing import ArrayLike

    from pase.backends.jax.pipeline.plan import JaxPipeline
    from pase.backends.jax.pipeline.unreduced import UnreducedGroups
    from pase.backends.jax.plan import JaxPlan

__all__ = ["RunningStages"]


@dataclass(frozen=True, kw_only=True)
class RunningStages:
    """The plan's stages on a set of devices, compiled on first use."""

    placement: StagePlacement

    @property
    def plan(self) -> JaxPipeline:
        return self.placement.plan

    @property
    def unreduced_groups(self) -> UnreducedGroups | None:
        return self.plan.unreduced_groups

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages as they run: those of one unreduced group, if there are such groups."""
        return self.plan.stages if self.unreduced_groups is None else self.unreduced_groups.stages

    def split(self, k: int) -> JaxPlan:
        """The plan under which stage ``k`` runs."""
        return (
            self.placement.split(k)
            if self.unreduced_groups is None
            else self.unreduced_groups.splits[self.plan.pipeline.stages[k].strategy]
        )

    @cached_property
    def programs(self) -> tuple[StagePrograms, ...]:
        """The programs of each stage. Stages of a rank that do the same work share them."""
        made: dict[Hashable, StagePrograms] = {}
        out = []
        for k, (stage, plan) in enumerate(zip(self.stages, self.plan.pipeline.stages, strict=True)):
            leaves = tuple(w.leaf for w in stage.weights)
            key = (self.plan.schedule.rank_of[k], plan.strategy, plan.weights, stage.alike, leaves)
            if key not in made:
                made[key] = self._programs_of(k)
            out.append(made[key])
        return tuple(out)

    def _programs_of(self, k: int) -> StagePrograms:
        import jax

        plan, stage, groups = self.plan, self.stages[k], self.unreduced_groups
        rank = plan.schedule.rank_of[k]
        mesh = self.placement.everywhere.mesh_of(rank)
        walk = JaxprWalk(plan=self.split(k), mesh=mesh)
        m, n = plan.pipeline.micro_batches, len(plan.traced.param_paths)
        divided = split_inputs(plan.traced) if m > 1 else [False] * len(plan.traced.input_paths)

        def part(i: int, x: Array, micro: Array) -> Array:
            """A micro-batch: every m-th example, so that each device already has its own examples."""
            if not divided[i]:
                return x
            x = x.reshape(x.shape[0] // m, m, *x.shape[1:])
            placement, spec = self.placement.arrives[i], tuple(self.placement.arrives[i].spec)
            within = replace(placement, spec=type(placement.spec)(*spec[:1], None, *spec[1:]))
            x = jax.lax.with_sharding_constraint(x, within.on(rank))
            return jax.lax.dynamic_index_in_dim(x, micro, 1, keepdims=False)

        def in_lanes(i: int, x: Array) -> Array:
            """The array with a leading dim of unreduced groups.

            Each group has its own examples, or a copy of the whole array if the array has no batch dim.
            """
            if groups is None:
                return x
            if not divided[i]:
                return jax.numpy.broadcast_to(x, (groups.many, *x.shape))
            x = x.reshape(groups.many, x.shape[0] // groups.many, *x.shape[1:])
            return jax.lax.with_sharding_constraint(x, groups.stacked(self.placement.everywhere.on(rank)))

        number, many = plan.micro_batches

        def parts(batch: Sequence[Array], micro: Array) -> list[Array]:
            mine = [in_lanes(i, part(i, x, micro)) for i, x in zip(stage.batch, batch, strict=True)]
            return [*mine, *first_examples(walk.plan.traced, many, groups, number + micro)]

        def fn(weights: Sequence[Array], mine: Sequence[Array], entered: Sequence[Array]) -> list[Array]:
            return stage.run(walk, weights, mine, entered, many)

        def shape(w: StageWeight) -> ShapeDtypeStruct:
            s = self.placement.shape(w)
            return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.placement.stored[w].on(rank))

        full, avals = self.placement.split(k).input_shapes(True), plan.traced.jaxpr.in_avals[n:]
        return stage_programs(
            fn,
            parts,
            [shape(w) for w in stage.weights],
            [jax.ShapeDtypeStruct(full[i], avals[i].dtype) for i in stage.batch],
            [jax.ShapeDtypeStruct(stage.avals[key].shape, stage.avals[key].dtype) for key in stage.enters],
            gradient_shardings=[
                self.placement.updated_as[w].on(rank) if w in self.placement.trained_parts else None
                for w in stage.weights
            ],
            splits_backward=plan.schedule.splits_backward,
            hoisted=plan.pipeline.stages[k].weights == "hoisted",
            unreduced=groups,
        )

    @cached_property
    def zeros(self) -> list[Callable[[], list[Array]]]:
        """For each stage, a function that creates the zeros to which its gradients are added."""
        import jax
        import jax.numpy as jnp

        def of(k: int) -> Callable[[], list[Array]]:
            rank = self.plan.schedule.rank_of[k]
            ws = [w for w in self.plan.stages[k].weights if w in self.placement.trained_parts]
            shapes = [self.placement.shape(w) for w in ws]
            where = [self.placement.updated_as[w].on(rank) for w in ws]
            many = () if self.unreduced_groups is None else (self.unreduced_groups.many,)
            return jax.jit(
                lambda: [jnp.zeros((*many, *s.shape), s.dtype) for s in shapes],
                out_shardings=where
                if self.unreduced_groups is None
                else list(map(self.unreduced_groups.stacked, where)),
            )

        return [of(k) for k in range(len(self.plan.stages))]

    def entry(self, k: int, j: int, x: Array) -> NamedSharding:
        """The layout in which stage ``k`` reads its ``j``-th entering activation ``x``.

        If the stage's plan does not define one, it is the layout in which the previous stage made it.
        """
        from jax.sharding import NamedSharding, PartitionSpec

        stage, split = self.stages[k], self.split(k)
        mesh = self.placement.everywhere.on(self.plan.schedule.rank_of[k]).mesh
        route = split.constraints.define.get(stage.names.get(stage.enters[j], ""))
        if route is not None and route.layouts:
            read = NamedSharding(mesh, split.spec(route.layouts[-1]))
            return read if self.unreduced_groups is None else self.unreduced_groups.stacked(read)
        made = x.sharding
        return NamedSharding(mesh, made.spec if isinstance(made, NamedSharding) else PartitionSpec())

    @without_mesh()
    def loss(self, params: Tree, *batch: Tree) -> Tree:
        """The mean of the loss over the micro-batches, or (the mean, aux)."""
        run = _Step(running=self, args=self.placement.placed(arrays((params, *batch))))
        for micro in range(self.plan.pipeline.micro_batches):
            for k in range(len(self.plan.stages)):
                run.forward(k, micro)
                run.forget(k, micro)
        return run.value()

    @without_mesh()
    def value_and_grad(self, params: Tree, *batch: Tree) -> tuple[Tree, Tree]:
        """The means of loss and gradients over the micro-batches, computed in the order of the schedule's actions."""
        run = _Step(running=self, args=self.placement.placed(arrays((params, *batch))))
        order = order_of(self.plan.schedule)
        for kind, k, micro in zip(order.kind, order.stage, order.micro, strict=True):
            run.act(Kind(kind), int(k), int(micro))
        return run.value(), run.gradients()


@dataclass(kw_only=True)
class _Step:
    """The state of one step over all micro-batches: the current values of each stage."""

    running: RunningStages
    args: Sequence[Tree]
    _kept: dict[tuple[int, int], dict[Var, Tree]] = field(default_factory=dict)
    """(stage, micro-batch) -> residuals for its backward."""
    _entered: dict[tuple[int, int], list[Array]] = field(default_factory=dict)
    _cotangents: dict[tuple[int, int], list[ArrayLike]] = field(default_factory=dict)
    _made_as: dict[int, list[Sharding]] = field(default_factory=dict)
    """Stage -> layouts of its outputs, which are also the layouts of the outputs' cotangents."""
    _outs: dict[int, list[ArrayLike]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import jax

        run = self.running
        params, *batch = self.args
        flat = jax.tree.leaves(params, is_leaf=is_cut)
        given = jax.tree.leaves(batch)
        self._weights = {
            w: flat[w.leaf] if w.rows is None else flat[w.leaf].parts[i]
            for ws in run.placement.parts_of
            for i, w in enumerate(ws)
        }
        self._stage: list[dict[Var, Array]] = []
        rank_of = run.plan.schedule.rank_of
        for k, (stage, p) in enumerate(zip(run.stages, run.programs, strict=True)):
            weights = [on_rank(self._weights[w], run.placement.stored[w], rank_of[k]) for w in stage.weights]
            mine = dict(zip(p.weights, weights, strict=True))
            mine |= {
                v: on_rank(given[i], run.placement.arrives[i], rank_of[k])
                for v, i in zip(p.batch, stage.batch, strict=True)
            }
            if p.prepare.makes:
                mine |= _run(p.prepare, mine, [])[1]
            self._stage.append(mine)
        self._sums = [list(made()) for made in run.zeros]

    def act(self, kind: Kind, k: int, micro: int) -> None:
        if kind == Kind.FORWARD:
            self.forward(k, micro)
            return
        programs = self.running.programs[k].backward
        if len(programs) == 1 or kind == Kind.BACKWARD:
            self._backward(k, micro, programs)
        elif kind == Kind.INPUT:
            self._backward(k, micro, programs[:1])
        else:
            self._backward(k, micro, programs[1:])

    def forward(self, k: int, micro: int) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        run = self.running
        p = run.programs[k]
        env: dict[Var, Tree] = dict(zip(p.entered, self._entered.pop((k, micro), []), strict=True))
        env[p.micro] = np.int32(micro)
        _, made = _run(p.forward, self._stage[k] | env, [])
        outs: list[Array] = [jnp.asarray(value_of(v, made)) for v in p.leaves]
        self._kept[k, micro] = env | made
        if k + 1 == len(run.plan.stages):
            self._outs[micro] = [*outs]
            return
        self._made_as.setdefault(k, [x.sharding for x in outs])
        self._entered[k + 1, micro] = [jax.device_put(x, run.entry(k + 1, j, x)) for j, x in enumerate(outs)]

    def forget(self, k: int, micro: int) -> None:
        """Drop the residuals, because no backward follows."""
        del self._kept[k, micro]

    def _backward(self, k: int, micro: int, programs: Sequence[StageProgram]) -> None:
        import jax

        run = self.running
        p, kept = run.programs[k], self._kept[k, micro]
        if p.cotangents and p.cotangents[0] not in kept:
            last = k + 1 == len(run.plan.stages)
            here = self._first_cotangents(p, micro) if last else self._cotangents.pop((k, micro))
            kept |= dict(zip(p.cotangents, here, strict=True))
        for program in programs:
            adds = program is p.backward[-1]
            sums, made = _run(program, self._stage[k] | kept, self._sums[k] if adds else [])
            if adds:
                self._sums[k] = sums
            kept |= made
            if program is p.backward[0] and k:
                back = [
                    jax.device_put(value_of(v, kept), s)
                    for v, s in zip(p.entered_gradients, self._made_as[k - 1], strict=True)
                    if v is not None
                ]
                self._cotangents[k - 1, micro] = back
        if programs[-1] is p.backward[-1]:
            del self._kept[k, micro]

    def _first_cotangents(self, p: StagePrograms, micro: int) -> list[ArrayLike]:
        """The cotangents of the last stage's outputs: 1 for the loss, 0 for the function's other results."""
        import numpy as np

        groups = self.running.unreduced_groups
        share = 1 if groups is None else 1 / groups.many  # the loss is the mean over the unreduced groups
        return [
            np.full(v.aval.shape, share if i == 0 else 0, v.aval.dtype) for i, v in enumerate(p.cotangents)
        ]

    def value(self) -> Tree:
        """The loss, or (loss, aux): the mean of the loss, and aux stacked over micro-batches, as without stages."""
        import jax

        traced = self.running.plan.traced
        m = self.running.plan.pipeline.micro_batches

        flat = _mean_and_rest()([self._outs[i] for i in range(m)])
        if not traced.has_aux:
            return flat[0]
        return combine(jax.tree.unflatten(traced.out_tree, flat), traced.kept_out)

    def gradients(self) -> Tree:
        """The mean gradients over the micro-batches, where the parameters are updated.

        If several stages have a gradient of the same parameter, these are summed.
        """
        import jax
        import numpy as np

        run = self.running
        m = run.plan.pipeline.micro_batches
        found: dict[StageWeight, list[Array]] = {}
        for k, sums in enumerate(self._sums):
            mine = [w for w in run.plan.stages[k].weights if w in run.placement.trained_parts]
            where = tuple(run.placement.updated_as[w].on(run.plan.schedule.rank_of[k]) for w in mine)
            means = _mean_of(m, where, run.unreduced_groups is not None)(sums)
            for w, g in zip(mine, means, strict=True):
                found.setdefault(w, []).append(g)

        def of(w: StageWeight) -> Tree:
            placement = run.placement.updated_as[w]
            if w not in found:  # no stage reads it
                shape = run.placement.shape(w)
                return placement.put(np.zeros(shape.shape, shape.dtype))
            first = placement.on(placement.ranks[0])
            same = [jax.device_put(g, first) for g in found[w]]
            total = same[0] if len(same) == 1 else _total_of(first)(same)
            return joined([jax.device_put(total, placement.on(r)) for r in placement.ranks], placement)

        return run.placement.tree(of)


def _run(
    program: StageProgram, values: Mapping[Var, ArrayLike], sums: list[Array]
) -> tuple[list[Array], dict[Var, Array]]:
    """(the sums of gradients, what the program makes). sums: for the last part of backward; otherwise none."""
    sums, made = program.run(sums, [values[v] for v in program.reads])
    return sums, {v: x for v, x in zip(program.makes, made, strict=True) if not is_literal(v)}


@cache
def _mean_and_rest() -> Callable[[list[list[ArrayLike]]], list[Array]]:
    """A jitted function of the last stage's outputs, one list per micro-batch.

    It returns the mean of the first output (over micro-batches and unreduced groups), and the others stacked over
    micro-batches.
    """
    import jax
    import jax.numpy as jnp

    def fn(outs: list[list[Array]]) -> list[Array]:
        loss = sum((jnp.mean(o[0]) for o in outs[1:]), jnp.mean(outs[0][0])) / len(outs)
        rest = zip(*(o[1:] for o in outs), strict=True)
        return [loss, *(jnp.stack(x) if len(outs) > 1 else x[0] for x in rest)]

    return jax.jit(fn)


@cache
def _mean_of(m: int, shardings: tuple[Sharding, ...], groups: bool) -> Callable[[list[Array]], list[Array]]:
    """A jitted function that divides sums by m micro-batches. groups: whether to sum over unreduced groups first."""
    import jax

    def fn(gs: list[Array]) -> list[Array]:
        return [(g.sum(0) if groups else g) / m for g in gs]

    return jax.jit(fn, out_shardings=list(shardings), donate_argnums=() if groups else 0)


@cache
def _total_of(sharding: Sharding) -> Callable[[list[Array]], Array]:
    import jax

    return jax.jit(lambda xs: sum(xs[1:], xs[0]), out_shardings=sharding)
