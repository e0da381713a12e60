"""A bucket plan run in JAX: explicit collectives, bucket by bucket, in one order on every device.

A jitted step consists of manual regions. First, parameters that are stored split over the data axes (ZeRO, FSDP) are
gathered as the plan's messages say; this region is manual over all axes. Second, each device computes the gradient of
its share of the batch and keeps it unreduced; this region is manual over the data axes alone, and the other mesh axes
stay with XLA and the plan's shardings. Third, the local shards are cut and joined as the plan says, and reduced or
scattered bucket by bucket; this region is manual over all axes. Each link is a chain: a bucket's buffer depends on the
result of the previous one, so XLA can neither reorder nor combine them. All ranks issue one order and cannot deadlock.

What the plan sends during the next forward is sent by the next step's program, before its gradients. The updated
parameter is then needed only where forward first reads it, and the compiler may overlap the two. The numbers do not
change. Until then, the parameters of a state are one update behind; `BucketRunner.finish` applies what is pending.

Delayed and merged updates: a generation's gradients are summed locally, reduced when its messages are due, divided by
batches times devices, and applied once. Between updates the optimizer is not called.

Not executed: a second gather for backward (the parameter gathered for forward is kept), and moves of parameters that do
not lead from whole to stored in contiguous blocks over data axes. Those are left to XLA, and `left_to_xla` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pase.backends.jax_plans import jax_plan
from pase.backends.to_jax_buckets_moves import ManualRegion, Moves, moves_of, path_of, placement_of
from pase.errors import PaseError
from pase.pytree import Tree
from pase.schedule.plan import BucketPlan, check_plan
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from optax import GradientTransformation

    from pase.plan.types import PlanData

__all__ = ["BucketRunner", "RunState", "gradient_problem", "step_from_plan"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state between iterations. generations: (number, unreduced gradient sum, buffers by message) of open
    updates.
    """

    params: Tree
    opt_state: Tree
    iteration: int = 0
    generations: tuple[tuple[int, Tree, Mapping[int, Tree]], ...] = ()


def gradient_problem(
    params: Tree, links: Tree, *, forward_s: float, backward_s: float, name: str = "model"
) -> ScheduleProblem:
    """A simple problem for a parameter tree: gradients in reverse order, compute in proportion to bytes.

    It serves models that pase did not compile; a layout or a profile is more accurate.
    """
    import jax

    from pase.schedule.pipedream import Layer, problem_from_layers

    leaves = jax.tree_util.tree_leaves_with_path(params)
    total = sum(x.size for _, x in leaves)
    layers = [
        Layer(
            name=path_of(path),
            forward_s=forward_s * x.size / total,
            backward_s=backward_s * x.size / total,
            parameters=((path_of(path), x.size * x.dtype.itemsize),),
        )
        for path, x in leaves
    ]
    return problem_from_layers(layers, tuple(links), name=name)


def step_from_plan(
    plan: PlanData,
    loss_fn: Callable[..., Tree],
    optimizer: GradientTransformation,
    *,
    buckets: tuple[ScheduleProblem, BucketPlan] | None = None,
    mesh: Mesh | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    overlap: bool = True,
) -> BucketRunner:
    """A runner that trains as the plan says, and sends gradients as its bucket plan says.

    loss_fn: the function that the plan was compiled for. buckets: (problem, bucket plan) instead of the plan's own, as
    `pase.plan.buckets.scheduled` makes them. mesh: a jax.sharding.Mesh; None uses the plan's over jax.devices().
    reduction: whether the loss is a mean or a sum over the batch.

    Parameters are stored in the layout of their gradients and optimizer states. A gather after the update in the plan
    becomes a gather for the next forward. The data axes are those that split the batch and along which only parameters
    and the loss are sent. Raises PaseError if there is none, or if the model is another program at a shard's batch
    size.
    """
    import jax

    from pase.backends.to_jax_buckets_plan import batch_specs, data_axes_of, local_loss
    from pase.plan.buckets import schedule_of

    made = buckets if buckets is not None else schedule_of(plan)
    if made is None:
        raise PaseError(
            f"the plan for '{plan.model}' moves no parameter, so it needs no buckets: use plan.jax.train_step"
        )
    axes = data_axes_of(plan)
    jp = jax_plan(plan)
    return BucketRunner(
        loss_fn=local_loss(plan, loss_fn, axes),
        problem=made[0],
        plan=made[1],
        optimizer=optimizer,
        mesh=mesh if mesh is not None else jp.mesh(),
        data_axes=axes,
        specs=jax.tree.map(lambda s: s.spec, jp.gradient_shardings(jp.mesh())),
        batch_specs=batch_specs(plan, axes),
        reduction=reduction,
        overlap=overlap,
        lenient=True,
    )


@dataclass(frozen=True, kw_only=True)
class BucketRunner:
    """Trains by a bucket plan.

    loss_fn: loss(params, *batch) -> scalar, the mean (or, by ``reduction``, the sum) over the batch. mesh:
    jax.sharding.Mesh. data_axes: the mesh axes over which the batch is split. specs: a tree with the PartitionSpec in
    which each parameter is stored; None stores all of them whole. batch_specs: a tree for each batch argument, of data
    axes alone; None splits along the first dim. overlap: messages that the plan sends during the
    next step are sent by that step's program.
    lenient: parameters that the problem does not name are left to the compiler.
    """

    loss_fn: Callable[..., Tree]
    problem: ScheduleProblem
    plan: BucketPlan
    optimizer: GradientTransformation
    mesh: Mesh
    data_axes: tuple[str, ...]
    specs: Tree = None
    batch_specs: tuple[Tree, ...] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    overlap: bool = True
    lenient: bool = False
    _steps: dict[Tree, Tree] = field(default_factory=dict, repr=False, compare=False)
    _moves: dict[Tree, Moves] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        from pase.schedule.simulate import as_sequence

        check_plan(self.problem, self.plan)
        object.__setattr__(self, "plan", as_sequence(self.problem, self.plan))
        missing = [a for a in self.data_axes if a not in self.mesh.shape]
        if missing or not self.data_axes:
            raise PaseError(f"data axes {self.data_axes} are not in the mesh {dict(self.mesh.shape)}")
        if self.plan.updates[0].first:
            raise PaseError(
                "an executed plan must count its iterations from 0, the first batch of its first update"
            )

    @cached_property
    def ways(self) -> int:
        """The number of devices that share a gradient."""
        n = 1
        for a in self.data_axes:
            n *= self.mesh.shape[a]
        return n

    @cached_property
    def late(self) -> frozenset[int]:
        """Messages that the plan sends after the backward of their iteration. The next step's program sends them."""
        from pase.schedule.simulate import evaluate

        plain = self.plan.period == 1 and self.plan.staleness == 0
        if not self.overlap or not plain or self.plan.barrier:
            return frozenset()
        e = evaluate(self.problem, self.plan, timeline=False, check=False)
        assert e.starts_s is not None
        return frozenset(i for i, s in enumerate(e.starts_s.tolist()) if s >= e.ends_s * (1 - 1e-12))

    def left_to_xla(self, params: Tree) -> tuple[str, ...]:
        """Parameters whose gradients (and gathers) are left to XLA."""
        import jax

        paths = [path_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        return tuple(paths[i] for i in sorted(self.moves(params).left))

    def init(self, params: Tree) -> RunState:
        """Parameters (arrays anywhere) in the layouts of this runner, and the optimizer's first state."""
        import jax

        if self.specs is not None:
            params = jax.device_put(params, self._stored(params))
        return RunState(params=params, opt_state=self.optimizer.init(params))

    def step(self, state: RunState, *batch: Tree) -> tuple[RunState, Tree]:
        """One iteration: (next state, loss of this batch under the parameters that it was computed with)."""
        plan, it = self.plan, state.iteration
        period, position = divmod(it, plan.period)
        active = tuple(g for g, _, _ in state.generations)
        base = period * len(plan.updates)
        structure = tuple((g - base, tuple(sorted(bufs))) for g, _, bufs in state.generations)
        key = (position, structure)
        if key not in self._steps:
            self._steps[key] = self.program(it, active)
        fn, after = self._steps[key]
        given = tuple((acc, dict(bufs)) for _, acc, bufs in state.generations)
        params, opt_state, kept, loss = fn(state.params, state.opt_state, given, *batch)
        generations = tuple((g + base, acc, bufs) for g, (acc, bufs) in zip(after, kept, strict=True))
        return (
            RunState(params=params, opt_state=opt_state, iteration=it + 1, generations=generations),
            loss,
        )

    def finish(self, state: RunState) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after applying the updates that are due after the last step."""
        import jax

        due = [g for g, _, _ in state.generations if self._generation(g)[3] < state.iteration]
        if not due:
            return state.params, state.opt_state
        # The program depends only on which update it is, and on what was already sent.
        updates = tuple(g % len(self.plan.updates) for g in due)
        given = [(acc, dict(bufs)) for g, acc, bufs in state.generations if g in due]
        key = ("finish", updates, tuple(tuple(sorted(bufs)) for _, bufs in given))

        def apply(params: Tree, opt_state: Tree, given: Tree) -> Tree:
            for g, (acc, bufs) in zip(updates, given, strict=True):
                params, opt_state = self._apply(params, opt_state, g, acc, bufs)
            return params, opt_state

        if key not in self._steps:
            self._steps[key] = jax.jit(apply)
        return self._steps[key](state.params, state.opt_state, given)  # type: ignore[no-any-return]

    def _generation(self, g: int) -> tuple[int, int, int, int]:
        """(update, first, last, at) of a generation, with iterations counted from the start of the run."""
        period, u = divmod(g, len(self.plan.updates))
        update, o = self.plan.updates[u], period * self.plan.period
        return u, update.first + o, update.last + o, update.at + o

    def program(self, it: int, active: tuple[int, ...] = ()) -> tuple[Tree, tuple[int, ...]]:
        """The jitted step of iteration ``it`` with these open generations, and the ones that it leaves open, relative
        to the period's first.
        """
        import jax
        import jax.numpy as jnp

        plan = self.plan
        base = it // plan.period * len(plan.updates)
        mine = next(
            g
            for g in range(base, base + len(plan.updates))
            if self._generation(g)[1] <= it <= self._generation(g)[2]
        )
        opening = [g for g in active if self._generation(g)[3] < it]
        order = [g for g in (active if mine in active else (*active, mine)) if g not in opening]
        due = {g: self._due(g, it) for g in order}
        closing = [g for g in order if self._generation(g)[3] == it and not self.late]

        def run(params: Tree, opt_state: Tree, given: Tree, *batch: Tree) -> Tree:
            open_ = {g: [acc, dict(bufs)] for g, (acc, bufs) in zip(active, given, strict=True)}
            for g in opening:
                params, opt_state = self._apply(params, opt_state, g, *open_.pop(g))
            loss, grads = self._gradients(params, batch)
            if mine in open_:
                open_[mine][0] = jax.tree.map(jnp.add, open_[mine][0], grads)
            else:
                open_[mine] = [grads, {}]
            for g in order:
                if due[g]:
                    u = self._generation(g)[0]
                    open_[g][1].update(self._reduce(open_[g][0], open_[g][1], due[g], u))
            for g in closing:
                params, opt_state = self._apply(params, opt_state, g, *open_[g])
            kept = tuple((open_[g][0], open_[g][1]) for g in order if g not in closing)
            return params, opt_state, kept, loss

        # Relative to the next period when this iteration ends one, as `step` adds that one's base.
        left = tuple(g - base for g in order if g not in closing)
        return jax.jit(run), left

    def _due(self, g: int, it: int) -> list[int]:
        """Messages of the generation that are sent in this iteration, in plan order."""
        u, _, last, _ = self._generation(g)
        return [
            i
            for i, m in enumerate(self.plan.messages)
            if m.update == u and last + m.iteration == it and i not in self.late
        ]

    def _apply(
        self, params: Tree, opt_state: Tree, g: int, acc: Tree, bufs: Mapping[int, Tree]
    ) -> tuple[Tree, Tree]:
        """Send the remaining messages of the generation, and apply its mean gradient."""
        import jax
        import optax

        u, first, last, _ = self._generation(g)
        owed = [i for i, m in enumerate(self.plan.messages) if m.update == u and i not in bufs]
        bufs = {**bufs, **self._reduce(acc, bufs, owed, u)}
        batches = (last - first + 1) * (self.ways if self.reduction == "mean" else 1)
        mean = self._assemble(params, acc, bufs, u, batches)
        updates, opt_state = self.optimizer.update(mean, opt_state, params)
        params = jax.tree.map(
            lambda x, s: jax.lax.with_sharding_constraint(x, s),
            optax.apply_updates(params, updates),
            self._stored(params),
        )
        return params, opt_state

    # --- regions -------------------------------------------------------------------------------------------

    def _leaf_specs(self, leaves: list[Tree]) -> list[Tree]:
        import jax
        from jax.sharding import PartitionSpec as P

        if self.specs is None:
            return [P() for _ in leaves]
        return jax.tree.leaves(self.specs, is_leaf=lambda s: isinstance(s, P))  # type: ignore[no-any-return]

    def _stored(self, params: Tree) -> Tree:
        import jax
        from jax.sharding import NamedSharding

        leaves, tree = jax.tree.flatten(params)
        return jax.tree.unflatten(tree, [NamedSharding(self.mesh, s) for s in self._leaf_specs(leaves)])

    def _without_data(self, spec: Tree) -> Tree:
        from jax.sharding import PartitionSpec as P

        return P(*(tuple(a for a in axes if a not in self.data_axes) or None for axes in placement_of(spec)))

    def moves(self, params: Tree) -> Moves:
        """The plan's messages for this tree of parameters (or shapes)."""
        import jax

        found = jax.tree_util.tree_leaves_with_path(params)
        key = tuple((path_of(p), x.shape) for p, x in found)
        if key not in self._moves:
            specs = self._leaf_specs([x for _, x in found])
            self._moves[key] = moves_of(
                self.problem,
                self.plan,
                paths=[p for p, _ in key],
                ranks=[len(shape) for _, shape in key],
                placements=[placement_of(s) for s in specs],
                layers=[shape[0] if shape else 1 for _, shape in key],
                sizes=dict(self.mesh.shape),
                data_axes=self.data_axes,
                lenient=self.lenient,
            )
        return self._moves[key]

    def _gathered(self, params: Tree) -> Tree:
        """Parameters gathered over the data axes."""
        import jax
        from jax.sharding import NamedSharding

        moves = self.moves(params)
        todo = moves.messages(gradient=False)
        leaves, tree = jax.tree.flatten(params)
        specs = self._leaf_specs(leaves)
        whole = [self._without_data(s) for s in specs]
        free = [
            jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, w))
            if i in moves.left and s != w
            else x
            for i, (x, s, w) in enumerate(zip(leaves, specs, whole, strict=True))
        ]
        if not todo:
            return jax.tree.unflatten(tree, free)

        def local(*shards: Tree) -> tuple[Tree, ...]:
            region = ManualRegion(moves, shards, {}, 0)
            region.run(todo)
            return tuple(region.built(gradient=False))

        made = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(
                w if i in moves.left else s for i, (s, w) in enumerate(zip(specs, whole, strict=True))
            ),
            out_specs=tuple(whole),
            check_vma=False,
        )(*free)
        return jax.tree.unflatten(tree, made)

    def _gradients(self, params: Tree, batch: tuple[Tree, ...]) -> tuple[Tree, Tree]:
        """(loss, gradients of each data shard: leaves [ways, …] split over the data axes)."""
        import jax
        from jax.sharding import PartitionSpec as P

        def local(params: Tree, *batch: Tree) -> Tree:
            loss, grads = jax.value_and_grad(self.loss_fn)(params, *batch)
            total = jax.lax.pmean if self.reduction == "mean" else jax.lax.psum
            return total(loss, self.data_axes), jax.tree.map(lambda g: g[None], grads)

        split = P(self.data_axes)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(), *(self.batch_specs if self.batch_specs is not None else [split for _ in batch])),
            out_specs=(P(), split),
            axis_names=set(self.data_axes),
            check_vma=False,
        )(self._gathered(params), *batch)  # type: ignore[no-any-return]

    def _shards(self, grads: Tree) -> tuple[list[Tree], tuple[Tree, ...]]:
        """(leaves, specs) of unreduced gradients, for a region that is manual over all axes."""
        import jax
        from jax.sharding import PartitionSpec as P

        leaves = jax.tree.leaves(grads)
        specs = tuple(P(self.data_axes, *self._without_data(s)) for s in self._leaf_specs(leaves))
        return leaves, specs

    def _reduce(self, grads: Tree, bufs: Mapping[int, Tree], todo: list[int], update: int) -> dict[int, Tree]:
        """The buffers that these messages leave, summed but not divided. Gather messages leave none."""
        import jax
        from jax.sharding import PartitionSpec as P

        moves = self.moves(jax.eval_shape(lambda t: jax.tree.map(lambda g: g[0], t), grads))
        ours = [i for i in moves.messages(gradient=True, update=update) if i in todo]
        leaves, specs = self._shards(grads)
        if not ours:
            return {}
        given = {i: b for i, b in bufs.items() if self.plan.messages[i].update == update}

        def local(given: dict[int, Tree], *shards: Tree) -> dict[int, Tree]:
            return ManualRegion(moves, [s[0] for s in shards], given, update).run(ours)

        each = P(self.mesh.axis_names)
        return jax.shard_map(  # type: ignore[no-any-return]
            local,
            mesh=self.mesh,
            in_specs=(dict.fromkeys(given, each), *specs),
            out_specs=dict.fromkeys(ours, each),
            check_vma=False,
        )(given, *leaves)

    def _assemble(self, params: Tree, acc: Tree, bufs: Mapping[int, Tree], update: int, count: int) -> Tree:
        """The mean gradient, from the update's buffers, as a tree in the layouts in which parameters are stored."""
        import jax
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        moves = self.moves(params)
        stored, tree = jax.tree.flatten(params)
        leaves, specs = self._shards(acc)
        outs = self._leaf_specs(stored)
        ours = [i for i in range(len(leaves)) if i not in moves.left]

        def local(given: dict[int, Tree], *shards: Tree) -> tuple[Tree, ...]:
            built = ManualRegion(moves, [s[0] for s in shards], given, update).built(gradient=True)
            return tuple(built[i] for i in ours)

        given = {i: b for i, b in bufs.items() if self.plan.messages[i].update == update}
        made: tuple[Tree, ...] = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(dict.fromkeys(given, P(self.mesh.axis_names)), *specs),
            out_specs=tuple(outs[i] for i in ours),
            check_vma=False,
        )(given, *leaves)
        by_leaf = dict(zip(ours, made, strict=True))
        for i in moves.left:
            by_leaf[i] = jax.lax.with_sharding_constraint(
                leaves[i].sum(axis=0), NamedSharding(self.mesh, outs[i])
            )
        return jax.tree.unflatten(tree, [(by_leaf[i] / count).astype(x.dtype) for i, x in enumerate(stored)])
