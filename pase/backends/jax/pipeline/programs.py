"""The programs of one stage: forward, and backward in one or two parts, cut from one jaxpr by its data dependencies.

Forward and the gradients of the stage's inputs and weights are traced as one jaxpr, whose equations are then divided.
Equations that the results need run in forward. Of the rest, equations that the gradients of the inputs need are the
first part of backward (I). The remaining ones are the second part (W). Values that cross from one part to a later one
are residuals. Values that depend only on weights (casts, all-gathers) are computed once per step, or recomputed in each
part. Views of weights, and values that depend on neither weights nor activations, are recomputed in each part, unless
anything would be sent for them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.backends.jax.spmd.values import besides_equations, faults_at
from pase.frontends.jax.frontend import INLINED, inner_jaxpr
from pase.frontends.jax.types import ClosedJaxpr, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import (
    evaluate,
    function_of,
    is_literal,
    jaxprs_inside,
    opened,
    value_of,
)
from pase.pytree import Tree

if TYPE_CHECKING:
    import numpy as np
    from jax import Array, ShapeDtypeStruct
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec
    from jax.typing import ArrayLike

    from pase.backends.jax.pipeline.device import DeviceStage
    from pase.backends.jax.pipeline.local_stage import HeldArray

__all__ = ["Cutting", "OnDevices", "StageProgram", "StagePrograms", "flat", "stage_programs"]

_SENDS = frozenset(
    {"all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
)
_VIEWS = frozenset({"slice", "squeeze", "reshape", "broadcast_in_dim", "transpose", "dynamic_slice", "rev"})


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProgram:
    """A jitted part: run(sums, values of ``reads``) -> (sums, values of ``makes``).

    sums: those of the weights' gradients for the last part of backward, which adds its own to them; otherwise none.
    """

    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    run: Callable[[list[Array], list[ArrayLike]], tuple[list[Array], list[Array]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePrograms:
    """The programs of a stage, and the variables of its inputs and outputs.

    prepare: computes what is needed once per step. count: from the batch to the values of ``totals``, each device's
    shares of the sums over the whole batch that the stage reads. backward: one program, or its two parts; the last one
    adds to the sums of the weights' gradients. weights, batch, entered, cotangents, totals: variables of the stage's
    inputs. micro: the variable of the micro-batch's number. leaves: variables of the stage's outputs.
    entered_gradients: variables of the gradients of the entering activations, None for an activation without a
    gradient. zeros: makes the sums from the weights. finish: from (weights, sums) to the gradients of the trained
    weights where they are updated.

    Values between programs, and those that enter or leave, have a leading dim of devices; so do the sums.
    """

    prepare: StageProgram
    count: Callable[[list[Array]], list[Array]]
    forward: StageProgram
    backward: tuple[StageProgram, ...]
    weights: tuple[Var, ...]
    batch: tuple[Var, ...]
    micro: Var
    entered: tuple[Var, ...]
    cotangents: tuple[Var, ...]
    totals: Mapping[str, Var]
    leaves: tuple[Var, ...]
    entered_gradients: tuple[Var | None, ...]
    zeros: Callable[[list[Array]], list[Array]]
    finish: Callable[[list[Array], list[Array]], list[Array]]


def stage_programs(
    device: DeviceStage, weights: Sequence[np.dtype], batch: Sequence[np.dtype], *, splits_backward: bool
) -> StagePrograms:
    """Make the programs of a stage. weights, batch: the dtypes of these inputs."""
    import jax

    manual = device.manual
    args = _arguments(device, weights, batch)
    closed, made = _on_device(device.gradients, args, manual.mesh, splits_backward)
    jaxpr = opened(closed)[0]
    w, b, number, x, ct, totals = jax.tree.unflatten(jax.tree.structure(args), jaxpr.invars)
    y, dx, dw = jax.tree.unflatten(jax.tree.structure(made), jaxpr.outvars)
    each, whole = jax.sharding.PartitionSpec(device.mesh.names), jax.sharding.PartitionSpec()
    stored = [manual.spec(h.layout, h.shape) for h in device.stored]
    specs = dict(zip(w, stored, strict=True)) | {number: whole}
    specs |= {v: manual.spec(h.layout, h.shape) for v, h in zip(b, device.given, strict=True)}
    if device.last:
        specs = {v: s for v, s in zip(y, manual.returns(), strict=True) if not is_literal(v)} | specs
    cut = Cutting(
        closed=closed,
        weights=set(w),
        batch={*b, number, *totals.values()},
        activations={*x, *ct},
        hoisted=device.hoisted,
        on_devices=OnDevices(mesh=manual.mesh, each=each, specs=specs),
    )
    prepare, forward, backward = cut.programs(y, jax.tree.leaves(dx), dw, 2 if splits_backward else 1)
    arrive = [specs[v] for v in b]
    count = cut.on_devices.mapped(lambda b: [s[None] for s in device.count(b).values()], (arrive,), each)
    zeros = cut.on_devices.mapped(lambda w: [s[None] for s in device.sums(w)], (stored,), each)
    kept = {s.leaf: h for s, h in zip(device.stage.weights, device.stored, strict=True)}
    updated = [manual.spec(kept[i].gradient, kept[i].shape) for i in device.trained]
    finish = cut.on_devices.mapped(
        lambda w, sums: device.finished(w, [s[0] for s in sums]), (stored, each), updated
    )
    return StagePrograms(
        prepare=prepare,
        count=jax.jit(count),
        forward=forward,
        backward=backward,
        weights=tuple(w),
        batch=tuple(b),
        micro=number,
        entered=tuple(x),
        cotangents=tuple(ct),
        totals=totals,
        leaves=tuple(y),
        entered_gradients=tuple(dx),
        zeros=jax.jit(zeros),
        finish=jax.jit(finish),
    )


def _arguments(device: DeviceStage, weights: Sequence[np.dtype], batch: Sequence[np.dtype]) -> Sequence[Tree]:
    """The shapes on one device of (weights, batch, number of the micro-batch, what enters, cotangents, shares of sums
    over the whole batch)."""
    import jax

    def given(
        held: Sequence[HeldArray], dtypes: Sequence[np.dtype], gradient: bool = False
    ) -> list[ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(h.local(device.mesh, gradient=gradient), d)
            for h, d in zip(held, dtypes, strict=True)
        ]

    avals = device.stage.avals
    coming = [avals[key].dtype for key in device.stage.enters]
    back = [avals[key].dtype for key, on in zip(device.stage.leaves, device.returned, strict=True) if on]
    ends = device.cotangents
    leaves = given(device.given, batch)
    _, shares = _on_device(device.count, (leaves,), device.manual.mesh, False)
    return (
        given(device.stored, weights),
        leaves,
        jax.ShapeDtypeStruct((), jax.numpy.int32),
        given(device.before, coming),
        given(ends, back, gradient=True) if ends else [jax.ShapeDtypeStruct((), d) for d in back],
        shares,
    )


def _on_device(
    fn: Callable[..., Tree], args: Sequence[Tree], mesh: JaxMesh, inline: bool
) -> tuple[ClosedJaxpr, Tree]:
    """(the jaxpr of a function on one device of a mesh, the shapes of its results). inline: whether to inline calls."""
    import jax

    found: list[tuple[ClosedJaxpr, Tree]] = []

    def inside() -> tuple[()]:
        closed, made = jax.make_jaxpr(fn, return_shape=True)(*args)
        found.append((flat(closed) if inline else closed, made))
        return ()

    jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=(), out_specs=(), check_vma=False))
    return found[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class OnDevices:
    """Runs functions on all devices of a mesh.

    each: the layout of an array with a leading dim of devices. specs: the layouts of variables that have no such dim.
    """

    mesh: JaxMesh
    each: PartitionSpec
    specs: Mapping[Var, PartitionSpec]

    def mapped(self, fn: Callable[..., Tree], ins: Tree, outs: Tree) -> Callable[..., Tree]:
        """``fn`` on each device. ins, outs: the layouts of its arguments and results."""
        import jax

        def traced(*given: Tree) -> Tree:
            with faults_at(besides_equations):
                return fn(*given)

        return jax.shard_map(traced, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)

    def program(
        self, fn: Callable[..., list[Array]], reads: Sequence[Var], makes: Sequence[Var], sums: int
    ) -> Callable[..., tuple[list[Array], list[Array]]]:
        """A jitted function: (sums, values of reads) -> (sums, values of makes).

        The last values that ``fn`` returns are added to the sums. sums: their number.
        """
        import jax
        import jax.numpy as jnp

        def of(v: Var) -> PartitionSpec:
            return self.each if is_literal(v) else self.specs.get(v, self.each)

        def run(so_far: Sequence[Array], values: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            mine = [x if v in self.specs else x[0] for v, x in zip(reads, values, strict=True)]
            outs = fn(*mine)
            made = [
                x if of(v) is not self.each else jnp.asarray(x)[None]
                for v, x in zip(makes, outs, strict=False)
            ]
            added = outs[len(makes) :]
            return [s + g.astype(s.dtype)[None] for s, g in zip(so_far, added, strict=True)], made

        ins = ([self.each] * sums, [of(v) for v in reads])
        mapped = self.mapped(run, ins, ([self.each] * sums, [of(v) for v in makes]))
        return jax.jit(mapped, donate_argnums=0)


@dataclass(kw_only=True)
class Cutting:
    """Divides a jaxpr's equations into parts.

    weights, batch, activations: the variables of these inputs. hoisted: whether values that depend only on weights are
    computed once per step.
    """

    closed: ClosedJaxpr
    weights: set[Var]
    batch: set[Var]
    activations: set[Var]
    hoisted: bool
    on_devices: OnDevices
    producer: dict[Var, int] = field(default_factory=dict)
    heavy: set[Var] = field(default_factory=set)
    """Variables that depend on activations, on both weights and the batch, or on a part of the batch that was sent.
    Only one part computes them."""
    prepared: set[Var] = field(default_factory=set)
    """Variables that depend only on weights and are computed once per step."""

    def __post_init__(self) -> None:
        of_weights, of_batch = set(self.weights), set(self.batch)
        self.heavy |= self.activations
        for i, eqn in enumerate(opened(self.closed)[0].eqns):
            reads = {v for v in eqn.invars if not is_literal(v)}
            makes = list(eqn.outvars)
            self.producer.update(dict.fromkeys(makes, i))
            if reads & of_weights:
                of_weights.update(makes)
            if reads & of_batch:
                of_batch.update(makes)
                if _sends(eqn):
                    self.heavy.update(makes)
            if reads & self.heavy or (reads & of_weights and reads & of_batch):
                self.heavy.update(makes)
            elif reads & of_weights and self.hoisted and eqn.primitive.name not in _VIEWS:
                self.prepared.update(makes)

    def needed(self, targets: Iterable[Var], given: set[Var]) -> tuple[list[int], dict[Var, None]]:
        """(the equations that compute the targets, the inputs and given values that these equations read)."""
        left, seen = [v for v in targets if not is_literal(v)], set[Var]()
        equations, reads = set[int](), dict[Var, None]()
        eqns = opened(self.closed)[0].eqns
        constants = set(opened(self.closed)[0].constvars)
        while left:
            v = left.pop()
            if v in seen or v in constants:
                continue
            seen.add(v)
            i = self.producer.get(v)
            if v in given or i is None:
                reads[v] = None
            elif i not in equations:
                equations.add(i)
                left += [u for u in eqns[i].invars if not is_literal(u)]
        return sorted(equations), reads

    def programs(
        self,
        y: Sequence[Var],
        dx: Sequence[Var],
        dw: Sequence[Var],
        parts: int,
    ) -> tuple[StageProgram, StageProgram, tuple[StageProgram, ...]]:
        """(the program that runs once per step, forward, the parts of backward).

        y, dx, dw: the variables of outputs, input gradients and weight gradients. parts: the number of parts of
        backward.
        """
        eqns = opened(self.closed)[0].eqns
        targets = [list(y), list(dx), list(dw)] if parts == 2 else [list(y), [*dx, *dw]]
        given, made = set(self.prepared), list[set[Var]]()
        for ts in targets:
            equations, _ = self.needed(ts, given)
            made.append({v for i in equations for v in eqns[i].outvars} & self.heavy)
            given |= made[-1]
        given = set(self.prepared)
        found = []
        for k, ts in enumerate(targets):
            wanted = list(ts)
            for later in range(k + 1, len(targets)):  # residuals of later parts
                _, reads = self.needed(targets[later], self.prepared.union(*made[:later]))
                wanted += [v for v in reads if v in made[k] and v not in wanted]
            found.append((wanted, *self.needed(wanted, given)))
            given |= made[k]
        used = dict.fromkeys(v for _, _, reads in found for v in reads if v in self.prepared)
        prepare = self._program(list(used), *self.needed(used, set()))
        forward, *backward = [self._program(*part) for part in found[:-1]]
        return prepare, forward, (*backward, self._program(*found[-1], len(dw)))

    def _program(
        self, makes: Sequence[Var], equations: Sequence[int], reads: Iterable[Var], sums: int = 0
    ) -> StageProgram:
        """The program of some equations. sums: how many of the last values of makes are added to sums."""
        inputs, eqns = tuple(reads), opened(self.closed)[0].eqns
        fn = function_of(self.closed, [eqns[i] for i in equations], inputs, makes)
        others = tuple(makes[: len(makes) - sums])
        return StageProgram(reads=inputs, makes=others, run=self.on_devices.program(fn, inputs, others, sums))


def _sends(eqn: Eqn) -> bool:
    """Whether an equation sends anything to other devices."""
    return eqn.primitive.name in _SENDS or any(_sends(e) for j in jaxprs_inside(eqn) for e in j.eqns)


def flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with calls and rematerialised regions inlined, so that their equations can be divided."""
    import jax

    def run(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            ins = [value_of(v, env) for v in eqn.invars]
            calls = eqn.primitive.name in INLINED
            outs = run(*inner_jaxpr(eqn), ins) if calls else evaluate(eqn, ins, info)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(v, env) for v in jaxpr.outvars]

    jaxpr, consts = opened(closed)
    return jax.make_jaxpr(lambda *args: run(jaxpr, consts, args))(*closed.in_avals)
