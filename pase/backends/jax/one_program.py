"""A plan in JAX that runs as one program: the user's function with the plan's sharding constraints, and a train step
made from it.

To add the constraints, ``gspmd`` re-evaluates the jaxpr of the user's function equation by equation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from pase.backends.jax.check_plans import check_plan
from pase.backends.jax.checkpoints import restored
from pase.backends.jax.generation import part_of, threaded_arguments
from pase.backends.jax.gspmd import AnnotatedWalk
from pase.backends.jax.ops.draws import Examples
from pase.backends.jax.ops.jaxprs import places_only
from pase.backends.jax.ops.totals import Totals
from pase.backends.jax.padding import with_padding, without_padding
from pase.backends.jax.plan import Against, JaxPlan
from pase.backends.jax.spmd.lower import Lowering, Manual, lowered, lowerings, manual_or_annotated
from pase.backends.jax.spmd.placement import waits
from pase.backends.jax.steps.delayed import DelayedStepper, delayed_step
from pase.backends.jax.steps.hoisted import hoisted_value_and_grad
from pase.backends.jax.steps.layouts import returned, state_shardings
from pase.backends.jax.steps.micro_batches import MicroBatch, summed, writes_parameters
from pase.backends.jax.steps.stepper import Stepper, global_array, host_arrays, shape_and_dtype, with_static
from pase.backends.jax.steps.train import Training
from pase.errors import PaseError
from pase.frontends.common.micro_batches import step_sums
from pase.frontends.jax.contexts import in_any_context, untyped, without_mesh
from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.leaves import arrays, combine, trained, untrained
from pase.frontends.jax.structure import check_arguments
from pase.frontends.jax.versions import called, jaxprs_inside, only_needed
from pase.ir import Place, named, simplify
from pase.ir.batch_sums import BatchSums
from pase.ir.blocks import Block, Hoisted, accumulated, kept_results, rematerialised
from pase.local.bucket_messages import ProgramSchedule
from pase.local.forms import in_forms
from pase.local.lower import program_of
from pase.local.types import LocalProgram
from pase.machine import CostModel, Mesh
from pase.machine.jax_devices import as_linked
from pase.plan.accesses import EquationLayouts, Reading
from pase.plan.constraints import Constraints
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree
from pase.tables.axis_layout import Placement

if TYPE_CHECKING:
    from pathlib import Path

    from jax import Array
    from jax import Device as JaxDevice
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding, PartitionSpec
    from optax import GradientTransformation

    from pase.plan.gradient_check import GradientCheck

__all__ = ["OneProgramPlan"]

_STORAGE_ALONE = (
    "in_shardings is half of the plan: how arguments are stored. If a step is jitted with nothing else, XLA chooses "
    "all other layouts, which took up to 31 times the cycles. Use plan.jax.train_step(optimizer), which has both "
    "halves, or make plan.jax.value_and_grad() or plan.jax.loss() first and call it in a step of your own. "
    "plan.jax.device_put places arrays"
)


@dataclass(frozen=True, kw_only=True)
class OneProgramPlan(JaxPlan["JaxMesh", "Stepper | DelayedStepper"]):
    """A plan in JAX that runs as one program on all devices."""

    traced: TracedJax
    """The model on one micro-batch."""
    logical_mesh: Mesh
    constraints: Constraints
    accumulate: int = 1
    """Micro-batches per step. Losses and gradients are summed over them, as ``sums`` says."""
    whole: TracedJax | None = None
    """The model on the whole batch, if the step has micro-batches."""
    blocks: tuple[Block, ...] = ()
    """Equations that backward recomputes."""
    hoisted: Hoisted = "none"
    """Which collectives of parameters are hoisted out of the micro-batch loop. If any are, the plan needs the manual
    lowering."""
    _functions: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The functions made so far that contain the constraints. ``in_shardings`` warns if there are none."""
    accesses: Mapping[Place, EquationLayouts] = field(default_factory=dict)
    """Path of an equation -> the layouts that it reads and writes."""
    strategy: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Node -> iteration dim -> mesh axes that split it."""
    schedule: ProgramSchedule | None = None
    """How collectives of parameters are merged, split and ordered. Only the manual lowering uses it."""
    prefetch: bool = False
    """Whether a loop gathers what its next iteration reads first one iteration early. Only the manual lowering uses
    it."""
    across: bool = False
    """Whether collectives that the bucket plan overlaps with the next forward pass are sent by the next step. Only the
    manual lowering uses it."""
    model: CostModel | None = None
    """Prices the possible forms of reshard steps (``pase.local.forms``). Only the manual lowering uses it."""
    devices: tuple[JaxDevice, ...] | None = None
    """The devices of the user's mesh, in its order, if the plan keeps the user's arrays where they are."""

    @cached_property
    def program(self) -> LocalProgram:
        raw = rematerialised(self.traced.graph, self.blocks)
        graph = accumulated(named(simplify(raw)), self.accumulate, self.hoisted)
        made = program_of(graph, self.logical_mesh, self.strategy)
        if (s := self.schedule) is not None and self.delays:
            made = s.placed_later(made, partial(waits, made, self.traced, self.blocks), across=self.across)
        elif s is not None and self.hoisted == "none":
            made = s.placed(made)
        return made if self.model is None else in_forms(made, self.model)

    @property
    def delays(self) -> bool:
        """Whether the manual lowering sends or applies gradients in later steps (see ``steps.delayed``)."""
        if self.schedule is None or self.hoisted != "none" or self.accumulate > 1:
            return False
        return self.schedule.delayed or (self.across and self.schedule.crosses)

    @cached_property
    def sums(self) -> BatchSums:
        """How the micro-batches' losses become that of the whole batch, and what they must know of each other."""
        padded = self.whole is not None and self.whole.written is not None  # refused unless it is a mean
        if self.whole is None or self.accumulate == 1 or padded:
            return BatchSums(totals={}, outputs={self.traced.graph.outputs[0]: 1}, counting=frozenset())
        return step_sums(self.whole, self.accumulate)

    @property
    def reads_totals(self) -> bool:
        """Whether a micro-batch reads sums over the whole batch, or adds terms that combine differently."""
        return bool(self.sums.totals or self.sums.scaled)

    def totals(self, given: Mapping[str, Array] | None) -> Totals:
        """What a walk over the program of a micro-batch needs for its sums over the whole batch (``Totals``)."""
        return Totals(sums=self.sums, micro_batches=self.accumulate, given=given)

    def check_found(self, tensors: Collection[str]) -> None:
        """Raises PaseError unless these are all sums over the batch that a micro-batch must read: it would read its own
        in place of a missing one."""
        if missing := self.sums.totals.keys() - set(tensors):
            names = ", ".join(sorted(missing))
            raise PaseError(
                f"its program never makes the sums over the batch {names}; this is a defect of pase"
            )

    def of_batch(self, summed: Array) -> Array:
        """The whole batch's loss or gradient. summed: over the micro-batches."""
        power = self.sums.power
        return summed / self.accumulate**power if power else summed

    @cached_property
    def as_written(self) -> bool:
        """Whether each device runs the user's program as it is: on one device, if nothing is recomputed or hoisted.

        It is then traced and compiled in the time of ``jax.jit``. A program that places its own arrays on a mesh is not
        run as it is, because that mesh is not the plan's.
        """
        if self.logical_mesh.devices > 1 or self.blocks or self.schedule:
            return False
        if self.hoisted != "none" or self.traced.drawn or self.reads_totals:
            return False
        todo = [self.traced.jaxpr.jaxpr]
        while todo:
            for eqn in todo.pop().eqns:
                if places_only(eqn):
                    return False
                todo += jaxprs_inside(eqn)
        return True

    @cached_property
    def kept_results(self) -> frozenset[Place]:
        """Equations whose results are residuals, in blocks that recompute only cheap work."""
        return kept_results(self.traced.graph, self.blocks)

    def mesh(self, devices: Sequence[JaxDevice] | None = None) -> JaxMesh:
        import jax
        import numpy as np

        m, own = self.logical_mesh, self.devices if devices is None else None
        found = as_linked(jax.devices() if devices is None else devices) if own is None else own
        if len(found) < m.devices:
            raise PaseError(
                f"the plan is for {m.devices} devices, but JAX sees {len(found)}",
                fix=f"on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={m.devices} before JAX starts, or "
                "compile for fewer devices",
            )
        grid = np.array(found[: m.devices], dtype=object).reshape(m.sizes)
        return jax.sharding.Mesh(grid, m.names)

    def sharding(self, placement: Placement, mesh: JaxMesh) -> NamedSharding:
        from jax.sharding import NamedSharding

        return NamedSharding(mesh, self.spec(placement))

    def spec(self, placement: Placement) -> PartitionSpec:
        """The PartitionSpec of a placement."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(*[axes[0] if len(axes) == 1 else axes or None for axes in placement])

    def leaf_names(self) -> list[str]:
        """Tensor names of the function's inputs, in the order of its leaves."""
        graph = self.traced.graph
        leaves = [n.ops[0].writes[0].tensor for n in graph.nodes if n.kind in ("parameter", "input")]
        return leaves[: len(self.traced.param_paths) + len(self.traced.input_paths)]

    @cached_property
    def copies(self) -> dict[Reading, str]:
        """Reading of a tensor by an equation -> the copy of the tensor that this equation reads."""
        of = self.constraints.copies
        return {Reading(r.at, of[r.tensor]): r.tensor for r in self.constraints.read if r.tensor in of}

    @cached_property
    def slices(self) -> frozenset[str]:
        """The slices that loops take from stacks.

        They are constrained where they are read, inside any rematerialised region. If they were constrained before it,
        each slice would be a residual in addition to its stack.
        """
        results = self.traced.results
        return frozenset(made[0] for at, made in results.items() if at.part == "x")

    @cached_property
    def specs(self) -> tuple[PartitionSpec, ...]:
        import jax

        storage = self.constraints.storage
        flat = [self.spec(storage.get(t, ())) for t in self.leaf_names()]
        return tuple(jax.tree.unflatten(self.traced.in_tree, flat))

    def in_shardings(self, mesh: JaxMesh | None = None) -> tuple[Tree, ...]:
        if not self._functions:
            warnings.warn(_STORAGE_ALONE, stacklevel=2)
        return self._in_shardings(mesh)

    def _in_shardings(self, mesh: JaxMesh | None = None) -> tuple[NamedSharding, ...]:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = mesh if mesh is not None else self.mesh()
        return jax.tree.map(
            lambda s: NamedSharding(mesh, s), self.specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )

    def gradient_shardings(self, mesh: JaxMesh | None = None) -> Tree:
        import jax

        mesh = mesh if mesh is not None else self.mesh()
        c = self.constraints
        names = self.leaf_names()[: len(self.traced.param_paths)]
        params = self._shapes()[0]
        flat = [
            self.sharding(c.state.get(t, c.storage.get(t, ())), mesh) if trained(a) is not None else None
            for t, a in zip(names, jax.tree.leaves(params), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), flat)

    def loss(self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        mesh = mesh if mesh is not None else self.mesh()
        self._functions.append("loss")
        if lowering == "auto" and (self.traced.mode == "train" or self.as_written):
            lowering = "annotated"
        made = lowered(lowering, mesh, Manual(plan=self, mesh=mesh).loss, self._constrained(mesh))
        return in_any_context(made)

    def examples(self, micro: Array) -> Examples:
        """The examples of a micro-batch with this number: every k-th one of the batch."""
        return Examples(first=micro, step=self.accumulate)

    def _constrained(self, mesh: JaxMesh) -> Callable[..., Tree]:
        """The user's function with sharding constraints."""
        import jax

        closed = self.traced.jaxpr

        def constrained(
            *args: Tree, micro: Array | None = None, shares: Mapping[str, Array] | None = None
        ) -> Tree:
            leaves = self.checked(args)
            if self.as_written:
                outs = called(closed)(*leaves)
            else:
                totals = None if shares is None else self.totals(shares)
                outs = self._walked(mesh, leaves, micro, totals)
            out = combine(jax.tree.unflatten(self.traced.out_tree, outs), self.traced.kept_out)
            return out[0] if self.traced.mode == "train" and not self.traced.has_aux else out

        return constrained

    def _walked(
        self, mesh: JaxMesh, leaves: Sequence[Array], micro: Array | None, totals: Totals | None
    ) -> list[Array]:
        """The results of the user's function with sharding constraints, leaf by leaf."""
        closed = self.traced.jaxpr
        examples = None if micro is None else self.examples(micro)
        walk = AnnotatedWalk.of(self, mesh, examples, totals)
        leaves = [walk.defined(x, t) for x, t in zip(leaves, self.leaf_names(), strict=True)]
        outs = walk.run(closed.jaxpr, closed.consts, leaves, "", {})
        if totals is None:
            return outs
        names = self.traced.out_names
        return [totals.own(t, x) if j else x for j, (x, t) in enumerate(zip(outs, names, strict=True))]

    def _counting(self, mesh: JaxMesh) -> Callable[..., dict[str, Array]]:
        """f(params, *batch, micro=None) -> a micro-batch's own sums over the batch (``Totals``)."""

        def count(*args: Tree, micro: Array | None = None) -> dict[str, Array]:
            leaves = self.checked(args)

            def counting() -> dict[str, Array]:
                totals = self.totals(None)
                self._walked(mesh, leaves, micro, totals)
                self.check_found(totals.found)
                return totals.found

            return only_needed(counting)  # type: ignore[no-any-return]

        return count

    @cached_property
    def prefill(self) -> Stepper:
        return part_of(self, "prefill", self.mesh())

    @cached_property
    def decode(self) -> Stepper:
        return part_of(self, "decode", self.mesh())

    def padded(self, args: tuple[Tree, ...], full: bool = True) -> tuple[Tree, ...]:
        """(params, *batch), padded with zeros to the plan's sizes if they are not padded yet.

        full: whether the batch is the whole batch; otherwise it is one micro-batch.
        """
        if not self.traced.padding:  # returns early because every step calls this
            return args
        return with_padding(self.traced, args, self._wide_shapes(full))

    def unpadded(self, params: Tree) -> Tree:
        return without_padding(self.traced, params)

    def _wide_shapes(self, full: bool) -> list[tuple[int, ...]]:
        """Shapes of the arguments' leaves, with padding."""
        n = len(self.traced.param_paths)
        return [*(tuple(a.shape) for a in self.traced.jaxpr.in_avals[:n]), *self.input_shapes(full)]

    def checked(self, args: Tree, full: bool = False) -> list[Array]:
        """The arguments' arrays, leaf by leaf, with the plan's padding.

        full: whether the batch is the whole batch; otherwise it is one micro-batch. Raises PaseError if the structure,
        a shape or a dtype is not that of the plan.
        """
        import jax

        leaves, tree = jax.tree.flatten(arrays(args))
        check_arguments(tree, self.traced.in_tree)
        leaves = jax.tree.leaves(self.padded(jax.tree.unflatten(tree, leaves), full))
        paths = (*self.traced.param_paths, *self.traced.input_paths)
        dtypes = [a.dtype for a in self.traced.jaxpr.in_avals]
        for leaf, shape, dtype, path in zip(leaves, self._wide_shapes(full), dtypes, paths, strict=True):
            got = shape_and_dtype(leaf)
            for what, is_, was in zip(("shape", "dtype"), got, (shape, dtype), strict=True):
                if is_ != was:
                    raise PaseError(
                        f"its {what} is {is_}, but the plan was compiled for {was}",
                        where=f"'{path}'",
                        fix=f"pass an array of this {what}, or compile again",
                    )
        return leaves

    def value_and_grad(
        self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., Tree]:
        self._require_mode("train", "gradients")
        mesh = mesh if mesh is not None else self.mesh()
        self._functions.append("value_and_grad")
        annotated = lowerings(lowering, mesh)[0] == "annotated"
        if self.schedule is not None and (self.hoisted != "none" or annotated or self.schedule.delayed):
            warnings.warn(
                "the plan's bucket plan is not in this step: only the manual lowering places messages, and only if "
                "all-gathers and reductions run in each micro-batch. Gradients are applied in later steps only by "
                "plan.jax.train_step, without micro-batches",
                stacklevel=2,
            )
        manual, kept = Manual(plan=self, mesh=mesh), self.gradient_shardings(mesh)
        graded = self.graded(self._constrained(mesh), mesh)
        annotated_pair = MicroBatch(graded=graded, count=self._counting(mesh))
        if self.hoisted != "none":
            if lowering == "annotated":
                raise PaseError(
                    f"the plan has once='{self.hoisted}': it runs collectives once per step that XLA's partitioner "
                    "would run in each micro-batch",
                    where="lowering='annotated'",
                    fix="leave out lowering=, or compile with once='none'",
                )
            each, more = summed(self, annotated_pair, kept, mesh), ", which sends in each micro-batch"
            hoisted = partial(hoisted_value_and_grad, manual)
            return in_any_context(
                hoisted() if lowering == "manual" else manual_or_annotated(hoisted, each, more)
            )
        if lowering == "auto" and self.as_written:
            lowering = "annotated"
        if not self.reads_totals:
            made = lowered(lowering, mesh, manual.value_and_grad, graded)
            return in_any_context(summed(self, MicroBatch(graded=made), kept, mesh))

        def by_hand() -> Callable[..., Tree]:
            return summed(self, MicroBatch(graded=manual.value_and_grad(), count=manual.count()), kept, mesh)

        return in_any_context(lowered(lowering, mesh, by_hand, summed(self, annotated_pair, kept, mesh)))

    def graded(self, fn: Callable[..., Tree], mesh: JaxMesh) -> Callable[..., Tree]:
        """f(params, *batch) -> (value, gradients of the trained leaves in their layouts), for the loss function fn.

        It passes further arguments on to fn by name.
        """
        import jax

        kept, aux = self.gradient_shardings(mesh), self.traced.has_aux

        def graded(params: Tree, *batch: Tree, **more: Tree) -> Tree:
            rest = untrained(arrays(params))

            def of(mine: Tree) -> Tree:
                return fn(combine(mine, rest, params), *batch, **more)

            value, grads = jax.value_and_grad(of, has_aux=aux)(trained(arrays(params)))
            if mesh.size == 1:  # nothing to say, and XLA reads every constraint
                return value, grads
            return value, jax.tree.map(jax.lax.with_sharding_constraint, grads, kept)

        return graded

    def _require_mode(self, mode: str, what: str) -> None:
        if self.traced.mode != mode:
            raise PaseError(
                f"the plan was compiled with mode='{self.traced.mode}', so it has no {what}",
                fix=f"compile a loss function with mode='{mode}', or run this plan with plan.jax.step() or "
                "plan.jax.apply",
            )

    def input_shapes(self, full: bool) -> list[tuple[int, ...]]:
        """Shapes of the batch's leaves: of the whole batch if ``full``, otherwise of one micro-batch."""
        from pase.frontends.jax.blocks import split_inputs

        shapes = [a.shape for a in self.traced.jaxpr.in_avals[len(self.traced.param_paths) :]]
        if not full or self.accumulate == 1:
            return shapes
        split = split_inputs(self.traced)
        return [(s[0] * self.accumulate, *s[1:]) if on else s for s, on in zip(shapes, split, strict=True)]

    @without_mesh()
    def state_shardings(self, optimizer: GradientTransformation, mesh: JaxMesh | None = None) -> Tree:
        mesh = mesh if mesh is not None else self.mesh()
        params = trained(self._shapes()[0])
        return state_shardings(optimizer, params, self.gradient_shardings(mesh), mesh)

    @without_mesh()
    def init(self, optimizer: GradientTransformation, params: Tree, mesh: JaxMesh | None = None) -> Tree:
        import jax

        shardings = self.state_shardings(optimizer, mesh)
        return jax.jit(optimizer.init, out_shardings=shardings)(
            trained(untyped(arrays(self.padded((params,))[0])))
        )

    def _shapes(self) -> tuple[Tree, ...]:
        import jax

        given = self.traced.jaxpr.in_avals
        avals = [
            jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(self._wide_shapes(True), given, strict=True)
        ]
        return tuple(jax.tree.unflatten(self.traced.in_tree, avals))

    def plain_step(
        self, optimizer: GradientTransformation, mesh: JaxMesh | None, donate: bool, lowering: Lowering
    ) -> Stepper | DelayedStepper:
        self._require_mode("train", "gradients")
        mesh = mesh if mesh is not None else self.mesh()
        training = Training(plan=self, optimizer=optimizer, mesh=mesh, donate=donate)
        ways = lowerings(lowering, mesh)
        if not self.delays or ways[0] == "annotated":
            return training.plain(self.value_and_grad(mesh, lowering=lowering))

        if writes_parameters(self):
            raise PaseError(
                "the loss function writes parameters, but the bucket plan applies gradients in later steps",
                fix="make the bucket plan without delayed updates",
            )

        def instead() -> Stepper:
            return training.plain(self.value_and_grad(mesh, lowering="annotated"))

        self._functions.append("train_step")
        return delayed_step(training, Manual(plan=self, mesh=mesh), instead if ways[1:] else None)

    def _returned(self, mesh: JaxMesh) -> Tree:
        """Shardings of what the function returns."""
        return returned(self.traced, self._in_shardings(mesh), mesh)

    def step(
        self, mesh: JaxMesh | None = None, *, donate: bool = True, lowering: Lowering = "auto"
    ) -> Stepper:
        if self.traced.mode == "train":
            raise PaseError(
                "the plan was compiled for a loss function, which is not a step",
                fix="use plan.jax.train_step(optimizer)",
            )
        mesh = mesh if mesh is not None else self.mesh()
        fn = self.loss(mesh, lowering=lowering)
        return Stepper(
            run=lambda *args: arrays(fn(*args)),
            in_shardings=self._in_shardings(mesh),
            out_shardings=self._returned(mesh),
            donate=threaded_arguments(self) if donate else (),
            whole=with_static(self.traced.kept_out),
            padded=self.padded if self.traced.padding else tuple,
        )

    @cached_property
    def apply(self) -> Stepper:
        return self.step(donate=False)

    def lower_train_step(
        self, optimizer: GradientTransformation, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Tree:
        import jax

        mesh = mesh if mesh is not None else self.mesh()
        shapes = self._shapes()
        state = jax.eval_shape(optimizer.init, trained(shapes[0]))
        return self.plain_step(optimizer, mesh, True, lowering).lower(shapes[0], state, *shapes[1:])

    def gathered(self, tree: Tree) -> Tree:
        """Raises PaseError if the plan has padding and the tree has another structure than the parameters."""
        import jax

        if self.traced.padding:

            def form(x: Tree) -> Tree:
                return jax.tree.structure(x, is_leaf=lambda leaf: leaf is None)

            if form(arrays(tree)) != form(self._shapes()[0]):
                raise PaseError(
                    "the plan pads arrays, and takes padding away from trees with the structure of the parameters only",
                    where="plan.jax.gathered",
                    fix="gather parameters, or compile sizes that divide by the plan's mesh",
                )
        return host_arrays(self.unpadded(tree))

    def restore(self, path: str | Path, mesh: JaxMesh | None = None) -> Tree:
        found = restored(path, self._shapes()[0], self._in_shardings(mesh)[0], self.traced.graph.name)
        return combine(found, self.traced.kept[0])

    def checked_along(
        self,
        lines: CheckLines,
        given: tuple[Tree, ...],
        mesh: JaxMesh | None,
        lowering: Lowering,
        against: Against,
    ) -> GradientCheck:
        self._require_mode("train", "gradients")
        mesh = mesh if mesh is not None else self.mesh()
        ways = self._lowerings(lowering, mesh)
        params, *batch = map(untyped, given)
        return check_plan(self, params, tuple(batch), mesh, ways, against, lines)

    def _lowerings(self, lowering: Lowering, mesh: JaxMesh) -> tuple[Lowering, ...]:
        if self.hoisted != "none" and lowering == "auto":  # XLA would send in each micro-batch
            return ("manual",)
        return lowerings(lowering, mesh)

    @without_mesh()
    def device_put(self, params: Tree, *batch: Tree, mesh: JaxMesh | None = None) -> tuple[Tree, ...]:
        import jax

        shardings = self._in_shardings(mesh)
        given = untyped(arrays(self.padded((params, *batch))))
        shardings = shardings[: len(given)]
        check_arguments(jax.tree.structure(given), jax.tree.structure(shardings), first=True)
        placed = tuple(jax.tree.map(global_array, x, s) for x, s in zip(given, shardings, strict=True))
        return tuple(combine(x, kept) for x, kept in zip(placed, self.traced.kept[: len(given)], strict=True))
