"""Runs a bucket plan in JAX: explicit collectives, message by message, in the same order on every device.

A plan that pase compiled runs as its own step in the manual lowering (``step_from_plan``). ``BucketRunner`` runs a loss
function, a problem and a bucket plan that were not made by compile. Its jitted step consists of three manual regions
(shard_map). First, parameters that are stored split over the data axes (ZeRO, FSDP) are gathered according to the
plan's messages. This region is manual over all axes. Second, each device computes the gradient of its share of the
batch and keeps it unreduced. This region is manual only over the data axes; XLA and the function's shardings handle the
other mesh axes. Third, gradients are sent as messages of a local program (``parameter_program``), as in any step in the
manual lowering.

Messages that the plan sends during the next forward are sent by the next step's program, before its gradients. The
updated parameter is then needed only where forward first reads it, so the compiler may overlap the two. The numbers do
not change. Until then, the parameters of a state are one update behind; ``finish`` applies the pending update.

For delayed and merged updates, gradients are summed locally, reduced when their messages are due, divided by batches
times devices, and applied once. Between updates the optimizer is not called.

A second all-gather for backward is not executed; the parameter that was gathered for forward is kept. If the reshard
steps of a parameter do not lead from its whole form to its stored one over data axes, the parameter is not in messages;
``left_over`` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pase.backends.jax.check_plans import CheckedStep
from pase.backends.jax.make import jax_plan
from pase.backends.jax.spmd.collectives import JaxArrays
from pase.backends.jax.spmd.messages import Sending
from pase.backends.jax.steps.delayed import DelayedState, DelayedStepper
from pase.backends.jax.steps.parameter_program import ParameterProgram, StoredParameter, parameter_program
from pase.backends.jax.steps.updates import DelayedIteration, OpenUpdate, WaitingGradients, sent_updates
from pase.errors import PaseError
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.leaves import combine
from pase.local.reshard import resharded
from pase.machine import Mesh
from pase.plan.constraints import Placement
from pase.pytree import Tree
from pase.schedule.plan import BucketPlan, check_plan
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec
    from optax import GradientTransformation

    from pase.backends.jax.plan import JaxPlan
    from pase.backends.jax.steps.stepper import Stepper
    from pase.plan.types import PlanData

__all__ = ["BucketRunner", "PlanRunner", "RunState", "gradient_problem", "step_from_plan"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state between iterations.

    waiting: the gradients of open updates, the oldest first (``pase.backends.jax.steps.updates.WaitingGradients``).
    """

    params: Tree
    opt_state: Tree
    iteration: int = 0
    waiting: tuple[WaitingGradients, ...] = ()


def gradient_problem(
    params: Tree, links: Tree, *, forward_s: float, backward_s: float, name: str = "model"
) -> ScheduleProblem:
    """A simple problem for a parameter tree: gradients in reverse order, compute in proportion to element counts.

    It is for models that pase did not compile. A problem made from a plan or a profile is more accurate.
    """
    import jax

    from pase.schedule.pipedream import Layer, problem_from_layers

    leaves = jax.tree_util.tree_leaves_with_path(params)
    total = sum(x.size for _, x in leaves)
    layers = [
        Layer(
            name=_path_of(path),
            forward_s=forward_s * x.size / total,
            backward_s=backward_s * x.size / total,
            parameters=((_path_of(path), x.size * x.dtype.itemsize),),
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
    mesh: JaxMesh | None = None,
    overlap: bool = True,
) -> PlanRunner:
    """A runner that trains with the plan's step in the manual lowering, and sends the messages of its bucket plan.

    loss_fn: the function that the plan was compiled for. buckets: (problem, bucket plan) instead of the plan's own, as
    returned by `pase.plan.buckets.scheduled`. mesh: a jax.sharding.Mesh, by default the plan's over jax.devices().
    overlap: whether messages that the plan sends during the next forward are sent by the next step's program.

    Raises PaseError if the plan has no collective of a parameter, or was compiled for another program than loss_fn.
    """
    from pase.plan.buckets import holding, schedule_of

    made = buckets if buckets is not None else schedule_of(plan)
    if made is None:
        raise PaseError(
            "it has no collective of a parameter or gradient, so there is nothing to put into buckets",
            where=f"the plan for '{plan.model}'",
            fix="use plan.jax.train_step(optimizer)",
        )
    jp = replace(jax_plan(holding(plan, *made)), across=overlap)
    _require_same(jp, loss_fn)
    mesh = mesh if mesh is not None else jp.mesh()
    step = jp.train_step(optimizer, mesh, donate=False, lowering="manual")
    return PlanRunner(jax=jp, optimizer=optimizer, mesh=mesh, stepper=step)


def _require_same(jp: JaxPlan, loss_fn: Callable[..., Tree]) -> None:
    """Raise PaseError unless the plan's program is that of the function."""
    import jax

    from pase.frontends.jax.frontend import trace

    if jp.traced.padding:
        return  # the plan's program is padded and the function is not, so they cannot be compared

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jp.traced.jaxpr.in_avals]
    given = jax.tree.unflatten(jp.traced.in_tree, shapes)
    args = [combine(x, kept) for x, kept in zip(given, jp.traced.kept, strict=True)]
    found = trace(loss_fn, *args, name=jp.traced.graph.name, unknown="replicate")
    if (found.operands, found.results) != (jp.traced.operands, jp.traced.results):
        raise PaseError(
            f"the plan for '{jp.traced.graph.name}' was compiled for another program than this function",
            where="loss_fn",
            fix="pass the function that was compiled, or compile this one",
        )


@dataclass(frozen=True, kw_only=True)
class PlanRunner:
    """Trains with a compiled plan and its bucket plan. ``step_from_plan`` makes it."""

    jax: JaxPlan
    optimizer: GradientTransformation
    mesh: JaxMesh
    stepper: Stepper | DelayedStepper | CheckedStep

    @without_mesh()
    def init(self, params: Tree) -> RunState:
        """The parameters in the plan's layouts, and the optimizer's first state. params: arrays in any layout."""
        (placed,) = self.jax.device_put(params, mesh=self.mesh)
        return RunState(params=placed, opt_state=self.jax.init(self.optimizer, params, self.mesh))

    @without_mesh()
    def step(self, state: RunState, *batch: Tree) -> tuple[RunState, Tree]:
        """Run one iteration. Returns (next state, loss of this batch under the parameters before the update)."""
        if not isinstance(self.stepper, DelayedStepper):
            params, opt_state, value = self.stepper(state.params, state.opt_state, *batch)
            after = RunState(params=params, opt_state=opt_state, iteration=state.iteration + 1)
        else:
            params, held, value = self.stepper(state.params, _held(state), *batch)
            after = RunState(
                params=params, opt_state=held.optimizer, iteration=held.iteration, waiting=held.waiting
            )
        return after, value[0] if self.jax.traced.has_aux else value

    @without_mesh()
    def finish(self, state: RunState) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after the last step, with all updates that are still due applied."""
        if not isinstance(self.stepper, DelayedStepper):
            return state.params, state.opt_state
        return self.stepper.finish(state.params, _held(state))

    def left_over(self) -> tuple[str, ...]:
        """Parameters that are in no message. Each of them is sent by itself, where it is read."""
        program = self.jax.program
        carried = {program.transfers[p.transfer].src for m in program.messages for p in m.chunks}
        moved = {
            t.src for t in program.transfers if t.src in program.parameters and (t.backward or t.forward)
        }
        return tuple(sorted(moved - carried))


def _held(state: RunState) -> DelayedState:
    return DelayedState(optimizer=state.opt_state, waiting=state.waiting, iteration=state.iteration)


@dataclass(frozen=True, kw_only=True)
class BucketRunner:
    """Trains a loss function with a bucket plan.

    loss_fn: loss(params, *batch) -> scalar, the mean over the batch (or the sum, see ``reduction``). mesh: a
    jax.sharding.Mesh. data_axes: the mesh axes over which the batch is split. specs: a tree with the PartitionSpec in
    which each parameter is stored; None stores all of them replicated. batch_specs: for each batch argument, a tree of
    PartitionSpecs that name only data axes; None splits each argument along its first dim. overlap: whether messages
    that the plan sends during the next step are sent by that step's program. lenient: whether parameters that the
    problem does not name are sent by themselves; otherwise they are an error.
    """

    loss_fn: Callable[..., Tree]
    problem: ScheduleProblem
    plan: BucketPlan
    optimizer: GradientTransformation
    mesh: JaxMesh
    data_axes: tuple[str, ...]
    specs: Tree = None
    batch_specs: tuple[Tree, ...] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    overlap: bool = True
    lenient: bool = False
    _steps: dict[Tree, Tree] = field(default_factory=dict, repr=False, compare=False)
    _programs: dict[Tree, ParameterProgram] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        from pase.schedule.simulate import as_sequence

        check_plan(self.problem, self.plan)
        object.__setattr__(self, "plan", as_sequence(self.problem, self.plan))
        missing = [a for a in self.data_axes if a not in self.mesh.shape]
        if missing or not self.data_axes:
            raise PaseError(
                f"{self.data_axes} are not axes of the mesh {dict(self.mesh.shape)}",
                where="data_axes",
                fix="give the mesh axes over which the batch is split",
            )
        if self.plan.updates[0].first:
            raise PaseError(
                f"its first update begins with iteration {self.plan.updates[0].first}, but a plan that is run must "
                "count iterations from 0",
                where="plan",
                fix="shift the iterations of the bucket plan",
            )

    @cached_property
    def ways(self) -> int:
        """The number of devices that share a gradient."""
        n = 1
        for a in self.data_axes:
            n *= self.mesh.shape[a]
        return n

    def parameters(self, params: Tree) -> ParameterProgram:
        """The local program of these parameters. params: arrays or shapes."""
        import jax

        found = jax.tree_util.tree_leaves_with_path(params)
        key = tuple((_path_of(path), x.shape) for path, x in found)
        if key not in self._programs:
            specs = [_placement_of(s) for s in self._leaf_specs([x for _, x in found])]
            self._programs[key] = parameter_program(
                self.problem,
                self.plan,
                [
                    StoredParameter(path=p, shape=shape, placement=(*s, *((),) * (len(shape) - len(s))))
                    for (p, shape), s in zip(key, specs, strict=True)
                ],
                mesh=Mesh(names=tuple(self.mesh.axis_names), sizes=tuple(self.mesh.axis_sizes)),
                data_axes=self.data_axes,
                across=self.overlap,
                lenient=self.lenient,
            )
        return self._programs[key]

    def left_over(self, params: Tree) -> tuple[str, ...]:
        """Parameters that are in no message. Each of them is sent by itself."""
        import jax

        program = self.parameters(params)
        paths = [_path_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        return tuple(p for p, of in zip(paths, program.numbers, strict=True) if of[0] not in program.carried)

    @without_mesh()
    def init(self, params: Tree) -> RunState:
        """The parameters in the layouts of this runner, and the optimizer's first state."""
        import jax

        if self.specs is not None:
            params = jax.device_put(params, self._stored(params))
        return RunState(params=params, opt_state=self.optimizer.init(params))

    @without_mesh()
    def step(self, state: RunState, *batch: Tree) -> tuple[RunState, Tree]:
        """Run one iteration. Returns (next state, loss of this batch under the parameters before the update)."""
        fn = self.program(state.params, state.iteration)
        params, opt_state, waiting, loss = fn(state.params, state.opt_state, state.waiting, *batch)
        after = RunState(params=params, opt_state=opt_state, iteration=state.iteration + 1, waiting=waiting)
        return after, loss

    @without_mesh()
    def finish(self, state: RunState) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after the last step, with all updates that are still due applied."""
        import jax

        program = self.parameters(state.params)
        iteration = DelayedIteration(program=program.local, number=state.iteration)
        if not iteration.overdue:
            return state.params, state.opt_state
        return jax.jit(self._caught_up(program, iteration))(  # type: ignore[no-any-return]
            state.params, state.opt_state, state.waiting
        )

    def program(self, params: Tree, number: int) -> Tree:
        """The jitted step of an iteration.

        It is f(params, optimizer state, waiting, *batch) -> (params, optimizer state, waiting, loss). params: arrays or
        shapes. number: the iteration.
        """
        import jax

        program = self.parameters(params)
        iteration = DelayedIteration(program=program.local, number=number)

        def run(params: Tree, opt_state: Tree, waiting: Tree, *batch: Tree) -> Tree:
            late = len(iteration.overdue)
            if late:
                params, opt_state = self._caught_up(program, iteration)(params, opt_state, waiting)
            loss, grads = self._gradients(program, params, batch)
            left, sums = self._sent_updates(
                program, iteration, iteration.current, waiting[late:], params, grads
            )
            if sums is not None:
                params, opt_state = self._updated(iteration.current[0], params, opt_state, sums)
            return params, opt_state, tuple(left), loss

        key = (id(program), iteration.key)
        if key not in self._steps:
            self._steps[key] = jax.jit(run)
        return self._steps[key]

    def _caught_up(self, program: ParameterProgram, iteration: DelayedIteration) -> Callable[..., Tree]:
        """f(params, optimizer state, waiting) -> (params, optimizer state) after the overdue update is applied."""

        def run(params: Tree, opt_state: Tree, waiting: Tree) -> Tree:
            due = iteration.overdue
            _, sums = self._sent_updates(program, iteration, due, waiting[: len(due)], params, None)
            return self._updated(due[0], params, opt_state, sums)

        return run

    def _updated(self, u: OpenUpdate, params: Tree, opt_state: Tree, sums: Tree) -> tuple[Tree, Tree]:
        import jax
        import optax

        count = (u.last - u.first + 1) * (self.ways if self.reduction == "mean" else 1)
        mean = jax.tree.map(lambda g, x: (g / count).astype(x.dtype), sums, params)
        updates, opt_state = self.optimizer.update(mean, opt_state, params)
        updated = optax.apply_updates(params, updates)
        return jax.tree.map(jax.lax.with_sharding_constraint, updated, self._stored(params)), opt_state

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

        return P(*(tuple(a for a in axes if a not in self.data_axes) or None for axes in _placement_of(spec)))

    def _gathered(self, program: ParameterProgram, params: Tree) -> Tree:
        """Parameters gathered over the data axes."""
        import jax

        leaves, tree = jax.tree.flatten(params)
        specs = self._leaf_specs(leaves)

        def local(*shards: Array) -> list[Array]:
            sending = Sending(
                program=program.local,
                way="there",
                values={(k, None): x for k, x in program.parts(shards).items()},
                messages=[m for m in program.local.messages if m.way == "there"],
            )
            return program.joined({k: sending.finished((k, None)) for k in program.parts(shards)})

        made = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=[self._without_data(s) for s in specs],
            check_vma=False,
        )(*leaves)
        return jax.tree.unflatten(tree, made)

    def _gradients(
        self, program: ParameterProgram, params: Tree, batch: tuple[Tree, ...]
    ) -> tuple[Tree, Tree]:
        """(loss, gradients of each data shard). The gradients' leaves are [ways, …], split over the data axes."""
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
        )(self._gathered(program, params), *batch)  # type: ignore[no-any-return]

    def _sent_updates(
        self,
        program: ParameterProgram,
        iteration: DelayedIteration,
        updates: Sequence[OpenUpdate],
        held: Sequence[WaitingGradients],
        params: Tree,
        grads: Tree | None,
    ) -> tuple[list[WaitingGradients], Tree | None]:
        """Send the iteration's messages for these updates.

        Returns (the gradients that still wait, the sums of the update that is due, or None). grads: the unreduced
        gradients of this iteration; None if they are not computed yet.
        """
        import jax
        from jax.sharding import PartitionSpec as P

        leaves, tree = jax.tree.flatten(params)
        specs = self._leaf_specs(leaves)
        devices = JaxArrays(program.local.mesh)

        def local(held: Tree, *shards: Array) -> Tree:
            new = program.parts([x[0] for x in shards]) if shards else {}

            def merged(_: OpenUpdate, mine: WaitingGradients) -> WaitingGradients:
                fresh: WaitingGradients = {"values": {}, "columns": {}, "sums": {}}
                for k, g in new.items():
                    if k in program.carried:
                        fresh["values"][k, -1] = g
                    else:
                        shape = program.local.result(program.local.transfers[k].tensor).shape
                        fresh["sums"][k,] = resharded(
                            g, program.local.reshard_steps(k, "back"), shape, "sum", devices
                        )
                if not mine:
                    return fresh
                return {**jax.tree.map(jax.numpy.add, {**mine, "columns": {}}, fresh)}

            kept, due = sent_updates(iteration, updates, jax.tree.map(lambda x: x[0], list(held)), merged)
            sums = []
            if due is not None:
                of = {k: x for (k, _), x in due.parts.items()} | {k: x for (k,), x in due.own.items()}
                sums = program.joined(of)
            return jax.tree.map(lambda x: x[None], kept), sums

        each = P(self.mesh.axis_names)
        shards = [] if grads is None else jax.tree.leaves(grads)
        due = any(u.due == iteration.number for u in updates)
        kept, sums = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(
                each,
                *(P(self.data_axes, *self._without_data(s)) for s, _ in zip(specs, shards, strict=False)),
            ),
            out_specs=(each, list(specs) if due else []),
            check_vma=False,
        )(list(held), *shards)
        return kept, jax.tree.unflatten(tree, sums) if due else None


def _path_of(keys: tuple[object, ...]) -> str:
    """The name of a parameter in plans and problems, such as ``blocks.0.w``."""
    import jax

    return jax.tree_util.keystr(keys, simple=True, separator=".")


def _placement_of(spec: PartitionSpec) -> Placement:
    """A PartitionSpec as axes per dim."""
    return tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec)
