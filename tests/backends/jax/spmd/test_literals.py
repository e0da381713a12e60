"""Manual lowering of literals, and of equations some of whose results are constants."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal

from bench.cases.plans import TOLERANCE, case_of
from pase.backends.audit.xla import worst_difference
from pase.backends.jax.plan import Lowering
from pase.frontends.jax.versions import literal_array

PARAMS = {"w": jax.random.normal(jax.random.key(1), (16, 16)) * 0.3}
X = jax.random.normal(jax.random.key(0), (8, 16))


def with_rule(f: Any) -> Any:
    """f with its own derivative rule, which writes f's literals into forward and backward."""

    @jax.custom_vjp
    def g(a: Any) -> Any:
        return f(a)

    g.defvjp(lambda a: (f(a), a), lambda a, ct: (jax.vjp(f, a)[1](ct)[0],))
    return g


def turned(start: Any) -> Any:
    """A loop whose first carry is the result of ``start``."""
    return lambda a: lax.scan(lambda c, i: (jnp.maximum(c, a * i), None), start(a), jnp.arange(3.0))[0]


PROGRAMS = {
    "full in a rule": with_rule(lambda a: jnp.maximum(a, jnp.full(a.shape, -jnp.inf))),
    "full of some rows in a rule": with_rule(lambda a: a + jnp.full(a.shape[:1], 0.5)[:, None]),
    "ones in a rule": with_rule(lambda a: a * jnp.ones(a.shape)),
    "a carry of full in a rule": with_rule(turned(lambda a: jnp.full(a.shape, -jnp.inf))),
    "a carry that is a number": lambda a: lax.scan(
        lambda c, r: (c + r.sum(), r * c), 0.0, jnp.moveaxis(a, 1, 0)
    )[1],
    "a bool spread out": lambda a: jnp.where(lax.broadcast_in_dim(True, a.shape, ()) & (a > 0), a, -a),
    "an int spread out": lambda a: a * lax.broadcast_in_dim(3, a.shape, ()),
    "a condition with a number": lambda a: lax.cond(a.sum() > 0, lambda: (a, 1.0), lambda: (-a, 2.0))[0],
    "device_put of a value and a constant": lambda a: sum(jax.device_put((a, jnp.ones((8, 16))))),
    "device_put of two values": lambda a: a @ jax.device_put((a, jnp.sin(a)))[1].T,
    "device_put to a device": lambda a: sum(jax.device_put((a, jnp.ones(16)), jax.devices()[0])),
    "a barrier with a constant": lambda a: sum(lax.optimization_barrier((a, jnp.ones(16)))),
    "a barrier of two layouts": lambda a: (lambda b, c: b @ c.T)(*lax.optimization_barrier((a, jnp.sin(a)))),
    "sums of several values": lambda a: sum(
        jax.vmap(lambda r: lax.psum((r, r * r, jnp.ones(16)), "i"), axis_name="i", out_axes=None)(a)
    ),
    "a constraint to a mesh of the user's": lambda a: lax.with_sharding_constraint(
        a, jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), "d"), jax.sharding.PartitionSpec("d"))
    ),
}


ANNOTATED = ("device_put to a device", "device_put of two values", "a bool spread out")


@pytest.mark.parametrize(
    ("name", "lowering"), [*((n, "manual") for n in PROGRAMS), *((n, "annotated") for n in ANNOTATED)]
)
def test_gradients_are_those_of_one_device(name: str, lowering: Lowering) -> None:
    f = PROGRAMS[name]

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(f(x @ p["w"]) ** 2)

    plan = case_of(loss, PARAMS, X).plan("random1@2x4")
    assert plan is not None
    value, grads = plan.jax.value_and_grad(lowering=lowering)(PARAMS, X)
    wanted, whole = jax.value_and_grad(loss)(PARAMS, X)
    assert worst_difference(float(wanted), float(value)) <= TOLERANCE["loss"]
    assert worst_difference(whole, grads) <= TOLERANCE["gradients"]


@pytest.mark.parametrize("x64", [False, True])
def test_a_literal_is_an_array_of_its_dtype(x64: bool) -> None:
    with jax.enable_x64(x64):
        eqns = jax.make_jaxpr(
            lambda x, y: (
                x * 2.0 + jnp.full(3, -jnp.inf, x.dtype),
                lax.broadcast_in_dim(True, (3,), ()),
                y + 1,
            )
        )(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.int8)).eqns
    literals = [v for v in itertools.chain(*(e.invars for e in eqns)) if isinstance(v, Literal)]
    assert len(literals) == 4
    for v in literals:
        assert (literal_array(v).shape, literal_array(v).dtype) == ((), v.aval.dtype)
