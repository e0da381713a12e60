"""Shared by the zoo's tests of published models: a jaxpr's equations, and what they compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from pase import zoo


def size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations, including those of nested jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if isinstance(value, core.ClosedJaxpr):
                yield from equations(value.jaxpr)
            elif isinstance(value, core.Jaxpr):
                yield from equations(value)


def array(var: Any) -> Any:
    """The abstract value of a jaxpr's variable. It has a shape and a dtype."""
    return var.aval


def shape(var: Any) -> tuple[int, ...]:
    return array(var).shape


def feature_maps(name: str) -> set[tuple[int, ...]]:
    """The shapes of all results in the traced loss for one image."""
    model = zoo.get(name, batch=1)
    jaxpr = jax.make_jaxpr(model.loss_fn)(model.params, model.batch).jaxpr
    return {shape(var) for eqn in equations(jaxpr) for var in eqn.outvars}
