"""Trains with a plan and a bucket plan: explicit collectives, message by message, in the same order on every device.

The step is the plan's own in the manual lowering. Messages that the bucket plan sends during the next forward are sent
by the next step's program, before its gradients. The updated parameter is then needed only where forward first reads
it, so the compiler may overlap the two. The numbers do not change. Until then, the parameters of a state are one update
behind; ``finish`` applies the pending update.

For delayed and merged updates, gradients are summed locally, reduced when their messages are due, and applied once.
Between updates the optimizer is not called.

A second all-gather for backward is not executed if messages are sent outside of the step's computation; the parameter
that was gathered for forward is kept. ``left_over`` names the parameters that are in no message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.jax.make import one_program_plan
from pase.backends.jax.steps.delayed import DelayedState, DelayedStepper
from pase.backends.jax.steps.updates import WaitingGradients
from pase.errors import PaseError
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.leaves import combine
from pase.local.bucket_messages import ProgramSchedule
from pase.plan.buckets import problem_of, schedule_of
from pase.pytree import Tree
from pase.schedule.plan import BucketPlan, check_plan
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from jax.sharding import Mesh as JaxMesh
    from optax import GradientTransformation

    from pase.backends.jax.one_program import OneProgramPlan
    from pase.backends.jax.steps.stepper import Stepper
    from pase.plan.types import PlanData

__all__ = ["PlanRunner", "RunState", "step_from_plan"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state between iterations.

    held: the optimizer's state. If messages are sent outside of the step's computation, it is a
    ``pase.backends.jax.steps.delayed.DelayedState`` after the first step.
    """

    params: Tree
    held: Tree

    @property
    def opt_state(self) -> Tree:
        """The optimizer's state alone."""
        return DelayedState.of(self.held).optimizer

    @property
    def waiting(self) -> tuple[WaitingGradients, ...]:
        """The gradients of open updates, the oldest first."""
        return DelayedState.of(self.held).waiting


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

    loss_fn: the function that the plan was compiled for. buckets: (problem, bucket plan) instead of the plan's own. The
    problem has the tensors of ``plan.bucket_problem``; its links, and the seconds of its blocks, may be others, such as
    measured ones. mesh: a jax.sharding.Mesh, by default the plan's over jax.devices(). overlap: whether messages that
    the plan sends during the next forward are sent by the next step's program.

    Raises PaseError if the plan has no collective of a parameter, if it was compiled for another program than loss_fn,
    or if the bucket plan is for other tensors.
    """
    made = _of_this_plan(plan, *buckets) if buckets is not None else schedule_of(plan)
    if made is None:
        raise PaseError(
            "it has no collective of a parameter or gradient, so there is nothing to put into buckets",
            where=f"the plan for '{plan.model}'",
            fix="use plan.jax.train_step(optimizer)",
        )
    jp = replace(one_program_plan(plan), schedule=ProgramSchedule.of(plan, made), across=overlap)
    _require_same(jp, loss_fn)
    mesh = mesh if mesh is not None else jp.mesh()
    step = jp.plain_step(optimizer, mesh, donate=False, lowering="manual")
    return PlanRunner(jax=jp, optimizer=optimizer, mesh=mesh, stepper=step)


def _of_this_plan(
    plan: PlanData, problem: ScheduleProblem, buckets: BucketPlan
) -> tuple[ScheduleProblem, BucketPlan]:
    """(problem, bucket plan in one order). Raises PaseError unless they are for the plan's collectives."""
    from pase.schedule.simulate import as_sequence

    own = problem_of(plan, links=problem.links)
    if [t.name for t in own.tensors] != [t.name for t in problem.tensors]:
        raise PaseError(
            "its tensors are not the collectives of the plan",
            where=f"problem '{problem.name}'",
            fix="make it from plan.bucket_problem, with other links or seconds",
        )
    check_plan(problem, buckets)
    return problem, as_sequence(problem, buckets)


def _require_same(jp: OneProgramPlan, loss_fn: Callable[..., Tree]) -> None:
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

    jax: OneProgramPlan
    optimizer: GradientTransformation
    mesh: JaxMesh
    stepper: Stepper | DelayedStepper

    @without_mesh()
    def init(self, params: Tree) -> RunState:
        """The parameters in the plan's layouts, and the optimizer's first state. params: arrays in any layout."""
        (placed,) = self.jax.device_put(params, mesh=self.mesh)
        return RunState(params=placed, held=self.jax.init(self.optimizer, params, self.mesh))

    @without_mesh()
    def step(self, state: RunState, *batch: Tree) -> tuple[RunState, Tree]:
        """Run one iteration. Returns (next state, loss of this batch under the parameters before the update)."""
        params, held, value = self.stepper(state.params, state.held, *batch)
        return RunState(params=params, held=held), value[0] if self.jax.traced.has_aux else value

    @without_mesh()
    def finish(self, state: RunState) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after the last step, with all updates that are still due applied."""
        if not isinstance(self.stepper, DelayedStepper):
            return state.params, state.held
        return self.stepper.finish(state.params, state.held)

    def left_over(self) -> tuple[str, ...]:
        """Parameters that are in no message. Each of them is sent by itself, where it is read."""
        program = self.jax.program
        carried = {program.transfers[p.transfer].src for m in program.messages for p in m.chunks}
        moved = {
            t.src for t in program.transfers if t.src in program.parameters and (t.backward or t.forward)
        }
        return tuple(sorted(moved - carried))
