"""A train step whose gradients are applied in later steps, merged and delayed, as DeFT's bucket plans say.

The step's state has in it the gradients that wait: on each device its own, not summed over devices, added up over the
steps of an update. Messages are sent in the step that the plan has them sent in, joined and cut as it says. Those of
earlier steps' gradients depend on nothing of this step, so that they may run beside all of it. When an update is due,
the sums go back through the views and casts of their parameters, their mean is taken, and the optimizer is called;
otherwise it is not. Each iteration of the plan's period is a program of its own.

One walk finds the parameters in the form that their readers need, as in a step that gathers once (``jax_once``); the
gradients of these are what waits. Gradients that no message carries are summed in their own step and wait as sums.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeAlias

from pase.backends.jax_ahead import gathers_ahead
from pase.backends.jax_messages import JOINED, Sending
from pase.backends.jax_values import Arrivals, NotByHand
from pase.frontends.jax_leaves import arrays
from pase.frontends.jax_versions import called, without_dead_code
from pase.local.types import LocalMessage, LocalProgram, TransferPart
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax_manual import Manual
    from pase.backends.jax_step import Stepper
    from pase.backends.jax_train import Training

__all__ = ["DelayedState", "DelayedStepper", "delayed_step", "waiting_bytes"]

_INSTEAD = "instead"

WaitingGradients: TypeAlias = "dict[str, dict[tuple[int, ...], Array]]"
"""The open gradients of an update, of each device in the first dim: "values", by transfer and turn (-1: no loop);
"columns", what has come of those that are cut, by transfer, turn, stage and first byte; "sums", by parameter, of
gradients that no message carries."""


@dataclass(kw_only=True)
class DelayedState:
    """What a delayed step passes to the next: the optimizer's state, the gradients that wait (by open update, the
    oldest first), and how many steps were made. It is a pytree of arrays and one number."""

    optimizer: Tree
    waiting: tuple[WaitingGradients, ...] = ()
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class OpenUpdate:
    """An update of a run. update: its number in the period. The mean gradient of iterations first to last is applied
    after iteration ``at``, counted from the begin of the run."""

    update: int
    first: int
    last: int
    at: int


@dataclass(frozen=True, kw_only=True)
class DelayedIteration:
    """One iteration of a run."""

    program: LocalProgram
    number: int

    @cached_property
    def updates(self) -> tuple[OpenUpdate, ...]:
        """Those that are open in it, the oldest first; the last one takes its gradients."""
        p, found = self.program, []
        newest = self.number // p.period
        for period in range(max(newest - max(u.at for u in p.updates) // p.period, 0), newest + 1):
            for k, u in enumerate(p.updates):
                first, last, at = (i + period * p.period for i in (u.first, u.last, u.at))
                if first <= self.number <= at:
                    found.append(OpenUpdate(update=k, first=first, last=last, at=at))
        return tuple(found)

    @property
    def held(self) -> tuple[OpenUpdate, ...]:
        """Those that have gradients of earlier iterations."""
        return tuple(u for u in self.updates if u.first < self.number)

    @property
    def left(self) -> tuple[OpenUpdate, ...]:
        """Those that are open after it."""
        return tuple(u for u in self.updates if u.at > self.number)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for iterations that are the same program."""
        return tuple((u.update, self.number - u.first) for u in self.updates)

    def messages(self, u: OpenUpdate) -> tuple[list[LocalMessage], list[LocalMessage], list[LocalMessage]]:
        """The update's messages: (those sent before this iteration, in it, and later), each in order."""
        found: tuple[list[LocalMessage], ...] = ([], [], [])
        for m in self.program.messages:
            if m.update == u.update:
                when = u.last + m.late
                found[(when > self.number) - (when < self.number) + 1].append(m)
        return found  # type: ignore[return-value]


def parts_of(program: LocalProgram) -> list[TransferPart]:
    """What waits in each update."""
    return list(dict.fromkeys(p.part for m in program.messages if m.update == 0 for p in m.pieces))


def waiting_bytes(program: LocalProgram) -> int:
    """Bytes of gradients that a device holds between steps, at most."""
    each = sum(program.stages(number, "back")[0].nbytes for number, _ in parts_of(program))
    steady = max(u.at for u in program.updates) // program.period + 1
    numbers = range(steady * program.period, (steady + 1) * program.period)
    return each * max(len(DelayedIteration(program=program, number=n).left) for n in numbers)


def columns_of(program: LocalProgram, sent: Sequence[LocalMessage]) -> set[tuple[int, ...]]:
    """The pieces that have come of moves that other messages carry the rest of, as keys of ``WaitingGradients``."""
    came: dict[tuple[TransferPart, int], dict[int, int]] = {}
    for m in sent:
        for p in m.pieces:
            came.setdefault((p.part, p.stage), {})[p.begin] = p.nbytes
    out: set[tuple[int, ...]] = set()
    for (part, stage), pieces in came.items():
        move = program.stages(part[0], "back")[stage]
        if move.kind in JOINED and sum(pieces.values()) < move.nbytes:
            out |= {(*_key(part), stage, begin) for begin in pieces}
    return out


def moves_done(program: LocalProgram, part: TransferPart, sent: Sequence[LocalMessage]) -> int:
    """How many of a gradient's moves are done once these messages are sent."""
    done, moves = 0, program.moves(part[0], "back")
    at = [i for i, m in enumerate(moves) if m.nbytes and not m.free]
    for stage, i in enumerate(at):
        pieces = [p for m in sent for p in m.pieces if (p.part, p.stage) == (part, stage)]
        if pieces:
            whole = moves[i].kind not in JOINED or sum(p.nbytes for p in pieces) == moves[i].nbytes
            done = i + whole
    return done


def _key(part: TransferPart) -> tuple[int, int]:
    return part[0], -1 if part[1] is None else part[1]


def _part(key: Sequence[int]) -> TransferPart:
    return key[0], None if key[1] < 0 else key[1]


@dataclass(frozen=True, kw_only=True)
class _ReadParameters:
    """Parameters in the form that their readers need. arrive: the gathers, from the arrays that carry the gradients;
    begin: what the parameters are moved from. tree: of a walk's ``Arrivals``. places: of each, the number of the
    transfer and of the loops around it. wide: the dtypes in which gradients are added."""

    arrive: Callable[[dict[int, Tree]], list[Tree]]
    begin: Callable[[dict[int, Tree]], list[Tree]]
    tree: Tree
    places: list[tuple[int, int]]
    wide: list[str]

    @classmethod
    def of(cls, manual: Manual, leaves: Sequence[Array], carriers: dict[int, Array]) -> _ReadParameters:
        import jax

        numbers = frozenset(number for number, _ in parts_of(manual.program))
        forms: list[Tree] = []

        def finding(own: dict[int, Array], which: int) -> list[Tree]:
            arrivals = Arrivals(numbers=numbers, begins=True)
            manual.forward(leaves, own, arrivals)
            found = jax.tree_util.tree_flatten_with_path(
                arrivals.found, is_leaf=lambda x: isinstance(x, tuple)
            )
            forms[:] = [*found, jax.tree.leaves(arrivals.wide)]
            return [pair[which] for _, pair in found[0]]

        programs = [
            without_dead_code(jax.make_jaxpr(lambda own, k=k: finding(own, k))(carriers)) for k in (0, 1)
        ]
        places = [(int(path[-1].key), len(path) - 1) for path, _ in forms[0]]
        if lost := numbers - {number for number, _ in places}:
            tensors = ", ".join(sorted(manual.program.transfers[k].tensor for k in lost))
            raise NotByHand(f"gradients of {tensors} are to wait for later steps, and nothing reads them")
        return cls(
            arrive=lambda own: called(programs[0])(*jax.tree.leaves(own)),
            begin=lambda own: called(programs[1])(*jax.tree.leaves(own)),
            tree=forms[1],
            places=places,
            wide=forms[2],
        )

    def parts(self, values: Sequence[Array], program: LocalProgram) -> dict[TransferPart, Array]:
        """Each parameter's array, or of a loop each turn's."""
        out: dict[TransferPart, Array] = {}
        for (number, loops), x in zip(self.places, values, strict=True):
            turns = [turn for n, turn in parts_of(program) if n == number]
            rows = x.reshape(-1, *x.shape[loops:])
            if len(turns) != len(rows):
                raise NotByHand(
                    f"'{program.transfers[number].tensor}' is read {len(rows)} times, and its gradient waits "
                    f"{len(turns)} times, which is a defect of pase.local"
                )
            out |= {(number, None if turns == [None] else k): row for k, row in enumerate(rows)}
        return out

    def joined(self, parts: Mapping[TransferPart, Array], like: Sequence[Array]) -> list[Array]:
        """The inverse of ``parts``."""
        import jax.numpy as jnp

        out = []
        for (number, _), x in zip(self.places, like, strict=True):
            mine = sorted((_key(part), g) for part, g in parts.items() if part[0] == number)
            out.append(jnp.stack([g for _, g in mine]).reshape(x.shape).astype(x.dtype))
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
        """The trained leaves of which some gradient is in no message."""
        waiting = {number for number, _ in parts_of(self.program)}
        rest = {
            t.src for k, t in enumerate(self.program.transfers) if k not in waiting and t.backward is not None
        }
        names = self.manual.plan.leaf_names()
        return [i for i in self.manual.trained if self.program.maker[names[i]].node in rest]

    def structure(self, u: OpenUpdate, sent: Sequence[LocalMessage]) -> dict[str, list[tuple[int, ...]]]:
        """The keys of the update's ``WaitingGradients`` once these of its messages are sent."""
        return {
            "values": [_key(part) for part in parts_of(self.program)],
            "columns": sorted(columns_of(self.program, sent)),
            "sums": [(i,) for i in self.summed_here],
        }

    def __call__(self, *given: Tree) -> Tree:
        """(results, the gradients that wait after it, gradients of the trained leaves if an update is due)."""
        import jax

        *leaves, held = given
        waiting = jax.tree.map(lambda x: x[0], held)
        carriers = self.manual.carriers(leaves)
        found = _ReadParameters.of(self.manual, leaves, carriers)
        arrived = found.arrive(carriers)
        outs, there, own = self._graded(leaves, carriers, found, arrived)
        last: dict[tuple[str, float], Array] = {}
        kept, grads = [], []
        for k, u in enumerate(self.iteration.updates):
            mine: WaitingGradients = waiting[k] if k < len(waiting) else {}
            if u.last >= self.iteration.number:
                mine = self._merged(u, mine, found.parts(there, self.program), own, found)
            sending = self._sending(u, mine, last)
            for _ in self.iteration.messages(u)[1]:
                sending.send()
            if u.at == self.iteration.number:
                sums = {part: sending.finished(part) for part in parts_of(self.program)}
                grads = self._applied(u, found, carriers, sums, mine["sums"])
            else:
                columns = {
                    (*_key(part), stage, begin): x
                    for (part, stage), held in sending.parts.items()
                    for begin, x in held.items()
                }
                values = {_key(part): x for part, x in sending.values.items()}
                kept.append({"values": values, "columns": columns, "sums": mine["sums"]})
        return outs, jax.tree.map(lambda x: x[None], kept), grads

    def _graded(
        self,
        leaves: Sequence[Array],
        carriers: dict[int, Array],
        found: _ReadParameters,
        arrived: Sequence[Array],
    ) -> tuple[list[Array], list[Array], dict[int, Array]]:
        """(results, gradients of what arrived, gradients of the parameters that came in no such way)."""
        import jax

        numbers = frozenset(number for number, _ in found.places)

        def of(mine: Sequence[Array], own: dict[int, Array]) -> tuple[Array, list[Tree]]:
            given = Arrivals(numbers=numbers, given=jax.tree.unflatten(found.tree, mine))
            outs = self.manual.forward(leaves, own, given)
            return outs[0], outs

        differentiated = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
        if self.manual.plan.gathers_ahead:
            differentiated = gathers_ahead(differentiated)
        (_, outs), (there, own) = differentiated(list(arrived), carriers)
        return outs, there, own

    def _merged(
        self,
        u: OpenUpdate,
        held: WaitingGradients,
        new: Mapping[TransferPart, Array],
        own: Mapping[int, Array],
        found: _ReadParameters,
    ) -> WaitingGradients:
        """The update's gradients with those of this iteration. While more are to come, they are added in the dtype in
        which their parameter is stored."""
        wide = {number: w for (number, _), w in zip(found.places, found.wide, strict=True)}
        before = held.get("values", {})
        values: dict[tuple[int, ...], Array] = {}
        for part, g in new.items():
            total = g.astype(wide[part[0]]) if u.last > u.first else g
            if _key(part) in before:
                total = before[_key(part)] + total
            values[_key(part)] = total.astype(g.dtype) if u.last == self.iteration.number else total
        earlier = held.get("sums", {})
        sums: dict[tuple[int, ...], Array] = {
            (i,): own[i] + earlier[i,] if (i,) in earlier else own[i] for i in self.summed_here
        }
        return {"values": values, "columns": {}, "sums": sums}

    def _sending(
        self, u: OpenUpdate, mine: WaitingGradients, last: dict[tuple[str, float], Array]
    ) -> Sending:
        """The update's gradients, as far as they have come. last: shared by the updates that are sent in a step."""
        sent, now, later = self.iteration.messages(u)
        parts: dict[tuple[TransferPart, int], dict[int, Array]] = {}
        for key, x in mine["columns"].items():
            parts.setdefault((_part(key), key[2]), {})[key[3]] = x
        return Sending(
            program=self.program,
            way="back",
            values={_part(key): x for key, x in mine["values"].items()},
            messages=[*now, *later],
            done={part: moves_done(self.program, part, sent) for part in parts_of(self.program)},
            last=last,
            parts=parts,
        )

    def _applied(
        self,
        u: OpenUpdate,
        found: _ReadParameters,
        carriers: dict[int, Array],
        sums: Mapping[TransferPart, Array],
        own: Mapping[tuple[int, ...], Array],
    ) -> list[Array]:
        """The mean gradient of the update's iterations, of each trained leaf."""
        import jax

        begins, back = jax.vjp(found.begin, carriers)
        (total,) = back(found.joined(sums, begins))
        batches = u.last - u.first + 1
        whole = [total[i] + own[i,] if (i,) in own else total[i] for i in self.manual.trained]
        return [(g / batches).astype(g.dtype) for g in whole]


def delayed_step(
    training: Training, manual: Manual, instead: Callable[[], Stepper] | None = None
) -> DelayedStepper:
    """The step of a plan whose bucket plan delays updates. Warns that its numbers are meant to differ from the
    synchronous step's, and says what DeFT's Preserver expects of them."""
    schedule = manual.plan.schedule
    assert schedule is not None
    _registered()
    warnings.warn(
        f"{schedule.later()}; {_megabytes(manual.program)} of gradients wait on each device", stacklevel=3
    )
    return DelayedStepper(training=training, manual=manual, instead=instead)


def _megabytes(program: LocalProgram) -> str:
    return f"up to {waiting_bytes(program) / 1e6:.3g} MB"


@cache
def _registered() -> None:
    """Register ``DelayedState`` with JAX, once JAX is imported."""
    import jax

    jax.tree_util.register_dataclass(
        DelayedState, data_fields=["optimizer", "waiting", "iteration"], meta_fields=[]
    )


def _fit_into(held: Sequence[WaitingGradients], left: Sequence[WaitingGradients]) -> bool:
    """Whether the gradients that wait after a step can take the memory of those that waited before it."""
    came, come = (Counter(key for u in some for key in u["columns"]) for some in (held, left))
    return len(held) <= len(left) and came <= come


@dataclass(frozen=True, kw_only=True)
class DelayedStepper:
    """step(params, state, *batch) -> (params, state, loss), with delayed updates. Begin with the optimizer's state,
    ``plan.jax.init(optimizer, params)``, and then pass what the step returns, a ``DelayedState``.

    instead: makes the step that is taken if the program cannot be lowered by hand; None: that is an error.
    """

    training: Training
    manual: Manual
    instead: Callable[[], Stepper] | None = None
    _made: dict[object, Stepper] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, params: Tree, state: Tree, *batch: Tree) -> Tree:
        given = state if isinstance(state, DelayedState) else DelayedState(optimizer=state)
        if _INSTEAD in self._made:
            return self._made[_INSTEAD](params, state, *batch)
        try:
            step = self.at(given.iteration)
            params, optimizer, waiting, value = step(params, given.optimizer, given.waiting, *batch)
        except NotByHand as e:
            if self.instead is None or given.iteration:
                raise
            warnings.warn(f"{e.left}, and each step applies its own gradients", stacklevel=2)
            self._made[_INSTEAD] = self.instead()
            return self._made[_INSTEAD](params, state, *batch)
        after = DelayedState(optimizer=optimizer, waiting=waiting, iteration=int(given.iteration) + 1)
        return params, after, value

    def at(self, iteration: int) -> Stepper:
        """The program of an iteration: step(params, optimizer's state, waiting, *batch) -> (params, optimizer's state,
        waiting, loss)."""
        made = DelayedIteration(program=self.manual.program, number=int(iteration))
        if made.key not in self._made:
            self._made[made.key] = self._program(made)
        return self._made[made.key]

    def lower(self, params: Tree, state: Tree, *batch: Tree, iteration: int = 0) -> Tree:
        """Lower the program of an iteration on arrays or shapes, without running those before it. state: the
        optimizer's. Call ``.compile()`` on the result."""
        import jax

        waiting: Tree = ()
        for n in range(int(iteration)):
            run = self.at(n).run
            *_, waiting, _ = jax.eval_shape(run, arrays(params), state, waiting, *arrays(batch))
        return self.at(iteration).lower(params, state, waiting, *batch)

    def _program(self, iteration: DelayedIteration) -> Stepper:
        from jax.sharding import NamedSharding, PartitionSpec

        manual = self.manual
        step = _DeviceStep(manual=manual, iteration=iteration)
        apart = PartitionSpec(manual.program.mesh.names)
        due = any(u.at == iteration.number for u in iteration.updates)
        grads_as = manual.gradient_specs() if due else []
        run = manual.mapped(step, (manual.returns(), apart, grads_as), more=(apart,))

        def stepped(params: Tree, opt_state: Tree, waiting: Tree, *batch: Tree) -> Tree:
            outs, left, grads = run(*manual.plan.checked((params, *batch)), list(waiting))
            if due:
                params, opt_state = self.training.updated(params, opt_state, manual.gradients(grads))
            return arrays(params), opt_state, tuple(left), arrays(manual.value(outs))

        def shardings(updates: Sequence[OpenUpdate], sent: int) -> Tree:
            """Of the gradients that wait. sent: 0 before this iteration's messages, 1 after them."""
            where = NamedSharding(manual.mesh, apart)
            made = []
            for u in updates:
                gone = [m for some in iteration.messages(u)[: sent + 1] for m in some]
                keys = step.structure(u, gone).items()
                made.append({what: dict.fromkeys(of, where) for what, of in keys})
            return tuple(made)

        held, left = shardings(iteration.held, 0), shardings(iteration.left, 1)
        return self.training.stepper(stepped, [held], [left], overwrites=_fit_into(held, left))
