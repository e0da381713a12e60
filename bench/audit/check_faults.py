"""Plants faults in a step, to see whether ``plan.jax.check`` finds them.

The fault may be in a reshard between devices (manual lowering), in the derivative of one equation, or in what the step
returns. The last two kinds work for any plan, and do not need a new compilation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from pase.backends.jax import check_plans
from pase.backends.jax.check import CheckedProgram
from pase.frontends.jax.blocks import split_inputs
from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.versions import evaluate, is_literal, value_of, without_dead_code
from pase.local import reshard as moves

__all__ = ["MOVES", "gradient_fault", "moved_wrongly", "planted", "state_fault", "step_faults"]

StepRun = Callable[..., tuple[Any, Any]]

MOVES = ("dropped", "mean", "counted too often", "a part is missing", "at the wrong device")
"""Kinds of faults in a reshard between devices."""


def _wrong(fault: str, move: Any, x: Any, right: Callable[[Any], Any]) -> Any:
    """Returns the result of a reshard with a fault."""
    axis, ways = move.axes[0], jax.lax.axis_size(tuple(move.axes))
    me = jax.lax.axis_index(axis)
    if fault == "dropped" and move.kind == "all_reduce":
        return x
    if fault == "mean":
        return right(x) / ways if jnp.issubdtype(x.dtype, jnp.inexact) else right(x)
    if fault == "counted too often":
        return right(x) * ways
    if fault == "at the wrong device":
        n = jax.lax.axis_size(axis)
        return jax.lax.ppermute(right(x), axis, [(i, (i + 1) % n) for i in range(n)])
    return right(jnp.where(me == 0, jnp.zeros((), x.dtype), x))


@contextmanager
def moved_wrongly(fault: str, number: int) -> Iterator[list[str]]:
    """Plants a fault in the reshard with this number, as counted during lowering.

    Yields the list of the reshards, which is filled as they are lowered.
    """
    right, made = moves._after_step, []

    def step(x: Any, move: Any, *rest: Any) -> Any:
        made.append(f"{move.kind} over {'·'.join(move.axes)}")
        if len(made) - 1 != number or not move.axes:
            return right(x, move, *rest)
        return _wrong(fault, move, x, lambda v: right(v, move, *rest))

    with patch.object(moves, "_after_step", step):
        yield made


@dataclass(frozen=True, kw_only=True)
class StepFault:
    """A fault in what a step computes or returns. kind: the kind of fault. where: its parameter or equation."""

    kind: str
    where: str
    run: StepRun


@contextmanager
def planted(fault: Callable[[CheckedProgram, TracedJax], StepFault]) -> Iterator[None]:
    """Every check inside this context runs the step with the fault."""
    right = check_plans.check_of

    def wrong(program: CheckedProgram, traced: TracedJax, *rest: Any) -> Any:
        return right(replace(program, run=fault(program, traced).run), traced, *rest)

    with patch.object(check_plans, "check_of", wrong):
        yield


def step_faults(program: CheckedProgram, traced: TracedJax, rng: np.random.Generator) -> Iterator[StepFault]:
    """Yields faults endlessly, alternating between the kinds that this program can have."""
    kinds = (_of_gradients, _of_equations, _of_equations, _of_batch, _of_state, _of_equations)
    while True:
        for kind in kinds:
            found = kind(program, traced, rng)
            if found is not None:
                yield found


# ---- faults in what the step returns


def _rolled(x: Any) -> Any:
    dims = [d for d, n in enumerate(x.shape) if n > 1]
    return jnp.roll(x, x.shape[dims[0]] // 2, dims[0]) if dims else -x


def _one_part(x: Any, to: Callable[[Any], Any]) -> Any:
    """Returns the array with the part of one device changed."""
    index = x.sharding.addressable_devices_indices_map(x.shape)
    mine = sorted({str(i): i for i in index.values()}.values(), key=str)[-1]
    made = np.array(x)
    made[mine] = to(made[mine])
    return made


def _one_copy(x: Any) -> Any:
    """Returns the array with one device's copy halved; the others are right."""
    parts = [s.data for s in x.addressable_shards]
    parts[-1] = parts[-1] / 2
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


GRADIENTS: Mapping[str, Callable[[Any], Any]] = {
    "summed twice": lambda g: 2 * g,
    "a mean instead of a sum": lambda g: g / 2,
    "no gradient": lambda g: 0 * g,
    "permuted": _rolled,
    "a part is not summed": lambda g: _one_part(g, lambda v: v / 2),
    "a part is missing": lambda g: _one_part(g, lambda v: 0 * v),
    "a part of another device": lambda g: _one_part(g, lambda v: v[::-1] if v.ndim else -v),
    "one device's copy": _one_copy,
}


def _of_gradients(program: CheckedProgram, traced: TracedJax, rng: np.random.Generator) -> StepFault:
    return gradient_fault(program, str(rng.choice(list(GRADIENTS))), int(rng.integers(len(program.owners))))


def gradient_fault(program: CheckedProgram, kind: str, k: int) -> StepFault:
    """Returns a fault in the gradient of the trained array with this number."""

    def run(*args: Any) -> Any:
        value, grads = program.run(*args)
        leaves, tree = jax.tree.flatten(grads)
        made = GRADIENTS[kind](leaves[k])
        leaves[k] = made if kind == "one device's copy" else jax.device_put(made, leaves[k].sharding)
        return value, jax.tree.unflatten(tree, leaves)

    return StepFault(kind=kind, where=program.names[program.owners[k]], run=run)


def _of_batch(program: CheckedProgram, traced: TracedJax, rng: np.random.Generator) -> StepFault | None:
    """Yields faults with the gradients of a batch of which one half counts twice and the other not at all."""
    split = split_inputs(traced)

    def twice(x: Any, on: bool) -> Any:
        if not on or x.shape[0] % 2:
            return x
        return jax.device_put(jnp.repeat(x[::2], 2, axis=0), x.sharding)

    def run(params: Any, *batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(batch)
        wrong = jax.tree.unflatten(tree, [twice(x, on) for x, on in zip(leaves, split, strict=True)])
        return program.run(params, *batch)[0], program.run(params, *wrong)[1]

    return StepFault(kind="a micro-batch counts twice, another not", where="batch", run=run)


def _of_state(program: CheckedProgram, traced: TracedJax, rng: np.random.Generator) -> StepFault | None:
    return state_fault(program, traced) if traced.carried else None


def state_fault(program: CheckedProgram, traced: TracedJax) -> StepFault:
    """Returns a fault in which the step returns the state that it was given."""

    def run(*args: Any) -> Any:
        value, grads = program.run(*args)
        given = jax.tree.leaves(args)
        leaves, tree = jax.tree.flatten(value)
        for i, j in traced.carried.items():
            leaves[j] = given[i]
        return jax.tree.unflatten(tree, leaves), grads

    return StepFault(kind="state not advanced", where="state", run=run)


# ---- faults in the derivative of one equation

SMOOTH_AT_ZERO = frozenset(
    {"exp", "tanh", "logistic", "sin", "cos", "erf", "integer_pow", "square", "mul", "expm1", "dot_general"}
)
NONLINEAR = SMOOTH_AT_ZERO | {"log", "rsqrt", "sqrt", "div", "pow", "log1p", "abs", "max"}


@dataclass(frozen=True, kw_only=True)
class FaultSite:
    """An operand of an equation. again: whether its value has other readers as well."""

    number: int
    operand: int
    name: str
    again: bool


def _of_equations(program: CheckedProgram, traced: TracedJax, rng: np.random.Generator) -> StepFault | None:
    places = {frozenset(x.sharding.device_set) for x in jax.tree.leaves(program.params)}
    if len(places) > 1 or traced.jaxpr.in_avals[-1].shape != jax.tree.leaves(program.batch)[-1].shape:
        return None  # in stages, or the traced program is that of a micro-batch
    kind = str(rng.choice(list(EQUATIONS)))
    fits, how = EQUATIONS[kind]
    sites = [s for s in _sites(traced) if fits(s)]
    if not sites:
        return None
    site = sites[int(rng.integers(len(sites)))]
    keep = len(traced.param_paths)

    def loss(mine: Sequence[Any], rest: Sequence[Any], where: Sequence[bool]) -> Any:
        sources = {True: iter(mine), False: iter(rest)}
        given = [next(sources[on]) for on in where]
        return _evaluated(_needed(traced), given, site, how)[0]

    graded = jax.jit(jax.grad(loss), static_argnums=2)

    def run(*args: Any) -> Any:
        value, grads = program.run(*args)
        leaves = [jax.device_put(x, jax.devices()[0]) for x in jax.tree.leaves(args)]
        on = tuple(k < keep and jnp.issubdtype(x.dtype, jnp.inexact) for k, x in enumerate(leaves))
        wrong = graded(
            *([x for x, o in zip(leaves, on, strict=True) if o == want] for want in (True, False)), on
        )
        right, tree = jax.tree.flatten(grads)
        placed = [jax.device_put(w, g.sharding) for w, g in zip(wrong, right, strict=True)]
        return value, jax.tree.unflatten(tree, placed)

    return StepFault(kind=kind, where=f"{site.name} {site.number}", run=run)


def _needed(traced: TracedJax) -> Any:
    """Returns the program that computes only the loss."""
    return without_dead_code(traced.jaxpr, [k == 0 for k in range(len(traced.jaxpr.jaxpr.outvars))])


def _sites(traced: TracedJax) -> list[FaultSite]:
    """Yields the operands through which a gradient reaches a parameter."""
    out: list[FaultSite] = []
    count = [0]

    def walk(jaxpr: Any, depends: dict[Any, bool]) -> None:
        readers: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if not is_literal(v):
                    readers[v] = readers.get(v, 0) + 1
        for eqn in jaxpr.eqns:
            number, count[0] = count[0], count[0] + 1
            on = [not is_literal(v) and depends.get(v, False) for v in eqn.invars]
            for v in eqn.outvars:
                depends[v] = any(on) and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            if eqn.primitive.name in ("pjit", "jit"):
                inner = eqn.params["jaxpr"].jaxpr
                walk(inner, dict(zip(inner.invars, on, strict=True)))
                continue
            if not any(depends[v] for v in eqn.outvars):
                continue
            out.extend(
                FaultSite(number=number, operand=j, name=eqn.primitive.name, again=readers[v] > 1)
                for j, v in enumerate(eqn.invars)
                if on[j]
            )

    inner = _needed(traced).jaxpr
    params = {v: jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in inner.invars[: len(traced.param_paths)]}
    walk(inner, params)
    return out


def _evaluated(closed: Any, args: Sequence[Any], site: FaultSite, how: Callable[..., Any]) -> list[Any]:
    """Returns the program's results, with a wrong derivative of one equation."""
    count = [0]

    def run(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))

        def of(v: Any) -> Any:
            return value_of(v, env)

        for eqn in jaxpr.eqns:
            number, count[0] = count[0], count[0] + 1
            ins = [of(v) for v in eqn.invars]
            if eqn.primitive.name in ("pjit", "jit"):
                inner = eqn.params["jaxpr"]
                outs = run(inner.jaxpr, inner.consts, ins)
            elif number == site.number:
                outs = how(partial(evaluate, eqn, info=jaxpr.debug_info), ins, site.operand)
            else:
                outs = evaluate(eqn, ins, jaxpr.debug_info)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [of(v) for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, args)


def _gradient_as(change: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """Returns a way to run an equation in which the gradient to the operand is changed."""

    def how(apply: Callable[..., list[Any]], ins: list[Any], operand: int) -> list[Any]:
        same = jax.custom_vjp(lambda x: x)
        same.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
        return apply([same(x) if j == operand else x for j, x in enumerate(ins)])

    return how


def _linearised_at(change: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """Returns a way to run an equation whose derivative is taken at another value of the operand."""

    def how(apply: Callable[..., list[Any]], ins: list[Any], operand: int) -> list[Any]:
        smooth = [j for j, x in enumerate(ins) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

        def of(xs: Sequence[Any]) -> list[Any]:
            every = list(ins)
            for j, x in zip(smooth, xs, strict=True):
                every[j] = x
            return apply(every)

        wrong = jax.custom_vjp(lambda *xs: of(xs))

        def forward(*xs: Any) -> Any:
            at = [change(x) if j == operand else x for j, x in zip(smooth, xs, strict=True)]
            return of(xs), at

        wrong.defvjp(forward, lambda at, g: jax.vjp(lambda *xs: of(xs), *at)[1](g))
        return list(wrong(*(jnp.asarray(ins[j]) for j in smooth)))

    return how


EQUATIONS: Mapping[str, tuple[Callable[[FaultSite], bool], Callable[..., list[Any]]]] = {
    "a carrier of zeros before a nonlinear op": (
        lambda s: s.name in SMOOTH_AT_ZERO,
        _linearised_at(jnp.zeros_like),
    ),
    "another's kept value": (lambda s: s.name in NONLINEAR, _linearised_at(_rolled)),
    "a stopped gradient": (lambda s: True, _gradient_as(jnp.zeros_like)),
    "a term of several is dropped": (lambda s: s.again, _gradient_as(jnp.zeros_like)),
    "a term of several counts twice": (lambda s: s.again, _gradient_as(lambda g: 2 * g)),
    "a missing scale": (lambda s: True, _gradient_as(lambda g: g / 2)),
    "a permuted cotangent": (lambda s: True, _gradient_as(_rolled)),
}
"""Kind of fault -> (where it is possible, how the equation is run)."""
