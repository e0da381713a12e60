"""Calls, loops, and calls with their own derivative rules, on padded values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.frontends.jax.attention import call_of
from pase.frontends.jax.frontend import INLINED, KEPT_WHOLE, inner_jaxpr
from pase.frontends.jax.padding.walk import PADDED, PaddedValue, PaddedValues, PaddedWalk
from pase.frontends.jax.types import Eqn, Jaxpr
from pase.frontends.jax.versions import is_dropped, opened, pulled_back, scan_groups, tangents_of
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

__all__: list[str] = []

_REMAT = frozenset({"remat", "remat2", "checkpoint"})


def _function(
    walk: PaddedWalk, jaxpr: Jaxpr, consts: Sequence[Array], like: PaddedValues, made: list[PaddedValue]
) -> Tree:
    """The program as a function of padded arrays.

    like: what is known of its operands.
    made: is filled with what is known of its results when the function is traced.
    """

    def run(*arrays: Array) -> list[Array]:
        outs = walk.run(jaxpr, consts, [PaddedValue(x, k.zero) for x, k in zip(arrays, like, strict=True)])
        made[:] = [PaddedValue(None, x.zero) for x in outs]  # type: ignore[arg-type]
        return [x.array for x in outs]

    return run


def _known(arrays: Sequence[Array], made: PaddedValues) -> list[PaddedValue]:
    return [PaddedValue(x, k.zero) for x, k in zip(arrays, made, strict=True)]


@PADDED.register(*(set(INLINED) - KEPT_WHOLE))
def _call(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue] | None:
    """A call, which is inlined. A call of attention keeps its name, and only its batch may be padded."""
    import jax

    jaxpr, consts = inner_jaxpr(eqn)
    asked = call_of(eqn)
    if asked is None and eqn.primitive.name not in _REMAT:
        return walk.run(jaxpr, consts, ins)
    made: list[PaddedValue] = []
    run = _function(walk, jaxpr, consts, ins, made)
    if asked is None:
        p = eqn.params
        run = jax.checkpoint(run, prevent_cse=p["prevent_cse"], policy=p["policy"])
        return _known(run(*(x.array for x in ins)), made)
    where = frozenset().union(*(walk.padded_dims(x, v.aval) for x, v in zip(ins, eqn.invars, strict=True)))
    if where - {0} or asked.asked == "flash" or walk.sizes.keys() & set(eqn.invars[0].aval.shape[1:]):
        return None
    run.__name__ = asked.name
    return _known(jax.jit(run)(*(x.array for x in ins)), made)


@PADDED.register("scan")
def _scan(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """A loop over a padded body. Nothing is known about the padding of its carries."""
    import jax

    p, (n, m) = eqn.params, scan_groups(eqn)
    jaxpr, consts = opened(p["jaxpr"])
    held, carried, stacks = ins[:n], ins[n : n + m], ins[n + m :]
    turns = [walk.cut(x, v.aval, {0}) for x, v in zip(stacks, eqn.invars[n + m :], strict=True)]
    like = [*held, *(PaddedValue(x.array) for x in carried)]
    like += [PaddedValue(x.array, frozenset(d - 1 for d in x.zero if d)) for x in turns]
    made: list[PaddedValue] = []
    run = _function(walk, jaxpr, consts, like, made)

    def body(carry: list[Array], slices: list[Array]) -> tuple[list[Array], list[Array]]:
        outs = run(*(x.array for x in held), *carry, *slices)
        return outs[:m], outs[m:]

    last, stacked = jax.lax.scan(
        body,
        [jax.numpy.asarray(x.array, v.aval.dtype) for x, v in zip(carried, eqn.invars[n:], strict=False)],
        [x.array for x in turns],
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
        _split_transpose=p.get("_split_transpose", False),
    )
    ends = [PaddedValue(x) for x in last]
    return ends + [
        PaddedValue(x, frozenset(d + 1 for d in k.zero)) for x, k in zip(stacked, made[m:], strict=True)
    ]


def _smooth(eqn: Eqn) -> list[bool]:
    import jax.numpy as jnp

    return [bool(jnp.issubdtype(v.aval.dtype, jnp.inexact)) for v in eqn.invars]


@PADDED.register("custom_jvp_call")
def _with_jvp(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue] | None:
    """A call with the user's rule for forward derivatives; the rule, too, works on padded values."""
    import jax

    if not all(jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact) for v in eqn.outvars):
        return None
    smooth, made = _smooth(eqn), list[PaddedValue]()
    ruled = jax.custom_jvp(_function(walk, *inner_jaxpr(eqn), ins, made))

    def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        jaxpr, consts = opened(tangents_of(eqn, smooth))
        along = [PaddedValue(t) for t, on in zip(tangents, smooth, strict=True) if on]
        outs = walk.run(jaxpr, consts, [*_known(primals, ins), *along])
        made[:] = outs[: len(eqn.outvars)]  # if the call is differentiated, only this rule runs, not the call
        arrays = [x.array for x in outs]
        return arrays[: len(eqn.outvars)], arrays[len(eqn.outvars) :]

    ruled.defjvp(rule)
    return _known(ruled(*(x.array for x in ins)), made)


@PADDED.register("custom_vjp_call", "custom_vjp_call_jaxpr")
def _with_vjp(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """A call with the user's rule for gradients; the rule, too, works on padded values. Gradients of padding are
    zero."""
    import jax

    if walk.ruled:  # the rule may call its own function
        return walk.run(*inner_jaxpr(eqn), ins)
    walk, trained = replace(walk, ruled=True), _smooth(eqn)
    ahead, back, smooth = pulled_back(eqn, trained)
    used = [not is_dropped(v) for v in eqn.outvars]
    kept: list[PaddedValue] = []
    forward = _function(walk, *opened(ahead), ins, kept)

    def results(*arrays: Array) -> list[Array]:
        return forward(*arrays)[: len(smooth)]

    def ran(*arrays: Array) -> tuple[list[Array], list[Array]]:
        outs = forward(*arrays)
        return outs[: len(smooth)], outs[len(smooth) :]

    def backward(residuals: list[Array], gradients: list[Array]) -> tuple[Array | None, ...]:
        jaxpr, consts = opened(back)
        given = _known(residuals, kept[len(smooth) :])
        seen = [g for g, on in zip(gradients, smooth, strict=True) if on]
        avals = [v.aval for v in jaxpr.invars[len(given) :]]
        given += [
            PaddedValue(g, walk.padded_dims(PaddedValue(g), a)) for g, a in zip(seen, avals, strict=True)
        ]
        outs = walk.run(jaxpr, consts, given)
        found = iter(
            walk.masked(x, v.aval, walk.padded_dims(x, v.aval) - x.zero, 0).array
            for x, v in zip(outs, jaxpr.outvars, strict=True)
        )
        return tuple(next(found) if on else None for on in trained)

    ruled = jax.custom_vjp(results)
    ruled.defvjp(ran, backward)
    outs = iter(_known(ruled(*(x.array for x in ins)), kept[: len(smooth)]))
    return [next(outs) if on else PaddedValue(None) for on in used]  # type: ignore[arg-type]
