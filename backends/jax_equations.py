"""Equations of a jaxpr, one by one or as a block, by JAX's public means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pase.ir.blocks import Block

__all__ = ["boundary", "evaluate"]


def boundary(jaxpr: Any, block: Block) -> tuple[list[Any], list[Any]]:
    """Variables that a block of equations reads from outside, and those that it makes for outside."""
    from jax.extend.core import Literal

    mine = jaxpr.eqns[block.start : block.stop]
    made = dict.fromkeys(v for e in mine for v in e.outvars)
    reads = dict.fromkeys(v for e in mine for v in e.invars if not isinstance(v, Literal) and v not in made)
    after = [v for e in jaxpr.eqns[block.stop :] for v in e.invars] + list(jaxpr.outvars)
    wanted = {v for v in after if not isinstance(v, Literal)}
    return list(reads), [v for v in made if v in wanted]


def evaluate(eqn: Any, ins: Sequence[Any], info: Any) -> list[Any]:
    """One equation as it stands, by JAX's public means: a jaxpr that holds it alone."""
    from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

    args = {v: x for v, x in zip(eqn.invars, ins, strict=True) if not isinstance(v, Literal)}
    kept = [v for v in eqn.outvars if type(v).__name__ != "DropVar"]
    alone = Jaxpr((), list(args), kept, [eqn], eqn.effects, info)
    outs = iter(jaxpr_as_fun(ClosedJaxpr(alone, ()))(*args.values()))
    return [next(outs) if type(v).__name__ != "DropVar" else None for v in eqn.outvars]
