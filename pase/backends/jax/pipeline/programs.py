"""The programs of one stage: forward, and backward in one or two parts, cut from one jaxpr by its data dependencies.

Forward and the gradients of the stage's inputs and weights are traced as one jaxpr, whose equations are then divided.
Equations that the results need run in forward. Of the rest, equations that the gradients of the inputs need are the
first part of backward (I). The remaining ones are the second part (W). Values that cross from one part to a later one
are residuals. Values that depend only on weights (casts, all-gathers) are computed once per step, or recomputed in each
part. Views of weights, and values that depend on neither weights nor activations, are recomputed in each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.frontends.jax.frontend import INLINED, inner_jaxpr
from pase.frontends.jax.leaves import combine, trained, untrained
from pase.frontends.jax.types import ClosedJaxpr, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import evaluate, function_of, is_literal, opened, value_of
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct
    from jax.sharding import NamedSharding
    from jax.typing import ArrayLike

    from pase.backends.jax.pipeline.unreduced import UnreducedGroups

__all__ = ["Cutting", "StageProgram", "StagePrograms", "flat", "stage_programs"]

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

    prepare: computes what is needed once per step. backward: one program, or its two parts; the last one adds to the
    sums of the weights' gradients. weights, batch, entered, cotangents: variables of the stage's inputs. micro: the
    variable of the micro-batch's number. leaves: variables of the stage's outputs. entered_gradients: variables of the
    gradients of the entering activations, None for an activation without a gradient.
    """

    prepare: StageProgram
    forward: StageProgram
    backward: tuple[StageProgram, ...]
    weights: tuple[Var, ...]
    batch: tuple[Var, ...]
    micro: Var
    entered: tuple[Var, ...]
    cotangents: tuple[Var, ...]
    leaves: tuple[Var, ...]
    entered_gradients: tuple[Var | None, ...]


def stage_programs(
    fn: Callable[..., list[Array]],
    part: Callable[[Sequence[Array], Array], list[Array]],
    weights: Sequence[ShapeDtypeStruct],
    batch: Sequence[ShapeDtypeStruct],
    entered: Sequence[ShapeDtypeStruct],
    *,
    gradient_shardings: Sequence[NamedSharding | None],
    splits_backward: bool,
    hoisted: bool,
    unreduced: UnreducedGroups | None = None,
) -> StagePrograms:
    """Make the programs of a stage: fn(weights, part(batch, micro), entered) -> outputs.

    weights, batch, entered: the shapes of the inputs; those of weights also have shardings. gradient_shardings: for
    each weight, the sharding of its gradient, None if it is not trained. splits_backward: whether backward has two
    parts. hoisted: whether casts and all-gathers of weights run once per step. unreduced: if given, fn and the shapes
    of entered are those of one group, and all values that part returns or that enter or leave the stage have a leading
    dim of groups.
    """
    import jax
    import jax.numpy as jnp

    many = () if unreduced is None else (unreduced.many,)
    shardings = [s if s is None or unreduced is None else unreduced.of_group(s) for s in gradient_shardings]
    run = _gradients(fn, shardings)
    if unreduced is not None:
        run = jax.vmap(run, in_axes=(None, 0, 0, 0), spmd_axis_name=unreduced.axes)

    def stacked(xs: Sequence[ShapeDtypeStruct]) -> list[ShapeDtypeStruct]:
        """The shapes with a leading dim of unreduced groups, if there are any."""
        return [jax.ShapeDtypeStruct((*many, *x.shape), x.dtype) for x in xs]

    def joint(
        weights: Sequence[Array],
        batch: Sequence[Array],
        micro: Array,
        entered: Sequence[Array],
        cotangents: Sequence[Array | None],
    ) -> Tree:
        return run(weights, part(batch, micro), entered, cotangents)

    given = jax.eval_shape(part, list(batch), 0)
    taken = [jax.ShapeDtypeStruct(x.shape[len(many) :], x.dtype) for x in given]
    out = jax.eval_shape(fn, list(weights), taken, list(entered))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    args = (list(weights), list(batch), number, stacked(entered), trained(stacked(out)))
    closed: ClosedJaxpr
    closed, made = jax.make_jaxpr(joint, return_shape=True)(*args)
    if splits_backward:
        closed = flat(closed)
    jaxpr = opened(closed)[0]
    w, b, number, x, ct = jax.tree.unflatten(jax.tree.structure(args), jaxpr.invars)
    y, dx, dw = jax.tree.unflatten(jax.tree.structure(made), jaxpr.outvars)
    cut = Cutting(
        closed=closed,
        weights=dict(zip(w, (getattr(s, "sharding", None) for s in weights), strict=True)),
        batch={*b, number},
        activations={*x, *jax.tree.leaves(ct)},
        hoisted=hoisted,
    )
    kept = [s for s in gradient_shardings if s is not None]
    sums = kept if unreduced is None else [unreduced.stacked(s) for s in kept]
    prepare, forward, backward = cut.programs(
        y, jax.tree.leaves(dx), jax.tree.leaves(dw), sums, 2 if splits_backward else 1
    )
    return StagePrograms(
        prepare=prepare,
        forward=forward,
        backward=backward,
        weights=tuple(w),
        batch=tuple(b),
        micro=number,
        entered=tuple(x),
        cotangents=tuple(jax.tree.leaves(ct)),
        leaves=tuple(y),
        entered_gradients=tuple(dx),
    )


def _gradients(
    fn: Callable[..., list[Array]], shardings: Sequence[NamedSharding | None]
) -> Callable[..., tuple[list[Array], list[Array | None], list[Array | None]]]:
    """f(weights, batch, entered, cotangents) -> (outputs, gradients of entered, gradients of the weights).

    fn: (weights, batch, entered) -> outputs. shardings: those of the weights' gradients. What has no gradient has None
    in place of it.
    """
    import jax

    def gradients(
        weights: Sequence[Array],
        mine: Sequence[Array],
        entered: Sequence[Array],
        cotangents: Sequence[Array | None],
    ) -> tuple[list[Array], list[Array | None], list[Array | None]]:
        def of(some: Sequence[Array | None], x: Sequence[Array | None]) -> tuple[Tree, Tree]:
            outs = fn(combine(some, weights), mine, combine(x, entered))
            return trained(outs), untrained(outs)

        outs, pull, fixed = jax.vjp(of, trained(weights), trained(entered), has_aux=True)
        into_weights, into_entered = pull(cotangents)
        into_weights = [
            None if g is None else jax.lax.with_sharding_constraint(g, s)
            for g, s in zip(into_weights, shardings, strict=True)
        ]
        return combine(outs, fixed), into_entered, into_weights

    return gradients


@dataclass(kw_only=True)
class Cutting:
    """Divides a jaxpr's equations into parts.

    weights: variable of a weight -> its sharding, if known. batch, activations: the variables of these inputs. hoisted:
    whether values that depend only on weights are computed once per step.
    """

    closed: ClosedJaxpr
    weights: Mapping[Var, NamedSharding | None]
    batch: set[Var]
    activations: set[Var]
    hoisted: bool
    producer: dict[Var, int] = field(default_factory=dict)
    heavy: set[Var] = field(default_factory=set)
    """Variables that depend on activations, or on both weights and the batch. Only one part computes them."""
    prepared: set[Var] = field(default_factory=set)
    """Variables that depend only on weights and are computed once per step."""

    def __post_init__(self) -> None:
        where = dict(self.weights)
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
            if reads & self.heavy or (reads & of_weights and reads & of_batch):
                self.heavy.update(makes)
            elif reads & of_weights and self.hoisted and not self._is_view(eqn, where):
                self.prepared.update(makes)

    def _is_view(self, eqn: Eqn, where: dict[Var, NamedSharding | None]) -> bool:
        """Whether an equation is free to recompute: a view, or a constraint to the layout that its operand has."""
        name, out = eqn.primitive.name, eqn.outvars[0]
        source = where.get(eqn.invars[0]) if not is_literal(eqn.invars[0]) else None
        if name == "sharding_constraint":
            where[out] = eqn.params["sharding"]
            return source is not None and source.is_equivalent_to(where[out], out.aval.ndim)
        if source is not None:
            kept = _sliced_sharding(eqn, source)
            if kept is not None:
                where[out] = kept
        return name in _VIEWS

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
        sums: Sequence[NamedSharding],
        parts: int,
    ) -> tuple[StageProgram, StageProgram, tuple[StageProgram, ...]]:
        """(the program that runs once per step, forward, the parts of backward).

        y, dx, dw: the variables of outputs, input gradients and weight gradients. sums: the shardings of the sums of
        the weights' gradients. parts: the number of parts of backward.
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
        return prepare, forward, (*backward, self._program(*found[-1], sums))

    def _program(
        self,
        makes: Sequence[Var],
        equations: Sequence[int],
        reads: Iterable[Var],
        sums: Sequence[NamedSharding] = (),
    ) -> StageProgram:
        """The program of some equations. sums: the shardings of sums to which the last values of makes are added."""
        import jax

        inputs, eqns, others = tuple(reads), opened(self.closed)[0].eqns, len(makes) - len(sums)
        fn = function_of(self.closed, [eqns[i] for i in equations], inputs, makes)

        def run(so_far: Sequence[Array], values: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            outs = fn(*values)
            return [a + g for a, g in zip(so_far, outs[others:], strict=True)], outs[:others]

        jitted = jax.jit(run, donate_argnums=0, out_shardings=(list(sums), [None] * others))
        return StageProgram(reads=inputs, makes=tuple(makes[:others]), run=jitted)


def _sliced_sharding(eqn: Eqn, source: NamedSharding) -> NamedSharding | None:
    """The sharding of a weight's row or of its cast, or None if it is not known."""
    from jax.sharding import NamedSharding, PartitionSpec

    name, spec = eqn.primitive.name, tuple(source.spec)
    if name == "convert_element_type" or (name == "slice" and (not spec or spec[0] is None)):
        return source if eqn.invars[0].aval.shape[1:] == eqn.outvars[0].aval.shape[1:] else None
    if name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,):
        return NamedSharding(source.mesh, PartitionSpec(*spec[1:]))
    return None


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
