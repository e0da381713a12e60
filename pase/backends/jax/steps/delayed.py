"""A train step whose gradients are sent or applied in later steps, as DeFT's bucket plans merge and delay them.

The step's state contains the waiting gradients. Each device keeps its own, unreduced, and adds them up over the steps
of an update. The plan says in which step each message is sent, and how gradients are merged and split into messages.
Messages with gradients of earlier steps do not depend on this step, so they may overlap with all of it. When an update
is due, the reduced gradients go back through the views and casts of their parameters, their mean is taken, and the
optimizer is called. Otherwise it is not called. Each iteration of the plan's period is a separate program.

If a plan without delays sends messages during the next forward, the next step may send them and apply the update before
its own forward. The numbers are then those of the plain step.

One walk over the jaxpr finds the parameters in the form that their readers need, as in a step with hoisted all-gathers
(``hoisted``). The gradients with respect to these forms are what waits. Gradients that are in no message are reduced in
their own step and wait as sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.spmd.messages import DeviceSending
from pase.backends.jax.spmd.prefetch import prefetched
from pase.backends.jax.spmd.values import Arrivals, NotManual, besides_equations, faults_at
from pase.backends.jax.steps.updates import (
    DelayedIteration,
    OpenUpdate,
    UpdateSums,
    WaitingGradients,
    fit_into,
    key_of_part,
    parts_of,
    sent_updates,
    summed_in_step,
    waiting_bytes,
    waiting_keys,
)
from pase.files.quantities import bytes_text
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.leaves import arrays
from pase.frontends.jax.versions import called, without_dead_code
from pase.ir import named, simplify
from pase.local.types import LocalProgram, TransferPart
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax.spmd.lower import Manual
    from pase.backends.jax.steps.stepper import Stepper
    from pase.backends.jax.steps.train import Training

__all__ = ["DelayedState", "DelayedStepper", "delayed_step"]

_INSTEAD, _FINISH = "instead", "finish"
_OWN = "; each step applies its own gradients"
_NAMED = 3
"""How many parameters a warning names at most."""


@dataclass(kw_only=True)
class DelayedState:
    """What a delayed step passes to the next one. It is a pytree of arrays and one number.

    optimizer: the optimizer's state. waiting: the waiting gradients of each open update, the oldest first. iteration:
    how many steps were made.
    """

    optimizer: Tree
    waiting: tuple[WaitingGradients, ...] = ()
    iteration: int = 0

    @classmethod
    def of(cls, state: Tree) -> DelayedState:
        """The state that a step passes on. state: this, or the optimizer's state before the first step."""
        return state if isinstance(state, cls) else cls(optimizer=state)


@dataclass(frozen=True, kw_only=True)
class _ReadParameters:
    """Parameters in the form that their readers need.

    arrive: gradient carriers -> the parameters after their all-gathers; parameters that messages gather are returned
    as they are stored. begin: gradient carriers -> the arrays that receive the gradients. tree: the tree structure of a
    walk's ``Arrivals``. places: for each parameter, (number of its transfer, number of loops around it). wide: for each
    parameter, the dtype in which gradients are added.
    """

    program: LocalProgram
    arrive: Callable[[dict[int, Tree]], list[Tree]]
    begin: Callable[[dict[int, Tree]], list[Tree]]
    tree: Tree
    places: list[tuple[int, int]]
    wide: list[str]

    @classmethod
    def of(
        cls, manual: Manual, leaves: Sequence[Array], gradient_carriers: dict[int, Array]
    ) -> _ReadParameters:
        import jax

        program = manual.program
        numbers = frozenset(number for number, _ in parts_of(program))
        gathered = {p.transfer for m in program.messages if m.way == "there" for p in m.chunks}
        forms: list[Tree] = []

        def finding(own: dict[int, Array], begins: bool) -> list[Tree]:
            arrivals = Arrivals(numbers=numbers, begins=True)
            manual.forward(leaves, own, arrivals)
            found = jax.tree_util.tree_flatten_with_path(
                arrivals.found, is_leaf=lambda x: isinstance(x, tuple)
            )
            forms[:] = [*found, jax.tree.leaves(arrivals.wide)]
            return [of[1 if begins else 2 if int(path[-1].key) in gathered else 0] for path, of in found[0]]

        programs = [
            without_dead_code(jax.make_jaxpr(lambda own, k=k: finding(own, k))(gradient_carriers))
            for k in (False, True)
        ]
        places = [(int(path[-1].key), len(path) - 1) for path, _ in forms[0]]
        if lost := numbers - {number for number, _ in places}:
            tensors = ", ".join(sorted(program.transfers[k].tensor for k in lost))
            raise NotManual(
                f"the gradients of {tensors} must wait for later steps, but nothing reads these tensors"
            )
        return cls(
            program=program,
            arrive=lambda own: called(programs[0])(*jax.tree.leaves(own)),
            begin=lambda own: called(programs[1])(*jax.tree.leaves(own)),
            tree=forms[1],
            places=places,
            wide=forms[2],
        )

    def arrived(self, gradient_carriers: dict[int, Array]) -> list[Array]:
        """The parameters where they are read, after the messages that gather some of them."""
        found = self.arrive(gradient_carriers)
        messages = [m for m in self.program.messages if m.way == "there"]
        gathered = {p.transfer for m in messages for p in m.chunks}
        parts = self.parts(found)
        sending = DeviceSending(
            program=self.program,
            way="there",
            values={part: x for part, x in parts.items() if part[0] in gathered},
            messages=messages,
        )
        return self.joined(
            {part: sending.finished(part) if part[0] in gathered else x for part, x in parts.items()}, found
        )

    def parts(self, values: Sequence[Array]) -> dict[TransferPart, Array]:
        """Each parameter's array. For a parameter that a loop reads, the array of each iteration of the loop."""
        out: dict[TransferPart, Array] = {}
        for (number, loops), x in zip(self.places, values, strict=True):
            iterations = [iteration for n, iteration in parts_of(self.program) if n == number]
            rows = x.reshape(-1, *x.shape[loops:])
            if len(iterations) != len(rows):
                raise NotManual(
                    f"'{self.program.transfers[number].tensor}' is read {len(rows)} times, and its gradient waits "
                    f"{len(iterations)} times, which is a defect of pase.local"
                )
            out |= {(number, None if iterations == [None] else k): row for k, row in enumerate(rows)}
        return out

    def joined(self, parts: Mapping[TransferPart, Array], like: Sequence[Array]) -> list[Array]:
        """The inverse of ``parts``. like: arrays whose loop dims and dtypes the results get."""
        import jax.numpy as jnp

        out = []
        for (number, loops), x in zip(self.places, like, strict=True):
            iterations = sorted((part for part in parts if part[0] == number), key=key_of_part)
            rows = jnp.stack([parts[part] for part in iterations])
            out.append(rows.reshape(*x.shape[:loops], *rows.shape[1:]).astype(x.dtype))
        return out


@dataclass(frozen=True, kw_only=True)
class _DeviceStep:
    """One iteration on one device."""

    manual: Manual
    iteration: DelayedIteration

    @property
    def program(self) -> LocalProgram:
        return self.manual.program

    @cached_property
    def summed_here(self) -> list[int]:
        """The trained leaves that have a gradient in no message."""
        rest, names = summed_in_step(self.program), self.manual.plan.leaf_names()
        return [i for i in self.manual.trained if self.program.maker[names[i]].node in rest]

    def before(self, *given: Tree) -> Tree:
        """The gradients of the overdue update, which is applied before the rest of this iteration.

        given: the parameters, and the waiting gradients.
        """
        import jax
        import jax.numpy as jnp

        *params, held = given
        specs = self.manual.plan.traced.jaxpr.in_avals[len(params) :]
        names = self.manual.plan.leaf_names()[len(params) :]
        layouts = [self.program.result(name).layout for name in names]
        batch = [
            jnp.zeros(layout.local_shape(a.shape, self.program.mesh), a.dtype)
            for a, layout in zip(specs, layouts, strict=True)
        ]
        leaves = [
            *params,
            *batch,
        ]  # the walk needs a batch, but the parameters that it finds do not depend on it
        gradient_carriers = self.manual.gradient_carriers(leaves)
        found = _ReadParameters.of(self.manual, leaves, gradient_carriers)
        _, due = sent_updates(self.iteration, self.iteration.overdue, jax.tree.map(lambda x: x[0], held))
        assert due is not None
        return self._applied(due, found, gradient_carriers)

    def __call__(self, *given: Tree) -> Tree:
        """(results, the gradients that wait after this step, gradients of the trained leaves if an update is due)."""
        import jax

        *leaves, held = given
        gradient_carriers = self.manual.gradient_carriers(leaves)
        found = _ReadParameters.of(self.manual, leaves, gradient_carriers)
        outs, there, own = self._graded(leaves, gradient_carriers, found)
        kept, due = sent_updates(
            self.iteration,
            self.iteration.current,
            jax.tree.map(lambda x: x[0], held),
            lambda u, mine: self._merged(u, mine, found.parts(there), own, found),
        )
        grads = [] if due is None else self._applied(due, found, gradient_carriers)
        return outs, jax.tree.map(lambda x: x[None], kept), grads

    def _graded(
        self,
        leaves: Sequence[Array],
        gradient_carriers: dict[int, Array],
        found: _ReadParameters,
    ) -> tuple[list[Array], list[Array], dict[int, Array]]:
        """(results, gradients of the arrived parameters, gradients of the gradient carriers).

        The last are the gradients of parameters that are not among the arrived ones.
        """
        import jax

        numbers = frozenset(number for number, _ in found.places)

        def of(mine: Sequence[Array], own: dict[int, Array]) -> tuple[Array, list[Tree]]:
            given = Arrivals(numbers=numbers, given=jax.tree.unflatten(found.tree, mine))
            outs = self.manual.forward(leaves, own, given)
            return outs[0], outs

        differentiated = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
        if self.manual.plan.prefetch:
            differentiated = prefetched(differentiated)
        (_, outs), (there, own) = differentiated(found.arrived(gradient_carriers), gradient_carriers)
        return outs, there, own

    def _merged(
        self,
        u: OpenUpdate,
        held: WaitingGradients,
        new: Mapping[TransferPart, Array],
        own: Mapping[int, Array],
        found: _ReadParameters,
    ) -> WaitingGradients:
        """The update's gradients with those of this iteration added.

        In an update of several iterations they are added in the dtype in which their parameter is stored.
        """
        wide = {number: w for (number, _), w in zip(found.places, found.wide, strict=True)}
        before = held.get("values", {})
        values: dict[tuple[int, ...], Array] = {}
        for part, g in new.items():
            total = g.astype(wide[part[0]]) if u.last > u.first else g
            if key_of_part(part) in before:
                total = before[key_of_part(part)] + total
            values[key_of_part(part)] = total.astype(g.dtype) if u.last == self.iteration.number else total
        earlier = held.get("sums", {})
        sums: dict[tuple[int, ...], Array] = {
            (i,): own[i] + earlier[i,] if (i,) in earlier else own[i] for i in self.summed_here
        }
        return {"values": values, "columns": {}, "sums": sums}

    def _applied(
        self, due: UpdateSums, found: _ReadParameters, gradient_carriers: dict[int, Array]
    ) -> list[Array]:
        """For each trained leaf, the mean gradient over the update's iterations."""
        import jax

        begins, back = jax.vjp(found.begin, gradient_carriers)
        (total,) = back(found.joined(due.parts, begins))
        own = due.own
        whole = [total[i] + own[i,] if (i,) in own else total[i] for i in self.manual.trained]
        return [(g / due.batches).astype(g.dtype) for g in whole]


def delayed_step(
    training: Training, manual: Manual, instead: Callable[[], Stepper] | None = None
) -> DelayedStepper | Stepper:
    """The step of a plan whose bucket plan delays updates.

    Warns that its numbers differ from the synchronous step's by design, and says what DeFT's Preserver expects of them.
    instead: see ``DelayedStepper``.
    """
    schedule = manual.plan.schedule
    assert schedule is not None
    _registered()
    try:
        _ = manual.program
    except NotManual as e:
        if instead is None:
            raise
        warnings.warn(f"{e.left}{_OWN}", stacklevel=3)
        return instead()
    if schedule.delayed:
        warnings.warn(f"{schedule.later()}; {_what_waits(manual)}", stacklevel=3)
    return DelayedStepper(training=training, manual=manual, instead=instead)


def _what_waits(manual: Manual) -> str:
    nbytes = waiting_bytes(manual.program, named(simplify(manual.plan.traced.graph)))
    said = f"up to {bytes_text(nbytes)} of gradients wait on each device"
    own = [f"'{node}'" for node in sorted(summed_in_step(manual.program))]
    if own:
        more = f" and {len(own) - _NAMED} more" if len(own) > _NAMED else ""
        said += (
            f". Some gradients of {', '.join(own[:_NAMED])}{more} are in no message, because a branch, a while loop, a "
            f"derivative rule or a cast of a whole stack combines them with others. These are reduced in their own "
            f"step, and then wait"
        )
    return said


@cache
def _registered() -> None:
    """Register ``DelayedState`` with JAX, once JAX is imported."""
    import jax

    jax.tree_util.register_dataclass(
        DelayedState, data_fields=["optimizer", "waiting", "iteration"], meta_fields=[]
    )


@dataclass(frozen=True, kw_only=True)
class DelayedStepper:
    """step(params, state, *batch) -> (params, state, loss), with delayed updates.

    The first call takes the optimizer's state, ``plan.jax.init(optimizer, params)``. Later calls take the
    ``DelayedState`` that the previous call returned.

    instead: makes the step that is used if the program has no manual lowering. If it is None, that is an error.
    """

    training: Training
    manual: Manual
    instead: Callable[[], Stepper] | None = None
    _made: dict[object, Stepper] = field(default_factory=dict, init=False, repr=False, compare=False)

    @without_mesh()
    def __call__(self, params: Tree, state: Tree, *batch: Tree) -> Tree:
        given = DelayedState.of(state)
        if _INSTEAD in self._made:
            return self._made[_INSTEAD](params, state, *batch)
        try:
            with faults_at(besides_equations):
                step = self.at(given.iteration)
            params, optimizer, waiting, value = step(params, given.optimizer, given.waiting, *batch)
        except NotManual as e:
            if self.instead is None or given.iteration:
                raise
            warnings.warn(f"{e.left}{_OWN}", stacklevel=2)
            self._made[_INSTEAD] = self.instead()
            return self._made[_INSTEAD](params, state, *batch)
        after = DelayedState(optimizer=optimizer, waiting=waiting, iteration=int(given.iteration) + 1)
        return params, after, value

    def at(self, iteration: int) -> Stepper:
        """The program of an iteration.

        It is step(params, optimizer state, waiting, *batch) -> (params, optimizer state, waiting, loss).
        """
        made = DelayedIteration(program=self.manual.program, number=int(iteration))
        if made.key not in self._made:
            self._made[made.key] = self._program(made)
        return self._made[made.key]

    @without_mesh()
    def lower(self, params: Tree, state: Tree, *batch: Tree, iteration: int = 0) -> Tree:
        """Lower the program of an iteration for arrays or shapes without running the iterations before it.

        Call ``.compile()`` on the result to compile it. state: the optimizer's state.
        """
        import jax

        waiting: Tree = ()
        for n in range(int(iteration)):
            run = self.at(n).run
            *_, waiting, _ = jax.eval_shape(run, arrays(params), state, waiting, *arrays(batch))
        return self.at(iteration).lower(params, state, waiting, *batch)

    def finish(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after the last step.

        Sends the messages and applies the update that the next step would have handled before its forward.
        """
        import jax

        given = DelayedState.of(state)
        iteration = DelayedIteration(program=self.manual.program, number=int(given.iteration))
        if not iteration.overdue:
            return params, given.optimizer
        key = (_FINISH, iteration.key)
        if key not in self._made:
            shardings = self.training.shardings()
            self._made[key] = jax.jit(self._before(iteration), out_shardings=shardings)  # type: ignore[assignment]
        return self._made[key](params, given.optimizer, list(given.waiting[: len(iteration.overdue)]))  # type: ignore[no-any-return]

    def _before(self, iteration: DelayedIteration) -> Callable[..., Tree]:
        """f(params, optimizer state, waiting) -> (params, optimizer state) after the overdue update is applied."""
        import jax
        from jax.sharding import PartitionSpec

        manual, n = self.manual, len(self.manual.plan.traced.param_paths)
        apart = PartitionSpec(manual.program.mesh.names)
        early = manual.mapped(
            _DeviceStep(manual=manual, iteration=iteration).before,
            manual.gradient_specs(),
            given=range(n),
            more=(apart,),
        )

        def before(params: Tree, opt_state: Tree, waiting: Tree) -> Tree:
            grads = manual.gradients(early(*jax.tree.leaves(arrays(params)), waiting))
            return self.training.updated(params, opt_state, grads)

        return before

    def _program(self, iteration: DelayedIteration) -> Stepper:
        from jax.sharding import NamedSharding, PartitionSpec

        manual = self.manual
        step = _DeviceStep(manual=manual, iteration=iteration)
        apart = PartitionSpec(manual.program.mesh.names)
        due, late = iteration.applies, len(iteration.overdue)
        grads_as = manual.gradient_specs() if due else []
        before = self._before(iteration) if late else None
        run = manual.mapped(step, (manual.returns(), apart, grads_as), more=(apart,))

        def stepped(params: Tree, opt_state: Tree, waiting: Tree, *batch: Tree) -> Tree:
            if before is not None:
                params, opt_state = before(params, opt_state, list(waiting[:late]))
            outs, left, grads = run(*manual.plan.checked((params, *batch)), list(waiting[late:]))
            if due:
                params, opt_state = self.training.updated(params, opt_state, manual.gradients(grads))
            return arrays(params), opt_state, tuple(left), arrays(manual.value(outs))

        def shardings(updates: Sequence[OpenUpdate], sent: bool) -> Tree:
            """Shardings of the waiting gradients before or, if sent, after this iteration's messages."""
            where = NamedSharding(manual.mesh, apart)
            made = [waiting_keys(iteration, u, step.summed_here, sent=sent) for u in updates]
            return tuple({what: dict.fromkeys(of, where) for what, of in keys.items()} for keys in made)

        held, left = shardings(iteration.held, False), shardings(iteration.left, True)
        return self.training.stepper(stepped, [held], [left], overwrites=fit_into(held, left))
