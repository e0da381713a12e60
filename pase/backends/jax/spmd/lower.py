"""A plan's loss and gradients as one ``shard_map`` over the whole mesh, which runs the local program on each device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.ops.draws import Examples
from pase.backends.jax.ops.platforms import platform_of
from pase.backends.jax.ops.totals import Totals
from pase.backends.jax.spmd.interpreter import ManualWalk
from pase.backends.jax.spmd.prefetch import prefetched
from pase.backends.jax.spmd.values import (
    Arrivals,
    Cache,
    DeviceValue,
    NotManual,
    besides_equations,
    faults_at,
)
from pase.errors import PaseError
from pase.frontends.jax.frontend import inner_jaxpr
from pase.frontends.jax.leaves import combine
from pase.frontends.jax.types import Var
from pase.frontends.jax.versions import is_literal, literal_array, only_needed
from pase.local.lower import between
from pase.local.parts import to_whole
from pase.local.reshard import resharded
from pase.local.rows import with_rows
from pase.local.types import LocalOp, LocalProgram, LocalResult
from pase.local.verify import verify_program
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from typing import Never

    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec

    from pase.backends.jax.one_program import OneProgramPlan
    from pase.machine import Mesh

__all__ = [
    "Lowering",
    "Manual",
    "gradient_carrier",
    "lowered",
    "lowerings",
    "manual_or_annotated",
    "not_differentiable",
]

Lowering = Literal["annotated", "manual", "auto"]
"""What partitions the program. annotated: XLA's partitioner, with the plan's constraints. manual: pase itself, by
``shard_map``. auto: pase if it can lower the whole program, otherwise XLA. On TPUs, auto is XLA, because it is not
known well enough which forms of collectives XLA's compiler keeps there (``docs/evidence/tpu.md``)."""


def lowerings(lowering: Lowering, mesh: JaxMesh) -> tuple[Lowering, ...]:
    """The lowerings to try on these devices, in order, until one can lower the whole program."""
    if lowering != "auto":
        return (lowering,)
    return ("annotated",) if platform_of(mesh) == "tpu" else ("manual", "annotated")


def lowered(
    lowering: Lowering,
    mesh: JaxMesh,
    by_hand: Callable[[], Callable[..., Tree]],
    annotated: Callable[..., Tree],
) -> Callable[..., Tree]:
    """The function that ``lowering`` selects on these devices.

    by_hand: makes the manually lowered function. annotated: the annotated function.
    """
    first, *rest = lowerings(lowering, mesh)
    if first == "annotated":
        return annotated
    return manual_or_annotated(by_hand, annotated) if rest else by_hand()


def manual_or_annotated(
    by_hand: Callable[[], Callable[..., Tree]], annotated: Callable[..., Tree], instead: str = ""
) -> Callable[..., Tree]:
    """The manually lowered function, or the annotated one, with a warning, if manual lowering is refused or fails.

    by_hand: makes the manually lowered function. annotated: the annotated function. instead: text that is appended to
    the warning.
    """
    return _ManualOrAnnotated(manual=by_hand, annotated=annotated, instead=instead)


@dataclass(kw_only=True, eq=False)
class _ManualOrAnnotated:
    """A function that is lowered manually if the whole of it can be, and is annotated otherwise.

    Tracing the function finds this out, so nothing is traced twice. A warning names what cannot be lowered, or what
    failed. manual: makes the manually lowered function. refused: whether manual lowering has failed in an earlier call.
    instead: what else differs then; it is appended to the warning.
    """

    manual: Callable[[], Callable[..., Tree]]
    annotated: Callable[..., Tree]
    instead: str = ""
    refused: bool = False

    @cached_property
    def _lowered(self) -> Callable[..., Tree]:
        with faults_at(besides_equations):
            return self.manual()

    def __call__(self, *args: Tree, **more: Tree) -> Tree:
        if self.refused:
            return self.annotated(*args, **more)
        try:
            return self._lowered(*args, **more)
        except NotManual as e:
            why = e.left
        self.refused = True
        made = self.annotated(*args, **more)  # an error in the user's program is raised here again, unchanged
        warnings.warn(why + self.instead, stacklevel=2)
        return made


@dataclass(frozen=True, kw_only=True)
class Manual:
    """The functions of a JAX plan that is lowered manually, on a JAX mesh.

    rows: tensor -> its rows on a device, for stacks of which a device has only some.
    """

    plan: OneProgramPlan
    mesh: JaxMesh
    rows: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def program(self) -> LocalProgram:
        with faults_at(lambda _: "the plan"):
            made = with_rows(self.plan.program, self.rows)
            try:
                verify_program(made)
            except PaseError as e:
                raise NotManual(f"{e.what}; this is a defect of pase.local", where=e.where) from None
        return made

    @cached_property
    def _names(self) -> list[str]:
        return self.plan.leaf_names()

    @cached_property
    def walk(self) -> ManualWalk:
        return ManualWalk(
            program=self.program,
            traced=self.plan.traced,
            blocks=self.plan.blocks,
            kept=self.plan.kept_results,
            devices=self.mesh,
        )

    def loss(self) -> Callable[..., Tree]:
        """f(params, *batch) -> the result of the user's function. Do not differentiate it; use ``value_and_grad``."""

        trained = self.plan.traced.mode == "train"
        fix = "use " + ("plan.jax.value_and_grad(), or " if trained else "") + "lowering='annotated'"
        run = not_differentiable(
            self.mapped(lambda *leaves: self.forward(leaves, {}), self.returns()), fix=fix
        )

        def whole(*args: Tree) -> Tree:
            return self.value(run(*self.plan.checked(args)))

        return whole

    def value_and_grad(self) -> Callable[..., Tree]:
        """f(params, *batch, micro=0, shares=None) -> (the result of the user's function, gradients of the trained
        leaves).

        micro: the number of the micro-batch. It matters only if random numbers are drawn for it. shares: what ``count``
        returns, added up over the micro-batches, if the micro-batch reads sums over the whole batch.
        """
        import jax

        plan = self.plan
        specs = self._specs_beside(bool(plan.reads_totals))

        def local(*given: Tree) -> Tree:
            *leaves, beside = given
            examples = plan.examples(beside["micro"]) if "micro" in beside else None
            shares = {t: x[0] for t, x in beside.get("shares", {}).items()}
            totals = plan.totals(shares) if plan.reads_totals else None

            def of(gradient_carriers: dict[int, Array]) -> tuple[Array, list[Tree]]:
                outs = self.forward(leaves, gradient_carriers, examples=examples, totals=totals)
                return outs[0], outs

            differentiated = jax.value_and_grad(of, has_aux=True)
            if self.plan.prefetch:
                differentiated = prefetched(differentiated)
            (_, outs), grads = differentiated(self.gradient_carriers(leaves))
            return outs, [grads[i] for i in self.trained]

        run = self.mapped(local, (self.returns(), self.gradient_specs()), more=[specs])

        def graded(
            params: Tree, *batch: Tree, micro: Array | int = 0, shares: Mapping[str, Array] | None = None
        ) -> Tree:
            beside = {"micro": micro, "shares": shares}
            outs, grads = run(*plan.checked((params, *batch)), {k: beside[k] for k in specs})
            return self.value(outs), self.gradients(grads)

        return graded

    def _specs_beside(self, shares: bool) -> dict[str, PartitionSpec]:
        """PartitionSpecs of what a micro-batch takes beside its arguments: its number, if random numbers are drawn for
        it, and with ``shares`` what each device has its own of, in a first dim."""
        from jax.sharding import PartitionSpec

        specs = {"micro": PartitionSpec()} if self.plan.traced.drawn else {}
        return specs | ({"shares": PartitionSpec(self.program.mesh.names)} if shares else {})

    def count(self) -> Callable[..., dict[str, Array]]:
        """f(params, *batch, micro=0) -> a micro-batch's own sums over the batch: tensor -> each device's share, stacked
        along a first dim (``Totals``)."""
        specs = self._specs_beside(False)

        def local(*given: Tree) -> dict[str, Array]:
            *leaves, beside = given
            return {t: x[None] for t, x in self.counted(leaves, beside.get("micro")).items()}

        run = self.mapped(local, self._specs_beside(True)["shares"], more=[specs])

        def count(params: Tree, *batch: Tree, micro: Array | int = 0) -> dict[str, Array]:
            beside = {"micro": micro} if "micro" in specs else {}
            return run(*self.plan.checked((params, *batch)), beside)  # type: ignore[no-any-return]

        return count

    def counted(self, leaves: Sequence[Array], micro: Array | None) -> dict[str, Array]:
        """A device's share of a micro-batch's own sums over the batch.

        leaves: as ``forward`` takes them. micro: the micro-batch's number, if random numbers are drawn for it.
        """

        def counting() -> dict[str, Array]:
            totals = self.plan.totals(None)
            self.forward(
                leaves, {}, examples=None if micro is None else self.plan.examples(micro), totals=totals
            )
            self.plan.check_found(totals.found)
            return totals.found

        return only_needed(counting)

    def gradients(self, grads: Sequence[Array]) -> Tree:
        """The gradients of the trained leaves, as a pytree like params."""
        import jax

        found = dict(zip(self.trained, grads, strict=True))
        leaves = [found.get(i) for i in range(len(self._names))]
        return jax.tree.unflatten(self.plan.traced.in_tree, leaves)[0]

    def value(self, outs: Sequence[Array]) -> Tree:
        """The result of the user's function, from its leaves."""
        import jax

        traced = self.plan.traced
        out = combine(jax.tree.unflatten(traced.out_tree, outs), traced.kept_out)
        return out[0] if traced.mode == "train" and not traced.has_aux else out

    def part(self, number: int, given: Sequence[int]) -> Callable[..., list[Array]]:
        """f(*leaves) -> the results of one program of a ``Generation``.

        number: of the program's equation in the traced jaxpr. given: the numbers of the program's input leaves.
        """
        closed = self.plan.traced.jaxpr
        eqn, names = closed.jaxpr.eqns[number], self._names
        each = len(closed.jaxpr.outvars) // len(self.plan.traced.programs)
        mine = range(number * each, (number + 1) * each)

        def local(*leaves: Array) -> list[Array]:
            env = {
                v: DeviceValue(array=c) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)
            }
            env |= {
                closed.jaxpr.invars[i]: self.walk.leaf(x, names[i])
                for i, x in zip(given, leaves, strict=True)
            }

            def value(var: Var) -> DeviceValue:
                return DeviceValue(array=literal_array(var)) if is_literal(var) else env[var]

            cache = Cache()
            inner, consts = inner_jaxpr(eqn)
            prefix = self.plan.traced.programs[number]
            outs = self.walk.run(inner, consts, [value(v) for v in eqn.invars], prefix, cache)
            env.update(zip(eqn.outvars, outs, strict=True))
            return [
                self.out(self.walk, value(closed.jaxpr.outvars[j]), self.end(j), cache, differentiated=False)
                for j in mine
            ]

        returns = self.returns()
        return self.mapped(local, [returns[j] for j in mine], given)

    def mapped(
        self,
        fn: Callable[..., Tree],
        outs: Tree,
        given: Sequence[int] | None = None,
        stacked: Collection[int] = (),
        more: Sequence[Tree] = (),
        among: Callable[[int, PartitionSpec], PartitionSpec] = lambda _, spec: spec,
    ) -> Callable[..., Tree]:
        """``fn`` on each device, as a jitted ``shard_map``.

        outs: PartitionSpecs of its results. given: the numbers of the leaves that it takes; None for all. stacked: the
        leaves among them that are stacked micro-batches. more: PartitionSpecs of its further arguments. among: from a
        leaf and its PartitionSpec on the plan's mesh to that on a mesh that has other axes besides.
        """
        import jax
        from jax.sharding import PartitionSpec

        leaves = range(len(self._names)) if given is None else given
        one = [
            among(i, self.spec(self.program.result(self._names[i]).layout, self._shape(i))) for i in leaves
        ]
        ins = tuple(
            PartitionSpec(None, *spec) if i in stacked else spec for i, spec in zip(leaves, one, strict=True)
        )

        def traced(*given: Tree) -> Tree:
            with faults_at(besides_equations):
                return fn(*given)

        return jax.jit(
            jax.shard_map(traced, mesh=self.mesh, in_specs=(*ins, *more), out_specs=outs, check_vma=False)
        )

    def _shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.plan.traced.jaxpr.in_avals[i].shape)

    @cached_property
    def trained(self) -> list[int]:
        """The numbers of the leaves of params that have gradients."""
        import jax

        avals = self.plan.traced.jaxpr.in_avals[: len(self.plan.traced.param_paths)]
        return [i for i, a in enumerate(avals) if jax.numpy.issubdtype(a.dtype, jax.numpy.inexact)]

    def spec(self, layout: AxisLayout, shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of a layout. shape: of the whole array."""
        where = layout.placement(len(shape), self.program.mesh)
        if where is None:
            raise NotManual(
                f"the parts of the layout {layout} are not contiguous; this is a defect of pase.local"
            )
        return self.plan.spec(where)

    def gradient_specs(self) -> list[PartitionSpec]:
        """PartitionSpecs of the trained leaves' gradients."""
        return [self.spec(self.program.result(self._names[i]).gradient, self._shape(i)) for i in self.trained]

    def gradient_carriers(self, leaves: Sequence[Array]) -> dict[int, Array]:
        """Leaf -> the array at which its gradient is taken: the parameter, or its gradient carrier if the gradient is
        stored in another layout (``LocalResult.gradient_carrier``)."""
        return {
            i: gradient_carrier(leaves[i], self.program.result(self._names[i]), self.program.mesh)
            for i in self.trained
        }

    def forward(
        self,
        leaves: Sequence[Array],
        gradient_carriers: dict[int, Array],
        arrivals: Arrivals | None = None,
        examples: Examples | None = None,
        totals: Totals | None = None,
    ) -> list[Array]:
        """The results of the model on one device.

        gradient_carriers: as the method of this name returns them. arrivals: the parameters that were gathered before.
        examples: those of the micro-batch, if random numbers are drawn for them. totals: the sums over the whole batch,
        if the micro-batch reads any.
        """
        walk = replace(self.walk, arrivals=arrivals, examples=examples, totals=totals)
        closed = self.plan.traced.jaxpr
        values = []
        for i, (x, name) in enumerate(zip(leaves, self._names, strict=True)):
            r = self.program.result(name)
            own = gradient_carriers.get(i)
            has_carrier = r.layout != r.gradient
            values.append(
                walk.leaf(x if own is None or has_carrier else own, name, own if has_carrier else None)
            )
        cache = Cache(body="")
        outs = walk.run(closed.jaxpr, closed.consts, values, "", cache)
        outs = self.own(outs, totals)
        ends = [self.end(j) for j in range(len(outs))]
        pairs = enumerate(zip(outs, ends, strict=True))
        return [self.out(walk, h, op, cache, differentiated=j == 0) for j, (h, op) in pairs]

    def own(self, outs: list[DeviceValue], totals: Totals | None) -> list[DeviceValue]:
        """The model's results: what is returned beside the loss is the micro-batch's own, not the whole batch's."""
        if totals is None:
            return outs
        names = enumerate(zip(outs, self.plan.traced.out_names, strict=True))
        return [replace(h, array=totals.own(t, h.array)) if j else h for j, (h, t) in names]

    def out(
        self, walk: ManualWalk, value: DeviceValue, op: LocalOp | None, cache: Cache, differentiated: bool
    ) -> Array:
        """A result of the model: in the plan's layout if it has one; otherwise as it is made, or replicated if that
        layout has no PartitionSpec.

        differentiated: whether it is the loss. Other results have no gradient, because a collective that replicates
        them may have no derivative (``pmax``).
        """
        import jax

        if op is not None:
            return walk.received(value, op.operands[0], cache).array
        if value.layout is None:
            return value.array
        shape = self.program.result(value.tensor or "").shape
        if value.layout.placement(len(shape), self.program.mesh) is not None:
            return value.array
        made = self.program.maker[value.tensor or ""]
        return resharded(
            value.array if differentiated else jax.lax.stop_gradient(value.array),
            to_whole(value.layout, self.program.mesh),
            shape,
            made.combine,
            JaxArrays(self.program.mesh),
        )

    def returns(self) -> list[PartitionSpec]:
        """PartitionSpecs of the model's results."""
        specs = []
        for j, aval in enumerate(self.plan.traced.jaxpr.out_avals):
            op, name = self.end(j), self.plan.traced.out_names[j]
            layout = AxisLayout.whole(self.program.mesh)
            if op is not None:
                layout = op.operands[0].layout
            elif name in self.program.maker:
                layout = self.program.result(name or "").layout
            where = layout.placement(len(aval.shape), self.program.mesh)
            specs.append(self.plan.spec(where or ()))
        return specs

    def end(self, j: int) -> LocalOp | None:
        """The op that reads a result of the model: the output's, or that of the leaf whose next value the result is."""
        traced = self.plan.traced
        into = {of: leaf for leaf, of in traced.carried.items()}
        if (
            programs := traced.programs
        ):  # each program returns the same results; those of the last one are the next values
            each = len(traced.jaxpr.out_avals) // len(programs)
            into = {k * each + of % each: leaf for of, leaf in into.items() for k in range(len(programs))}
        if j in into:
            at = self.program.maker[self._names[into[j]]].op.eqn
            found = self.program.takers.get(at, ())
            if programs:
                found = tuple(op for op in found if op.op.scope[0].path == programs[j // each])
            return found[0] if found else None
        return self.program.outputs.get(self.plan.traced.out_names[j] or "")


def not_differentiable(run: Callable[..., Tree], fix: str) -> Callable[..., Tree]:
    """The function, whose derivative raises PaseError. fix: what to do instead."""
    import jax

    refusing = jax.custom_vjp(run)

    def refuse(*_: Tree) -> Never:
        raise PaseError("a manually lowered function cannot be differentiated", fix=fix)

    refusing.defvjp(refuse, refuse)
    return refusing  # type: ignore[no-any-return]


def gradient_carrier(x: Array, r: LocalResult, mesh: Mesh) -> Array:
    """The array at which the gradient of a parameter is taken (``Manual.gradient_carriers``).

    x: the parameter on this device. r: its layouts.
    """
    import jax

    if r.layout == r.gradient:
        return x
    if r.gradient_carrier == "zeros":
        return jax.numpy.zeros(r.gradient.local_shape(r.shape, mesh), x.dtype)
    return resharded(x, between(r.layout, r.gradient, mesh), r.shape, "sum", JaxArrays(mesh))
