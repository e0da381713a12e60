"""Equations on one device's parts: reductions, literals, constants and equations with several results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pase
from bench.cases.plans import TOLERANCE, case_of
from pase.backends.audit.xla import compare, sharded_step, unsharded_step, worst_difference
from pase.backends.jax.plan import Lowering
from pase.backends.jax.spmd.values import NotManual


def test_maxima_that_an_edge_joins_have_their_gradient():
    """The maximum is reduced for a reader that needs a part of it: each device gets all candidates for its part."""

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["a"]).max(1) @ p["b"]) ** 2)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draw = {k: jnp.asarray(rng.normal(size=s)) for k, s in {"a": (8, 16), "b": (16, 8)}.items()}
        x, optimizer = jnp.asarray(rng.normal(size=(8, 8, 8))), optax.sgd(0.1)
        plan = case_of(loss, draw, x).plan("random2@2x4")
        (top,) = (op for op in plan.jax.program.ops if op.combine == "max")
        assert "partial" in top.results[0].layout and not top.results[0].summed
        step = sharded_step(plan, optimizer, draw, x, lowering="manual")
        assert max(unsharded_step(loss, optimizer, draw, x).differences(step).values()) < 1e-12


def test_what_an_equation_stacks_and_whether_any_is():
    """An equation with several ops, one of them in the node of an input that is stored in another layout; reductions of
    booleans over several devices."""

    def loss(p, x, labels):
        h = x @ p
        score = jnp.stack([jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)], 2)
        weight = jnp.stack([1 - labels, labels], 2)
        dead = jnp.any(h < -3.0, axis=1, keepdims=True) & jnp.all(h < 3.0, axis=0, keepdims=True)
        return jnp.mean(jnp.where(dead[..., None], 0.5, score) * weight)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        p, x = jnp.asarray(rng.normal(size=(24, 16))) / 2, jnp.asarray(rng.normal(size=(32, 24)))
        labels, optimizer = jnp.asarray(rng.integers(0, 2, (32, 16)) * 1.0), optax.sgd(0.1)
        case, whole = case_of(loss, p, x, labels), unsharded_step(loss, optimizer, p, x, labels)
        for strategy in ("ours@2x4", "random1@2x4"):
            step = sharded_step(case.plan(strategy), optimizer, p, x, labels, lowering="manual")
            assert max(whole.differences(step).values()) < 1e-12


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


@pytest.mark.some(10)
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


D, B = 16, 16


def test_summands_are_not_rounded_to_eight_bits():
    """JAX rounds the gradient of an fp8 operand after the sum, and so does a step that is left to XLA. The summands are
    sent in the dtype in which the product makes them, and priced accordingly."""

    def of(params, x):
        a, w = (y.astype(jnp.float8_e4m3fn) for y in (x, params["w"]))
        return (jnp.dot(a, w, preferred_element_type=jnp.float32) ** 2).mean()

    rng = np.random.default_rng(0)
    params, x = ({"w": jnp.asarray(rng.normal(size=(D, D)), "float32")}, jnp.ones((B, D), "float32"))
    plan = case_of(of, params, x).plan("data_parallel")
    with pytest.raises(NotManual) as e:
        sharded_step(plan, optax.sgd(1e-2), params, x, lowering="manual")
    assert e.value.where.startswith("'dot_general' at ") and "float8_e4m3fn" in e.value.what
    with pytest.warns(UserWarning, match="left to XLA"):
        step = sharded_step(plan, optax.sgd(1e-2), params, x)
    np.testing.assert_array_equal(step.gradients["w"], jax.grad(of)(params, x)["w"])
    sums = next(r for r in compare(plan, step.compiled, step.lowering) if r.kind == "all_reduce")
    assert sums.compiled >= 4 * D * D and sums.error == 0


def doubled_outside_shard_map() -> Any:
    """A primitive of another library, whose code runs when JAX compiles the step, and fails inside ``shard_map``."""
    from jax.extend.core import Primitive
    from jax.interpreters import ad, mlir

    doubled = Primitive("doubled_outside_shard_map")

    def double(x: Any) -> Any:
        if jax.typeof(x).sharding.mesh.manual_axes:
            raise ValueError("structures do not match")
        return 2 * x

    doubled.def_impl(double)
    doubled.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    ad.deflinear2(doubled, lambda g, x: [doubled.bind(g)])
    mlir.register_lowering(doubled, mlir.lower_fun(double, multiple_results=False))
    return doubled


def test_a_primitive_that_its_library_cannot_compile_on_parts_is_left_to_xla() -> None:
    doubled = doubled_outside_shard_map()

    def loss(w: Any, x: Any) -> Any:
        return (doubled.bind(x @ w) ** 2).mean()

    w, x = jnp.eye(8) + 0.1, jnp.arange(64.0).reshape(8, 8) / 64
    plan = pase.compile(loss, w, x, devices=2)
    with pytest.warns(UserWarning, match="cannot compile it on parts: ValueError: structures do not match"):
        made = jax.jit(plan.jax.value_and_grad())(w, x)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(jax.value_and_grad(loss)(w, x)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)
    with pytest.raises(NotManual, match="structures do not match"):
        jax.jit(plan.jax.value_and_grad(lowering="manual"))(w, x)
