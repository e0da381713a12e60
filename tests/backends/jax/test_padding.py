"""Padded programs under any strategy agree with the unpadded program on one device, in numpy and in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.plans import case_of
from pase.backends.audit.xla import compare, sharded_step, unsharded_step
from pase.backends.jax.padding import widened
from pase.frontends.jax.frontend import inlined, inner_jaxpr
from pase.frontends.jax.versions import evaluate, is_literal
from pase.ir import Place
from pase.local.interpret import loss_and_gradients
from pase.local.lower import local_program
from pase.local.verify import verify_program
from pase.machine import mesh_from
from pase.tables.layouts import configs
from tests.local.jaxpr_rules import rules_of


def mixing(p, x):
    """Norms, a softmax, products over padded dims, a maximum, a bias, a value with two readers."""
    h = x @ p["a"] + p["bias"]
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt((h * h).mean((0, -1)) + 1e-3)[:, None]
    weights = jnp.exp(h - h.max(-1, keepdims=True))
    h = jnp.tanh(h) * weights / weights.sum(-1, keepdims=True)
    pairs = jnp.einsum("bsd,btd->bst", h, jnp.tanh(h) + p["bias"])
    return jnp.log(jnp.exp(pairs @ h @ p["b"] * 0.1).sum((1, 2))).mean() + (h.min(1) ** 2).mean()


def classing(p, ids):
    """An embedding table, layers in a loop, and a cross-entropy loss over the same table."""
    h = p["table"][ids]

    def layer(h, w):
        return h + jnp.tanh(h @ w), h.sum(1)

    h, every = jax.lax.scan(layer, h, p["layers"])
    logits = h @ p["table"].T
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    picked = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked).mean() + (every**2).mean()


def merging(p, x):
    """Dims that are merged, cut and joined; these ops run unpadded."""
    h = jnp.tanh(x.reshape(-1, x.shape[-1]) @ p["a"]).reshape(*x.shape[:2], -1)
    h = jnp.concatenate([h[:, :2], h[:, 1:]], 1)
    return (jax.lax.cumsum(h, axis=2) @ p["b"] * (h.sum(1, keepdims=True) @ p["b"])).mean()


def shapes_of(fn, b, s, d, e):
    if fn is classing:
        return {"table": (e, d), "layers": (2, d, d)}
    return {"a": (d, e), "bias": (e,), "b": (e, d)}


@functools.cache
def padded_case(fn, extents):
    """(case, values by tensor, loss and gradients of the unpadded function). All dims are padded to multiples of 8."""
    b, s, d, e = extents
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {k: jnp.asarray(rng.normal(size=n) / np.sqrt(d)) for k, n in shapes_of(fn, *extents).items()}
        x = jnp.asarray(rng.integers(0, e, (b, s)) if fn is classing else rng.normal(size=(b, s, d)))
        padding = {n: -(-n // 8) * 8 for n in {d, e} | ({b, s} - {2}) if n % 8}
        made = case_of(fn, params, x, padding=padding)
        loss, grads = jax.value_and_grad(fn)(params, x)
    graph = made.problem.graph
    values = {t.name: widened(np.asarray(params[t.path]), t.shape) for t in graph.parameters}
    values |= {t.name: widened(np.asarray(x), t.shape) for t in graph.inputs}
    values |= constants_of(made.traced, made.traced.jaxpr.jaxpr, made.traced.jaxpr.consts)
    return made, values, float(loss), {k: np.asarray(g) for k, g in grads.items()}


def constants_of(traced, jaxpr, consts=(), prefix=""):
    """Tensor -> value, for all tensors that depend on no data: positions, masks, fills."""
    known, out = dict(zip(jaxpr.constvars, consts, strict=False)), {}
    for i, eqn in enumerate(jaxpr.eqns):
        at = f"{prefix}{i}"
        names = zip(traced.operands[Place(at)], eqn.invars, strict=True)
        out |= {n: np.asarray(known[v]) for n, v in names if n and not is_literal(v) and v in known}
        if all(is_literal(v) or v in known for v in eqn.invars):
            made = evaluate(eqn, [v.val if is_literal(v) else known[v] for v in eqn.invars], jaxpr.debug_info)
            known |= zip(eqn.outvars, made, strict=True)
            out |= {n: np.asarray(x) for n, x in zip(traced.results[Place(at)], made, strict=True)}
        elif eqn.primitive.name == "scan":
            out |= constants_of(traced, eqn.params["jaxpr"].jaxpr, prefix=f"{at}.")
        elif inlined(eqn):
            out |= constants_of(traced, inner_jaxpr(eqn)[0], prefix=f"{at}.")
    return out


EXTENTS = [(31, 3, 7, 13), (5, 7, 11, 31), (8, 4, 13, 17)]


@pytest.mark.release
@settings(max_examples=40)
@given(
    st.sampled_from([mixing, classing, merging]),
    st.sampled_from(EXTENTS),
    st.sampled_from(["8", "2x4", "2x2x2"]),
    st.integers(0, 2000),
)
def test_padded_programs_under_any_strategy_are_the_unpadded_ones(fn, extents, shape, seed):
    made, values, loss, grads = padded_case(fn, extents)
    graph, mesh, rng = made.problem.graph, mesh_from(shape, 8), np.random.default_rng(seed)
    rows = {n.name: configs(n, mesh) for n in graph.nodes}
    program = local_program(graph, mesh, {n: r[rng.integers(len(r))] for n, r in rows.items()})
    verify_program(program)
    jaxpr = made.traced.jaxpr.jaxpr
    value, found = loss_and_gradients(program, graph, values, graph.outputs[0], rules_of(jaxpr))
    assert value == pytest.approx(loss, rel=1e-12)
    paths = {t.name: t.path for t in graph.parameters}
    for t, g in found.items():
        want = grads[paths[t]]
        inside = tuple(map(slice, want.shape))
        np.testing.assert_allclose(g[inside], want, rtol=0, atol=1e-12 * max(1, np.abs(g).max()))
        g[inside] = 0
        assert not np.any(g), "the padding has a gradient"


def step_of(fn, b, s, d, e, padding, strategy, lowering):
    """(differences from the unsharded step, kind of collective -> (predicted bytes, compiled bytes))."""
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=n) / np.sqrt(d)) for k, n in shapes_of(fn, b, s, d, e).items()}
    x = jnp.asarray(rng.integers(0, e, (b, s)) if fn is classing else rng.normal(size=(b, s, d)))
    plan = case_of(fn, params, x, padding=padding).plan(strategy)
    optimizer = optax.adam(1e-2, eps=1e-3)
    step = sharded_step(plan, optimizer, params, x, lowering=lowering)
    off = unsharded_step(fn, optimizer, params, x).differences(step)
    return off, {r.kind: (r.predicted, r.compiled) for r in compare(plan, step.compiled, lowering)}


@pytest.mark.some(3)
@pytest.mark.parametrize("strategy", ["fsdp", "ours@2x4", "random1@2x2x2"])
@pytest.mark.parametrize("lowering", ["manual", "annotated"])
def test_padded_steps_on_devices_are_the_unpadded_one(strategy, lowering):
    with jax.enable_x64(True):
        off, rows = step_of(classing, 31, 3, 13, 61, {31: 32, 13: 16, 61: 64}, strategy, lowering)
        assert max(off.values()) < 1e-12
        assert sum(compiled for _, compiled in rows.values()) > 1000
        if lowering == "manual" and "random" not in strategy:
            assert all(predicted == compiled for predicted, compiled in rows.values())


def test_padded_programs_send_what_even_ones_do():
    with jax.enable_x64(True):
        off, rows = step_of(mixing, 31, 3, 13, 61, {31: 32, 13: 16, 61: 64}, "ours@2x4", "manual")
        _, even = step_of(mixing, 32, 3, 16, 64, {}, "ours@2x4", "manual")
    assert max(off.values()) < 1e-12
    assert rows == even


@jax.custom_vjp
def scored(x, w):
    """A function whose derivative rule calls it and returns other gradients than its true ones."""
    return (x @ w).sum(-1)


scored.defvjp(
    lambda x, w: (scored(x, w), w), lambda w, g: (2 * g[:, None] * w.sum(-1), jnp.full_like(w, 3.0) * g.sum())
)


def test_derivative_rules_of_the_users_hold_on_padded_values():
    def fn(p, x):
        return (scored(jax.nn.relu(x @ p), p.T) ** 2).mean()

    with jax.enable_x64(True):
        p, x = (jnp.asarray(np.random.default_rng(0).normal(size=s)) for s in ((7, 13), (31, 7)))
        made = case_of(fn, p, x, padding={31: 32, 7: 8, 13: 16}).traced
        want = jax.value_and_grad(fn)(p, x)
        loss, grad = jax.value_and_grad(lambda *a: made.fn(*a)[0])(widened(p, (8, 16)), widened(x, (32, 8)))
    assert float(loss) == pytest.approx(float(want[0]), rel=1e-12)
    np.testing.assert_allclose(grad, widened(want[1], (8, 16)), atol=1e-11)
