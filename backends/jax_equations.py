"""The inputs and outputs of a block of a jaxpr's equations."""

from __future__ import annotations

from pase.frontends.jax_types import Jaxpr, Var
from pase.frontends.jax_versions import is_literal
from pase.ir.blocks import Block

__all__ = ["KEPT", "boundary"]

KEPT = "pase_kept"
"""The name of results that are kept for backward if only cheap work is recomputed. The policy asks for this name."""


def boundary(jaxpr: Jaxpr, block: Block) -> tuple[list[Var], list[Var]]:
    """Variables that a block of equations reads from outside, and variables that it makes for use outside."""
    mine = jaxpr.eqns[block.start : block.stop]
    made = dict.fromkeys(v for e in mine for v in e.outvars)
    reads = dict.fromkeys(v for e in mine for v in e.invars if not is_literal(v) and v not in made)
    after = [v for e in jaxpr.eqns[block.stop :] for v in e.invars] + list(jaxpr.outvars)
    wanted = {v for v in after if not is_literal(v)}
    return list(reads), [v for v in made if v in wanted]
