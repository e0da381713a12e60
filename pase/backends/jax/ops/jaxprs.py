"""Helpers for the equations of a jaxpr, which both lowerings share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pase.frontends.jax.types import Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_literal, source_line
from pase.ir.blocks import Block

if TYPE_CHECKING:
    from jax import Array

__all__ = ["KEPT", "REMATERIALISED", "boundary", "noted", "of_operand", "places_only", "unmerged"]

KEPT = "pase_kept"
"""The checkpoint name of results that are residuals if backward recomputes only light ops; the policy saves it."""

REMATERIALISED = ("remat", "remat2", "checkpoint")
"""The primitives of calls whose body backward recomputes."""

_NOTE = "pase was at"


def boundary(jaxpr: Jaxpr, block: Block) -> tuple[list[Var], list[Var]]:
    """(variables that a block of equations reads from outside, variables that it makes for use outside)."""
    mine = jaxpr.eqns[block.start : block.stop]
    made = dict.fromkeys(v for e in mine for v in e.outvars)
    reads = dict.fromkeys(v for e in mine for v in e.invars if not is_literal(v) and v not in made)
    after = [v for e in jaxpr.eqns[block.stop :] for v in e.invars] + list(jaxpr.outvars)
    wanted = {v for v in after if not is_literal(v)}
    return list(reads), [v for v in made if v in wanted]


def places_only(eqn: Eqn) -> bool:
    """Whether an equation only places its operands on devices. Such equations are ignored: the plan decides placement.

    A device_put to another kind of memory does more than that.
    """
    import jax

    def same_memory(to: object) -> bool:
        kind = getattr(to, "memory_kind", None)
        return not isinstance(to, jax.memory.Space) and kind in (None, "device")

    if eqn.primitive.name == "device_put":
        return all(map(same_memory, eqn.params["devices"]))
    return eqn.primitive.name == "sharding_constraint"


def unmerged(x: Array) -> Array:
    """The operand of a scatter, behind a barrier.

    If the operand is a slice of a larger array, XLA merges this slice with the slice that a single update reads, as if
    the update lay inside. An update that lies outside, and must be dropped, then overwrites the first or last row of
    the operand (JAX 0.10.2, on a CPU).
    """
    import jax

    return jax.lax.optimization_barrier(x)


@contextmanager
def noted(eqn: Eqn) -> Iterator[None]:
    """Adds a note to an error that is raised inside: the equation, and the line where the user wrote it."""
    try:
        yield
    except Exception as e:
        if not any(n.startswith(_NOTE) for n in getattr(e, "__notes__", ())):
            e.add_note(f"{_NOTE} '{eqn.primitive.name}' at {source_line(eqn) or 'an unknown line'}")
        raise


def of_operand(eqn: Eqn, i: int) -> Eqn:
    """The equation restricted to operand i and result i. Each of its results must depend on one operand alone."""
    each = {k: (eqn.params[k][i],) for k in ("devices", "srcs", "copy_semantics") if k in eqn.params}
    return eqn.replace(invars=[eqn.invars[i]], outvars=[eqn.outvars[i]], params=eqn.params | each)
