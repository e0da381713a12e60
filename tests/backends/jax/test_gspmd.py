"""The annotated lowering: the constraints of a plan are in the jaxpr, and gradients go back through safe layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.cases.plans import case_of
from pase.backends.jax.gspmd import _steps_back


def constraints_of(jaxpr: Any) -> list[Any]:
    """The specs of all sharding constraints, also of those in calls."""
    out = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            out.append(eqn.params["sharding"].spec)
        for p in eqn.params.values():
            if hasattr(p, "jaxpr"):
                out += constraints_of(p.jaxpr)
    return out


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp", "random1@2x4", "random2@2x4"])
def test_the_jaxpr_has_every_constraint_of_the_plan(strategy: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    plan = case_of(loss, params, jnp.ones((8, 8))).plan(strategy)
    assert plan is not None
    jp = plan.jax
    made = jax.make_jaxpr(jp.loss(lowering="annotated"))(params, jnp.ones((8, 8)))
    found = constraints_of(made.jaxpr)
    routes = [*jp.constraints.define.values(), *jp.constraints.read.values()]
    wanted = [jp.spec(placement) for route in routes for placement in route.layouts]
    assert wanted and all(found.count(spec) >= wanted.count(spec) for spec in wanted)


@pytest.mark.parametrize(
    ("read", "kept", "steps"),
    [
        # One axis more, at the end of a dim: one reduce-scatter.
        ((("a",), ()), (("a", "b"), ()), [(("a", "b"), ())]),
        # One axis more in front of another: it is added behind, and then the order changes.
        ((("a",), ()), (("b", "a"), ()), [(("b", "a"), ())]),
        ((("a",), ()), (("b", "c", "a"), ()), [(("a", "b", "c"), ()), (("b", "c", "a"), ())]),
        # An axis changes its dim: an all-reduce in the layout of the reader comes first.
        ((("a",), ()), (("b",), ("a",)), [(("a",), ()), (("b",), ("a",))]),
        # Nothing changes.
        ((("a",), ()), (("a",), ()), [(("a",), ())]),
    ],
)
def test_a_gradient_goes_back_by_a_reduce_scatter_that_leaves_other_axes_in_place(
    read: Any, kept: Any, steps: list[Any]
) -> None:
    assert list(_steps_back(read, kept)) == steps
