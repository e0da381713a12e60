"""Runs one step of a pipelined plan: calls the stages' programs in the order of the schedule's list of actions.

One process controls all devices. Calls return immediately, and devices work through their queues. Transfers are copies
between the ranks' meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.pipeline.arrays import is_cut, joined, on_rank
from pase.backends.jax.pipeline.device import DeviceStage
from pase.backends.jax.pipeline.local_stage import HeldArray, refusals
from pase.backends.jax.pipeline.placement import StagePlacement
from pase.backends.jax.pipeline.programs import StageProgram, StagePrograms, stage_programs
from pase.backends.jax.pipeline.segments import StageKey
from pase.backends.jax.pipeline.stages import StageWeight
from pase.backends.jax.spmd.lower import Manual
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.leaves import arrays, combine
from pase.frontends.jax.types import Var
from pase.frontends.jax.versions import is_literal, value_of
from pase.pipeline.order import order_of
from pase.pipeline.types import Kind
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Sharding
    from jax.typing import ArrayLike

    from pase.backends.jax.pipeline.plan import JaxPipeline

__all__ = ["RunningStages"]


@dataclass(frozen=True, kw_only=True)
class RunningStages:
    """The plan's stages on a set of devices, compiled on first use."""

    placement: StagePlacement

    @property
    def plan(self) -> JaxPipeline:
        return self.placement.plan

    @cached_property
    def manual(self) -> tuple[Manual, ...]:
        """The model under each stage's strategy, with the stage's rows of stacks."""
        everywhere, ranks = self.placement.everywhere, self.plan.schedule.rank_of
        return tuple(
            Manual(plan=self.placement.split(k), mesh=everywhere.mesh_of(rank), rows=stage.rows)
            for k, (stage, rank) in enumerate(zip(self.plan.stages, ranks, strict=True))
        )

    @cached_property
    def programs(self) -> tuple[StagePrograms, ...]:
        """The programs of each stage. Stages of a rank that do the same work share them."""
        plan, made, out = self.plan, dict[Hashable, StagePrograms](), []
        for k, (stage, p) in enumerate(zip(plan.stages, plan.pipeline.stages, strict=True)):
            leaves, device = tuple(w.leaf for w in stage.weights), self.device(k)
            ends = (device.stored, device.given, device.before, device.after)
            key = (plan.schedule.rank_of[k], p.strategy, p.weights, stage.alike, leaves, ends)
            if key not in made:
                made[key] = self._programs_of(device)
            out.append(made[key])
        plan.splits[0].check_found({t for p in out for t in p.totals})
        return tuple(out)

    def device(self, k: int) -> DeviceStage:
        """A stage on one device."""
        plan, placement, stage = self.plan, self.placement, self.plan.stages[k]
        names, n = plan.splits[0].leaf_names(), len(plan.traced.param_paths)
        full = placement.split(k).input_shapes(True)

        def crossing(at: int, keys: Sequence[StageKey]) -> tuple[HeldArray, ...]:
            return tuple(
                HeldArray.of(self.manual[at].program, stage.names.get(key), stage.avals[key].shape)
                for key in keys
            )

        return DeviceStage(
            stage=stage,
            manual=self.manual[k],
            last=k + 1 == len(plan.stages),
            stored=tuple(
                HeldArray.of(
                    self.manual[placement.holders[w][0]].program, names[w.leaf], placement.shape(w).shape
                )
                for w in stage.weights
            ),
            given=tuple(
                HeldArray.of(self.manual[placement.readers[i][0]].program, names[n + i], full[i])
                for i in stage.batch
            ),
            before=crossing(k - 1, stage.enters) if k else (),
            after=crossing(k + 1, stage.leaves) if k + 1 < len(plan.stages) else (),
            hoisted=plan.pipeline.stages[k].weights == "hoisted",
            micro_batches=plan.pipeline.micro_batches,
            first=plan.micro_batches.first,
            every=plan.micro_batches.of,
        )

    def _programs_of(self, device: DeviceStage) -> StagePrograms:
        avals, n = self.plan.traced.jaxpr.in_avals, len(self.plan.traced.param_paths)
        with refusals():
            return stage_programs(
                device,
                [avals[w.leaf].dtype for w in device.stage.weights],
                [avals[n + i].dtype for i in device.stage.batch],
                splits_backward=self.plan.schedule.splits_backward,
            )

    @without_mesh()
    def loss(self, params: Tree, *batch: Tree) -> Tree:
        """The loss of the whole batch, or (the loss, aux)."""
        run = _Step(running=self, args=self.placement.placed(arrays((params, *batch))))
        for micro in range(self.plan.pipeline.micro_batches):
            for k in range(len(self.plan.stages)):
                run.forward(k, micro)
                run.forget(k, micro)
        return run.value()

    @without_mesh()
    def value_and_grad(self, params: Tree, *batch: Tree) -> tuple[Tree, Tree]:
        """Loss and gradients of the whole batch, computed in the order of the schedule's actions."""
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
    _sums: dict[int, list[Array]] = field(default_factory=dict)
    """Stage -> the sums of its weights' gradients."""
    _outs: dict[int, list[Array]] = field(default_factory=dict)

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
        for k, (stage, p) in enumerate(zip(run.plan.stages, run.programs, strict=True)):
            weights = [on_rank(self._weights[w], run.placement.stored[w], rank_of[k]) for w in stage.weights]
            mine = dict(zip(p.weights, weights, strict=True))
            mine |= {
                v: on_rank(given[i], run.placement.arrives[i], rank_of[k])
                for v, i in zip(p.batch, stage.batch, strict=True)
            }
            if p.totals:
                with refusals():
                    mine |= zip(p.totals.values(), p.count([mine[v] for v in p.batch]), strict=True)
            if p.prepare.makes:
                mine |= _run(p.prepare, mine, [])[1]
            self._stage.append(mine)

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
        import numpy as np

        run = self.running
        p = run.programs[k]
        env: dict[Var, Tree] = dict(zip(p.entered, self._entered.pop((k, micro), []), strict=True))
        env[p.micro] = np.int32(micro)
        _, made = _run(p.forward, self._stage[k] | env, [])
        outs: list[Array] = [value_of(v, made) for v in p.leaves]
        self._kept[k, micro] = env | made
        if k + 1 == len(run.plan.stages):
            self._outs[micro] = outs
        else:
            self._entered[k + 1, micro] = [self._at(k + 1, x) for x in outs]

    def _at(self, k: int, x: Array) -> Array:
        """An array with a leading dim of devices, moved to those of a stage's rank."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = self.running.placement.everywhere.mesh_of(self.running.plan.schedule.rank_of[k])
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))

    def forget(self, k: int, micro: int) -> None:
        """Drop the residuals, because no backward follows."""
        del self._kept[k, micro]

    def _backward(self, k: int, micro: int, programs: Sequence[StageProgram]) -> None:
        run = self.running
        p, kept = run.programs[k], self._kept[k, micro]
        if p.cotangents and p.cotangents[0] not in kept:
            last = k + 1 == len(run.plan.stages)
            here = self._first_cotangents(p) if last else self._cotangents.pop((k, micro))
            kept |= dict(zip(p.cotangents, here, strict=True))
        for program in programs:
            adds = program is p.backward[-1]
            if adds and k not in self._sums:
                self._sums[k] = p.zeros([self._stage[k][v] for v in p.weights])
            sums, made = _run(program, self._stage[k] | kept, self._sums[k] if adds else [])
            if adds:
                self._sums[k] = sums
            kept |= made
            if program is p.backward[0] and k:
                self._cotangents[k - 1, micro] = [
                    self._at(k - 1, value_of(v, kept)) for v in p.entered_gradients if v is not None
                ]
        if programs[-1] is p.backward[-1]:
            del self._kept[k, micro]

    def _first_cotangents(self, p: StagePrograms) -> list[ArrayLike]:
        """The cotangents of the last stage's outputs: 1 for the loss. Its other outputs have no gradient."""
        import numpy as np

        many = self.running.placement.split(0).logical_mesh.devices
        return [np.ones((many, *v.aval.shape), v.aval.dtype) for v in p.cotangents]

    def value(self) -> Tree:
        """The loss, or (loss, aux). aux is stacked over micro-batches, as without stages."""
        import jax

        traced = self.running.plan.traced
        m = self.running.plan.pipeline.micro_batches

        total, *rest = _total_and_rest()([self._outs[i] for i in range(m)])
        flat = [self.running.plan.splits[0].of_batch(total), *rest]
        if not traced.has_aux:
            return flat[0]
        return combine(jax.tree.unflatten(traced.out_tree, flat), traced.kept_out)

    def gradients(self) -> Tree:
        """The gradients of the whole batch's loss, where the parameters are updated.

        If several stages have a gradient of the same parameter, these are summed.
        """
        import jax
        import numpy as np

        run = self.running
        found: dict[StageWeight, list[Array]] = {}
        for k, sums in self._sums.items():
            mine = [w for w in run.plan.stages[k].weights if w in run.placement.trained_parts]
            p = run.programs[k]
            made = p.finish([self._stage[k][v] for v in p.weights], sums)
            for w, g in zip(mine, made, strict=True):
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
    with refusals():
        sums, made = program.run(sums, [values[v] for v in program.reads])
    return sums, {v: x for v, x in zip(program.makes, made, strict=True) if not is_literal(v)}


@cache
def _total_and_rest() -> Callable[[list[list[Array]]], list[Array]]:
    """A jitted function of the last stage's outputs, one list per micro-batch.

    It returns the sum of the first output, and the others stacked over micro-batches.
    """
    import jax
    import jax.numpy as jnp

    def fn(outs: list[list[Array]]) -> list[Array]:
        total = sum((o[0] for o in outs[1:]), outs[0][0])
        rest = zip(*(o[1:] for o in outs), strict=True)
        return [total, *(jnp.stack(x) if len(outs) > 1 else x[0] for x in rest)]

    return jax.jit(fn)


@cache
def _total_of(sharding: Sharding) -> Callable[[list[Array]], Array]:
    import jax

    return jax.jit(lambda xs: sum(xs[1:], xs[0]), out_shardings=sharding)
