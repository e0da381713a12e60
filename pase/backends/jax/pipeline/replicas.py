"""A plan of replicas in JAX: each replica runs its share of the micro-batches on its own devices.

The devices are in the order of the machine's device groups. Each replica is a pipelined plan, which may have only one
rank. Gradients are averaged with weights in proportion to the shares. The devices of the first replica compute the
mean, so all replicas make the same update from the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.make import traced_by_jax, whole_batch
from pase.backends.jax.pipeline.arrays import StackCut, is_cut, registered
from pase.backends.jax.pipeline.check import StagedGradient, check_stages
from pase.backends.jax.pipeline.circular import JaxCircular
from pase.backends.jax.pipeline.local_stage import check_lowering
from pase.backends.jax.pipeline.placement import StagePlacement
from pase.backends.jax.pipeline.plan import (
    JaxPipeline,
    MicroBatchShare,
    StagedStep,
    one_program_of,
    pipeline_of,
)
from pase.backends.jax.pipeline.run import RunningStages
from pase.backends.jax.plan import Against, JaxPlan
from pase.backends.jax.spmd.lower import Lowering
from pase.errors import PaseError
from pase.frontends.common.micro_batches import step_sums
from pase.frontends.jax.blocks import split_inputs
from pase.frontends.jax.leaves import arrays
from pase.machine import Mesh
from pase.machine.jax_devices import as_linked
from pase.pipeline.registry import SCHEDULES
from pase.plan.gradient_lines import CheckLines
from pase.plan.types import PlanData
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax import Device as JaxDevice
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding
    from optax import GradientTransformation

    from pase.plan.gradient_check import GradientCheck

__all__ = ["JaxReplicas", "Replicated", "in_stages"]


@dataclass(frozen=True, eq=False)
class Replicated:
    """A tree of which each replica has its own copy, or, for a batch, its own share. It is a pytree node."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, kw_only=True)
class JaxReplicas(JaxPlan["Sequence[JaxMesh]", "Callable[..., tuple[Tree, Tree, Tree]]"]):
    """A plan in JAX that runs as replicas. replicas: in the order of their devices.

    Parameters, gradients and state are ``Replicated``: for each replica, the tree in the form of its pipeline.
    """

    replicas: tuple[JaxPipeline, ...]

    def __post_init__(self) -> None:
        registered(Replicated)

    @property
    def replica_split(self) -> tuple[int, ...]:
        """The number of the step's micro-batches that each replica runs."""
        return tuple(r.pipeline.micro_batches for r in self.replicas)

    def mesh(self, devices: Sequence[JaxDevice] | None = None) -> tuple[JaxMesh, ...]:
        """The mesh of each replica. They take consecutive devices of ``devices``, by default all of jax.devices()."""
        import jax

        found = as_linked(jax.devices() if devices is None else devices)
        many = [r.pipeline.degree * r.splits[0].logical_mesh.devices for r in self.replicas]
        if len(found) < sum(many):
            raise PaseError(
                f"the plan is for {sum(many)} devices ({' + '.join(map(str, many))}), but JAX sees {len(found)}",
                fix=f"on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={sum(many)} before JAX starts",
            )
        starts = [0, *itertools.accumulate(many)]
        return tuple(
            r.mesh(found[a:b]) for r, (a, b) in zip(self.replicas, itertools.pairwise(starts), strict=True)
        )

    def device_put(
        self, params: Tree, *batch: Tree, mesh: Sequence[JaxMesh] | None = None
    ) -> tuple[Tree, ...]:
        """(params, *batch) as ``Replicated``: parameters on every replica, and each replica's share of the batch."""
        copies = _copies(params, len(self.replicas))
        each = zip(self.replicas, self._meshes(mesh), copies, self._shared(batch), strict=True)
        placed = [r.device_put(mine, *share, mesh=m) for r, m, mine, share in each]
        return tuple(Replicated(x) for x in zip(*placed, strict=True))

    def gathered(self, tree: Tree) -> Tree:
        return self.replicas[0].gathered(tree.parts[0] if isinstance(tree, Replicated) else tree)

    def init(
        self, optimizer: GradientTransformation, params: Tree, mesh: Sequence[JaxMesh] | None = None
    ) -> Tree:
        copies = _copies(params, len(self.replicas))
        meshes = self._meshes(mesh)
        made = zip(self.replicas, copies, meshes, strict=True)
        return Replicated(tuple(r.init(optimizer, p, m) for r, p, m in made))

    def loss(
        self, mesh: Sequence[JaxMesh] | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., Tree]:
        check_lowering(lowering)
        running = self._on(mesh)

        def run(params: Tree, *batch: Tree) -> Tree:
            given = zip(running, _copies(params, len(running)), self._shared(batch), strict=True)
            return self._value([r.loss(p, *mine) for r, p, mine in given])

        return run

    def value_and_grad(
        self, mesh: Sequence[JaxMesh] | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., tuple[Tree, Tree]]:
        check_lowering(lowering)
        running = self._on(mesh)

        def run(params: Tree, *batch: Tree) -> tuple[Tree, Tree]:
            given = zip(running, _copies(params, len(running)), self._shared(batch), strict=True)
            found = [
                r.value_and_grad(p, *mine) for r, p, mine in given
            ]  # all replicas' calls are queued before any of them is waited for
            return self._value([v for v, _ in found]), self._mean([g for _, g in found], running)

        return run

    def checked_along(
        self,
        lines: CheckLines,
        given: tuple[Tree, ...],
        mesh: Sequence[JaxMesh] | None,
        lowering: Lowering,
        against: Against,
    ) -> GradientCheck:
        """The points of the lines are made on the first replica and copied to the others through the host."""
        check_lowering(lowering)
        params, *batch = given
        running, first = self._on(mesh), self.replicas[0]
        shared = self._shared(batch)
        mine = running[0].placement.placed(arrays((_copies(params, len(running))[0], *shared[0])))

        def graded(params: Tree, *_: Tree) -> tuple[Tree, Tree]:
            others = [first.gathered(params)] * (len(running) - 1)
            each = zip(running, [params, *others], shared, strict=True)
            found = [r.value_and_grad(p, *share) for r, p, share in each]
            return self._value([v for v, _ in found]), self._mean([g for _, g in found], running).parts[0]

        step = StagedGradient(
            graded=graded,
            params=first.gathered(params) if isinstance(params, Replicated) else params,
            batch=tuple(batch),
            placed=tuple(mine),
            devices=sum(r.placement.grid.size for r in running),
            micro_batches=sum(self.replica_split),
        )
        cut = any(isinstance(x, Replicated) for x in batch)
        return check_stages(running[0].placement, step, "none" if cut else against, lines)

    def plain_step(
        self,
        optimizer: GradientTransformation,
        mesh: Sequence[JaxMesh] | None,
        donate: bool,
        lowering: Lowering,
    ) -> Callable[..., tuple[Tree, Tree, Tree]]:
        meshes = self._meshes(mesh)
        steps = [
            r.plain_step(optimizer, m, donate, lowering) for r, m in zip(self.replicas, meshes, strict=True)
        ]
        return _ReplicatedStep(replicas=self, steps=tuple(steps))

    def _meshes(self, mesh: Sequence[JaxMesh] | None) -> Sequence[JaxMesh]:
        return self.mesh() if mesh is None else mesh

    def _on(self, mesh: Sequence[JaxMesh] | None) -> list[RunningStages]:
        return [r.on(m) for r, m in zip(self.replicas, self._meshes(mesh), strict=True)]

    @cached_property
    def _divided(self) -> list[bool]:
        return split_inputs(self.replicas[0].traced)

    def _shared(self, batch: Sequence[Tree]) -> list[tuple[Tree, ...]]:
        """Each replica's share of a batch. What ``device_put`` placed is already shared out.

        Each of the step's m micro-batches consists of every m-th example.
        """
        import jax

        given = [x.parts[0] if isinstance(x, Replicated) else x for x in map(arrays, batch)]
        many = [len(jax.tree.leaves(x)) for x in given]
        if sum(many) != len(self._divided):
            raise PaseError(
                f"it has {sum(many)} arrays, but the plan was compiled for {len(self._divided)}",
                where="the batch",
                fix="pass the batch arguments that the plan was compiled for",
            )
        divided = iter(self._divided)
        split = [list(itertools.islice(divided, n)) for n in many]
        parts = [
            x.parts if isinstance(x, Replicated) else self._shares_of(arrays(x), on)
            for x, on in zip(batch, split, strict=True)
        ]
        return list(zip(*parts, strict=True)) if parts else [()] * len(self.replicas)

    def _shares_of(self, argument: Tree, divided: Sequence[bool]) -> list[Tree]:
        """Each replica's share of one argument. divided: whether the first dim of a leaf is the examples."""
        import jax

        total = sum(self.replica_split)

        def part(x: Array, on: bool, first: int, stop: int) -> Array:
            if not on:
                return x
            if not x.shape or x.shape[0] % total:
                raise PaseError(
                    f"an array of shape {x.shape} cannot be divided into {total} equal micro-batches",
                    where="the batch",
                    fix=f"make its first dim a multiple of {total}",
                )
            return x.reshape(-1, total, *x.shape[1:])[:, first:stop].reshape(-1, *x.shape[1:])

        leaves, tree = jax.tree.flatten(argument)
        return [
            jax.tree.unflatten(tree, [part(x, on, a, b) for x, on in zip(leaves, divided, strict=True)])
            for a, b in itertools.pairwise([0, *itertools.accumulate(self.replica_split)])
        ]

    def _value(self, values: Sequence[Tree]) -> Tree:
        """The mean of the losses, weighted by shares. The function's other results are stacked over micro-batches."""
        import jax
        import jax.numpy as jnp

        total = sum(self.replica_split)
        here = jax.tree.leaves(values[0])[0].sharding
        flat = [[jax.device_put(x, here) for x in jax.tree.leaves(v)] for v in values]
        loss = sum(f[0] * (k / total) for f, k in zip(flat, self.replica_split, strict=True))
        rest = [
            jnp.concatenate([x[None] if k == 1 else x for x, k in zip(xs, self.replica_split, strict=True)])
            for xs in zip(*(f[1:] for f in flat), strict=True)
        ]
        out: Tree = jax.tree.unflatten(jax.tree.structure(values[0]), [loss, *rest])
        return out

    def _mean(self, grads: Sequence[Tree], running: Sequence[RunningStages]) -> Replicated:
        """The mean of the replicas' gradients, weighted by shares, on each replica where it updates its parameters."""
        import jax

        total = sum(self.replica_split)
        first = running[0].placement
        moved = [grads[0], *(_as_of(g, first) for g in grads[1:])]
        parts = [k / total for k in self.replica_split]
        mean = jax.tree.map(lambda *gs: sum(g * p for g, p in zip(gs, parts, strict=True)), *moved)
        return Replicated((_as_of(mean, first), *(_as_of(mean, r.placement) for r in running[1:])))


@dataclass(frozen=True, kw_only=True)
class _ReplicatedStep:
    """A train step of all replicas."""

    replicas: JaxReplicas
    steps: tuple[StagedStep, ...]

    def __call__(self, params: Tree, opt_state: Tree, *batch: Tree) -> tuple[Tree, Tree, Tree]:
        many, shared = len(self.steps), self.replicas._shared(batch)
        copies = zip(self.steps, _copies(params, many), shared, strict=True)
        mine = [s.placed(p, *share) for s, p, share in copies]
        running = [s.running for s in self.steps]
        found = [r.value_and_grad(*m) for r, m in zip(running, mine, strict=True)]
        means = self.replicas._mean([g for _, g in found], running)
        states = _copies(opt_state, many)
        value = self.replicas._value([v for v, _ in found])
        done = [
            s.updated(m[0], state, g, value)
            for s, m, state, g in zip(self.steps, mine, states, means.parts, strict=True)
        ]
        updated, changed = (Replicated(x) for x in zip(*done, strict=True))
        return updated, changed, value


def _copies(tree: Tree, many: int) -> tuple[Tree, ...]:
    """The tree of each replica. A tree that is not ``Replicated`` is used for every replica."""
    return tree.parts if isinstance(tree, Replicated) else (tree,) * many


def _as_of(grads: Tree, placement: StagePlacement) -> Tree:
    """The gradients of one replica, moved to where another one updates its parameters. The two may have other cuts."""
    import jax

    found = jax.tree.leaves(grads, is_leaf=is_cut)
    at = iter(found)
    have = {i: next(at) for i in dict.fromkeys(w.leaf for w in placement.trained_parts)}
    return placement.tree(
        lambda w: placement.updated_as[w].put(_rows(have[w.leaf], w.rows, placement.updated_as[w].sharding))
    )


def _rows(x: Array | StackCut, rows: tuple[int, int] | None, to: NamedSharding) -> Array:
    """The given rows of a leaf, which may be cut in any way. rows: None for all of them. to: their sharding."""
    import jax
    import jax.numpy as jnp

    parts: tuple[Array, ...] = (x,) if not isinstance(x, StackCut) else x.parts
    if rows is None:
        return jnp.concatenate([jax.device_put(p, to) for p in parts]) if len(parts) > 1 else parts[0]
    starts = [0, *itertools.accumulate(p.shape[0] for p in parts)]
    mine = [
        jax.device_put(p[max(rows[0] - a, 0) : rows[1] - a], to)
        for p, (a, b) in zip(parts, itertools.pairwise(starts), strict=True)
        if rows[0] < b and a < rows[1]
    ]
    return mine[0] if len(mine) == 1 else jnp.concatenate(mine)


def in_stages(plan: PlanData) -> JaxPipeline | JaxCircular | JaxReplicas:
    """A pipelined plan in JAX. Raises PaseError if it has no model, or if its model is not a JAX program."""
    p = plan.pipeline
    assert p is not None
    if not p.replicas:
        of, traced = one_program_of if SCHEDULES[p.schedule].lockstep else pipeline_of, traced_by_jax(plan)
        return of(traced, whole_batch(plan), p, plan.mesh, plan.remat)
    many = [r.micro_batches for r in p.replicas]
    traced = traced_by_jax(plan, sum(many))
    if not step_sums(whole_batch(plan), sum(many)).mean:  # the search has none, but a file may
        raise PaseError(
            "replicas take the mean of their micro-batches' losses, but the loss is not this mean",
            where=f"'{traced.graph.name}'",
            fix="compile it again",
        )
    return JaxReplicas(
        replicas=tuple(
            pipeline_of(
                traced,
                None,
                r.pipeline,
                Mesh(names=tuple(r.mesh), sizes=tuple(r.mesh.values())),
                plan.remat,
                MicroBatchShare(first=first, of=sum(many)),
            )
            for r, first in zip(p.replicas, itertools.accumulate(many, initial=0), strict=False)
        )
    )
