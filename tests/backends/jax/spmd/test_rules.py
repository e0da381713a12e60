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
from pase.backends.jax.spmd.lower import Lowering
from pase.backends.jax.spmd.values import NotManual
from pase.frontends.jax.frontend import from_jax


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


def _written_rows(w, cache, ids):
    """Each example's own row of a cache, whose other dims ``vmap`` indexes too."""
    write = jax.vmap(lambda c, u, i: lax.dynamic_update_slice(c, u, (i, 0, 0)))
    return write(jnp.tanh(cache * w), cache[:, :1] * w[:1], ids)


def _frames(w, cache, ids):
    """Parts of all examples."""
    rows = (cache * w).reshape(8, -1)
    return jax.vmap(lambda i: lax.dynamic_slice(rows, (0 * i + 3, 2 * i), (8, 9)))(ids)


def _added_windows(w, cache, ids, mode, rows=6):
    """Windows in rows that are mostly out of bounds: they are moved into the array, or dropped."""
    at = lax.ScatterDimensionNumbers((1, 2), (0,), (0, 1))
    places, new = (
        jnp.stack([2 * ids - 3, 2 * ids - 2 if rows < 6 else ids], -1),
        cache[:, 0, :rows] * w[0, :rows],
    )
    return lax.scatter_add(1.0 * w, places, new, at, mode=mode)


def _read_windows(w, cache, ids, mode, fill=None):
    at = lax.GatherDimensionNumbers((1, 2), (0,), (0, 1))
    places = jnp.stack([2 * ids - 3, 2 * ids - 2], -1)
    return lax.gather(w, places, at, (1, 3, 4), mode=mode, fill_value=fill) * cache[:, 0, :3]


WINDOWS = {
    "written rows": _written_rows,
    "frames": _frames,
    "moved, whole": lambda *given: _added_windows(*given, "clip"),
    "moved": lambda *given: _added_windows(*given, "clip", 3),
    "dropped": lambda *given: _added_windows(*given, "drop", 3),
    "read, moved": lambda *given: _read_windows(*given, "clip"),
    "read, filled": lambda *given: _read_windows(*given, "fill", 2.0),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_one_device_where_other_dims_are_split(name: str) -> None:
    """An index names dims that are split and dims along which a window is longer than an element."""

    def loss(p, cache, ids):
        return jnp.mean(WINDOWS[name](p, cache, ids) ** 2)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        p, cache, ids = jnp.asarray(rng.normal(size=(8, 6, 4))), rng.normal(size=(8, 8, 6, 4)), jnp.arange(8)
        given, optimizer = (p, jnp.asarray(cache), ids), optax.sgd(0.1)
        case, whole = case_of(loss, *given), unsharded_step(loss, optimizer, *given)
        for strategy in ("random1@2x4", "random2@2x4", "random8@2x4"):
            step = sharded_step(case.plan(strategy), optimizer, *given, lowering="manual")
            assert max(whole.differences(step).values()) < 1e-12


def test_a_dim_of_which_windows_are_whole_can_be_split() -> None:
    """``vmap`` of a dynamic slice or update indexes every dim, also one that it reads or writes whole."""
    given = jnp.ones((8, 6, 4)), jnp.ones((7, 8, 6, 4)), jnp.arange(7)
    for name, kind in (("written rows", "scatter"), ("frames", "gather")):
        cache = jnp.ones((8, 8, 6, 4)) if name == "frames" else given[1]
        graph = from_jax(lambda *x, name=name: WINDOWS[name](*x).sum(), given[0], cache, given[2])
        (node,) = (n for n in graph.nodes if n.kind == kind)
        whole = {d.size for d in node.space if d.kind == "parallel"}
        assert whole >= ({7, 6, 4} if name == "written rows" else {7, 8})


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
    "a stack with constants": lambda a: jnp.stack([jnp.zeros_like(a), a, jnp.full(a.shape, 0.5)], 1).max(1),
    "a selection": lambda a: jnp.select([a < 0, a > 1], [a, a * a], 0.5),
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
