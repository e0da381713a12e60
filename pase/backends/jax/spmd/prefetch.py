"""Prefetches parameters in the loops of a manually lowered program: an iteration gathers for the next one.

A loop's body is a separate computation, so a gather cannot start before its iteration does. Gathers for the first
products of an iteration would then overlap with nothing, in forward and again in backward. So loops are software
pipelined: the gathers of the first iteration run before the loop, each iteration gathers for the next one, and the last
iteration is peeled off behind the loop. The number of gathers stays the same. Gathers for later products stay in their
iteration, where they overlap with the products before them. The rewrite is applied to the differentiated program, so it
covers both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

from pase.backends.jax.ops.jaxprs import REMATERIALISED
from pase.backends.jax.spmd.collectives import after
from pase.frontends.jax.types import ClosedJaxpr, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import (
    closed,
    evaluate,
    function_of,
    is_literal,
    opened,
    scan_groups,
    scope,
    value_of,
    without_dead_code,
    without_effects,
)
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct

    from pase.frontends.jax.versions import DebugInfo

__all__ = ["PARAMETER", "prefetched"]

PARAMETER = "parameter "
"""The beginning of the name of a scope in which a parameter is resharded for its readers."""

_MESSAGE = "message there of "
_GATHERING = ("all_gather", "all_to_all", "ppermute")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def prefetched(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function, with prefetched gathers of the parameters that its loops' iterations read first.

    fn: an already differentiated function, from pytrees of arrays to a pytree of arrays.
    """
    import jax

    def first_reads(*given: Tree) -> Tree:
        program, out = jax.make_jaxpr(fn, return_shape=True)(*given)
        made = _run(without_dead_code(program), jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(out), made)

    return first_reads


def _run(program: ClosedJaxpr, args: Sequence[Array], inside: bool = False) -> list[Array]:
    """Run a program with its loops rewritten.

    inside: whether it is in a loop's body. There, recomputed regions are inlined, because forward is in another loop,
    so the compiler cannot eliminate the recomputation as a common subexpression.
    """
    jaxpr, consts = opened(program)
    env: dict[Var, Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [value_of(v, env) for v in eqn.invars], jaxpr, inside)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def _equation(eqn: Eqn, ins: Sequence[Array], around: Jaxpr, inside: bool) -> Sequence[Array]:
    import jax

    info, name = around.debug_info._replace(arg_names=None, result_paths=None), eqn.primitive.name
    if any(map(_gathers, _bodies(eqn))):
        if name == "scan":
            nc, nk = scan_groups(eqn)
            numbers = {v for e in around.eqns if not _reads(e) for v in e.outvars}
            zeros = [is_literal(v) or v in numbers for v in eqn.invars[nc : nc + nk]]
            return _PrefetchScan(eqn=eqn, zeros=zeros).run(ins, info)
        if name in ("jit", "pjit") or (name in REMATERIALISED and inside):
            return _run(closed(eqn.params["jaxpr"]), ins, inside)
        if name in REMATERIALISED:
            inner = jax.make_jaxpr(lambda *xs: _run(closed(eqn.params["jaxpr"]), xs))(*ins)
            if not inner.consts:
                eqn = eqn.replace(params=eqn.params | {"jaxpr": inner.jaxpr})
    return evaluate(eqn, ins, info)


def _bodies(eqn: Eqn) -> Iterator[Jaxpr]:
    """The jaxprs inside of an equation."""
    for given in eqn.params.values():
        for one in given if isinstance(given, tuple | list) else (given,):
            if hasattr(one, "jaxpr") or hasattr(one, "eqns"):
                yield opened(one)[0]


def _gathers(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, or any jaxpr inside of it, gathers a parameter for its readers."""
    return any(_is_gather(e) or any(map(_gathers, _bodies(e))) for e in jaxpr.eqns)


def _is_gather(eqn: Eqn) -> bool:
    where = scope(eqn)
    return eqn.primitive.name in _GATHERING and (PARAMETER in where or _MESSAGE in where)


def _is_product(eqn: Eqn) -> bool:
    inner = [e for b in _bodies(eqn) for e in b.eqns]
    return eqn.primitive.name in (*_PRODUCTS, "scan", "while", "cond") or any(map(_is_product, inner))


def _reruns(jaxpr: Jaxpr) -> bool:
    """Whether backward recomputes any part of it."""
    return any(e.params.get("differentiated", False) or any(map(_reruns, _bodies(e))) for e in jaxpr.eqns)


def _reads(eqn: Eqn) -> list[Var]:
    return [v for v in eqn.invars if not is_literal(v)]


@dataclass(frozen=True, kw_only=True)
class _PrefetchParts:
    """A loop's body in two parts.

    prefetch: (constants, slices) -> the gathered parameters for the first readers of an iteration. rest: (constants,
    carry, slices, gathered parameters) -> the results of the body.
    """

    prefetch: Callable[..., list[Array]]
    rest: Callable[..., list[Array]]


@dataclass(frozen=True, kw_only=True)
class _PrefetchScan:
    """A scan whose body gathers parameters.

    zeros: which values of the first carry are literals, or are made by equations without operands.
    """

    eqn: Eqn
    zeros: Sequence[bool]

    @cached_property
    def _recomputes(self) -> bool:
        return _reruns(self.eqn.params["jaxpr"].jaxpr)

    def run(self, ins: Sequence[Array], info: DebugInfo) -> Sequence[Array]:
        """Run the scan. ins: constants, the first carry, stacks. info: debug info of the surrounding jaxpr."""
        import jax

        p = self.eqn.params
        body = jax.make_jaxpr(lambda *xs: _run(p["jaxpr"], xs, inside=True))(*_one(p["jaxpr"]))
        iteration = self._parts_of(body) if p["length"] > 1 and without_effects(body.jaxpr) else None
        if iteration is not None:
            return self._turned(iteration, ins)
        if body.consts:
            return evaluate(self.eqn, ins, info)
        return evaluate(self.eqn.replace(params=p | {"jaxpr": body}), ins, info)

    def _parts_of(self, body: ClosedJaxpr) -> _PrefetchParts | None:
        """The two parts of the body; None if it has nothing to prefetch."""
        jaxpr, (nc, nk) = body.jaxpr, scan_groups(self.eqn)
        slices = jaxpr.invars[nc + nk :]
        behind = jaxpr.invars[nc : nc + nk] if self._recomputes else []
        first_reads = _first(jaxpr, [*jaxpr.constvars, *jaxpr.invars[:nc]], slices, behind)
        if not first_reads:
            return None
        chosen = {id(e) for e in first_reads}
        rest = [e for e in jaxpr.eqns if id(e) not in chosen]
        read = {v for e in rest for v in _reads(e)} | {v for v in jaxpr.outvars if not is_literal(v)}
        held = [v for e in first_reads for v in e.outvars if v in read]
        needed = set(held)
        before: list[Eqn] = []
        for e in reversed(jaxpr.eqns):
            if needed & set(e.outvars):
                before.insert(0, e)
                needed.update(_reads(e))
        return _PrefetchParts(
            prefetch=function_of(body, before, [*jaxpr.invars[:nc], *slices], held),
            rest=function_of(body, rest, [*jaxpr.invars, *held], jaxpr.outvars),
        )

    def _turned(self, iteration: _PrefetchParts, ins: Sequence[Array]) -> Sequence[Array]:
        """Run the loop with the prefetch of each iteration moved to the iteration before it."""
        import jax
        import jax.numpy as jnp

        p, (nc, nk) = self.eqn.params, scan_groups(self.eqn)
        consts, init, stacks = ins[:nc], ins[nc : nc + nk], ins[nc + nk :]
        length = p["length"]
        made = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.eqn.outvars[nk:]]

        def at(k: Array | int) -> Array | int:
            return length - 1 - k if p["reverse"] else k

        def slices(k: Array | int) -> list[Array]:
            return [jax.lax.dynamic_index_in_dim(x, at(k), keepdims=False) for x in stacks]

        def apart(k: Array | int, carry: Sequence[Array]) -> tuple[Sequence[Array], list[Array]]:
            """Constants and slices of an iteration. Outside of the loop, they wait for the carry (``_apart``)."""
            if not isinstance(k, int) and length > 2:  # a loop of one iteration counts as no loop
                return consts, slices(k)
            return self._apart(consts, carry), self._apart(slices(k), carry)

        def whole(k: Array | int, carry: Sequence[Array], held: Sequence[Array], ys: Sequence[Array]) -> Tree:
            same, mine = apart(k, carry)
            outs = iteration.rest(*same, *carry, *mine, *held)
            put = jax.lax.dynamic_update_index_in_dim
            return outs[:nk], [put(all_, y, at(k), 0) for all_, y in zip(ys, outs[nk:], strict=True)]

        def gathered(k: Array | int, carry: Sequence[Array]) -> list[Array]:
            same, mine = apart(k, carry)
            return iteration.prefetch(*same, *mine)

        def body(state: Tree, k: Array) -> Tree:
            carry, held, ys = state
            following = gathered(k + 1, carry)
            carry, ys = whole(k, carry, held, ys)
            return (carry, following, ys), None

        start = (list(init), gathered(0, init), made)
        (carry, held, ys), _ = jax.lax.scan(body, start, jnp.arange(length - 1), unroll=p["unroll"])
        carry, ys = whole(length - 1, carry, held, ys)
        return [*carry, *ys]

    def _apart(self, values: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
        """The values, made to wait for the carry if the loop recomputes parts of forward.

        Outside of the loop, the compiler could otherwise recognize computations of forward and not run them again.
        """
        import jax.numpy as jnp

        late = [x for x, zero in zip(carry, self.zeros, strict=True) if not zero] if self._recomputes else []
        return [reduce(after, late, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in values]


def _one(body: ClosedJaxpr) -> list[ShapeDtypeStruct]:
    import jax

    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals]


def _first(jaxpr: Jaxpr, constants: Sequence[Var], slices: Sequence[Var], behind: Sequence[Var]) -> list[Eqn]:
    """The gathers of a body to prefetch: they read slices, and their readers wait for no product of the iteration.

    behind: the variables of the carry that count as results of a product once the body has recomputed one; empty if the
    body recomputes nothing.
    """
    known, sliced = {*constants, *slices}, set(slices)
    late: set[Var] = set()  # depend on a product of the iteration
    gathered: set[Var] = set()
    steps: list[Eqn] = []
    for e in jaxpr.eqns:
        reads = set(_reads(e))
        if reads <= known and without_effects(e):
            known.update(e.outvars)
            if _is_product(e):
                late.update(behind)
        if reads & sliced:
            sliced.update(e.outvars)
        if reads & late or _is_product(e):
            late.update(e.outvars)
        if _is_gather(e) and reads <= known and reads & sliced:
            steps.append(e)
            gathered.update(e.outvars)
        elif reads and reads <= gathered:  # a view of gathered parameters
            gathered.update(e.outvars)
    soon: set[Var] = set()
    for e in reversed(jaxpr.eqns):
        reads = set(_reads(e))
        if soon & set(e.outvars) and (reads <= gathered or _is_gather(e)):
            soon |= reads
        elif not (reads <= gathered or reads & late or any(e is m for m in steps)):
            soon |= reads & gathered
    return [e for e in steps if soon & set(e.outvars)]
