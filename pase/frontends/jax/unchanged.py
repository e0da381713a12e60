"""Finds results of a jaxpr that are its own arguments, through calls, loops and branches that pass them on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pase.frontends.jax.modules import ModuleFunction
from pase.frontends.jax.program import Carry, JaxProgram, Mode, program_of
from pase.frontends.jax.types import Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_literal, jaxprs_inside, opened, scan_groups, without_dead_code
from pase.pytree import Tree

__all__ = ["advancing", "unchanged"]


def unchanged(jaxpr: Jaxpr, calls: Collection[str]) -> list[int | None]:
    """For each result, the number of the argument that it equals, or None.

    calls: the primitives that call a jaxpr once, on their operands.
    """
    of: dict[Var, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for out, k in zip(eqn.outvars, _operands(eqn, calls), strict=False):
            if k is not None and not is_literal(eqn.invars[k]) and eqn.invars[k] in of:
                of[out] = of[eqn.invars[k]]
    return [None if is_literal(v) else of.get(v) for v in jaxpr.outvars]


def _operands(eqn: Eqn, calls: Collection[str]) -> list[int | None]:
    """For each result of an equation, the operand that it equals. Empty if no result equals an operand."""
    name = eqn.primitive.name
    if name in calls:
        inner = next(jaxprs_inside(eqn), None)
        same = [] if inner is None else unchanged(inner, calls)
        return same if inner is not None and len(inner.invars) == len(eqn.invars) else []
    if name == "scan":
        consts, carried = scan_groups(eqn)
        same = unchanged(opened(eqn.params["jaxpr"])[0], calls)
        # A carry equals its initial value if each iteration passes it on. A stack of slices equals what was sliced.
        ahead = [k if k == consts + j else None for j, k in enumerate(same[:carried])]
        return ahead + [k if k is not None and k >= consts + carried else None for k in same[carried:]]
    if name == "while":
        own, asked = eqn.params["body_nconsts"], eqn.params["cond_nconsts"]
        same = unchanged(opened(eqn.params["body_jaxpr"])[0], calls)
        return [asked + k if k == own + j else None for j, k in enumerate(same)]
    if name == "cond":
        each = [unchanged(opened(b)[0], calls) for b in eqn.params["branches"]]
        return [
            ks[0] + 1 if ks[0] is not None and len(set(ks)) == 1 else None for ks in zip(*each, strict=True)
        ]
    return []


def advancing(
    fn: ModuleFunction,
    program: JaxProgram,
    args: tuple[Tree, ...],
    as_shapes: Tree,
    mode: Mode,
    carry: Carry | None,
    calls: Collection[str],
) -> tuple[ModuleFunction, JaxProgram]:
    """The program that returns only those arrays of modules that it changes. Loops and calls that take modules, such as
    nnx.scan, return all of them. calls: the primitives that call a jaxpr once, on their operands."""
    import jax

    same = unchanged(program.jaxpr.jaxpr, calls)
    handed_on = {i: same[j] for i, j in program.carried.items()}
    if kept := fn.handed_on(jax.tree.structure(as_shapes), handed_on):
        fn = replace(fn, constant=fn.constant | kept)
        program = program_of(fn, args, as_shapes, mode, carry)
    # What is not returned is not computed either, also where the function is traced again, on a part of its batch.
    return fn, replace(program, jaxpr=without_dead_code(program.jaxpr)) if fn.constant else program
