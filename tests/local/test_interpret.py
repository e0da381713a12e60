"""Any program under any strategy agrees with the unsharded one: local programs run in numpy, on all devices."""

import functools
from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.plans import ExpensiveCompute, case_of
from pase.api import Plan
from pase.compiler.meshes.plans import plan_of
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.variants import Variant
from pase.errors import PaseError
from pase.local.interpret import loss_and_gradients
from pase.local.lower import local_program, program_of
from pase.local.verify import verify_program
from pase.machine import mesh_from
from pase.tables.layouts import configs
from tests.local.jaxpr_rules import plain_attention, rules_of
from tests.local.programs import chunks_of, cut, joined


def attending(p, x):
    """Products whose dims are merged and split, a softmax, and a weight that is used twice."""
    q, k = ((x @ p["square"]).reshape(8, 4, 4, 4), (jnp.tanh(x) @ p["square"]).reshape(8, 4, 4, 4))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
    scores = jnp.exp(scores - scores.max(-1, keepdims=True))
    mixed = jnp.einsum("bhqs,bshk->bqhk", scores / scores.sum(-1, keepdims=True), q)
    h = mixed.reshape(x.shape) @ p["up"]
    return jnp.sum(h * h)


def normed(p, x):
    """Statistics over the batch, and a maximum that a matmul reads."""
    h = x @ p["square"] + p["bias"]
    h = h - h.sum((0, 1))
    h = h / jnp.sqrt((h * h).sum((0, 1)))
    return jnp.sum(jnp.tanh(h.max(1) @ p["up"]) * (h.sum(1) @ p["up"]))


def branching(p, x):
    """Values that several nodes read, both transposed and not."""
    h = jnp.exp(jnp.tanh(x @ p["square"]))
    mixed = jnp.einsum("bsd,btd->bst", h, h + p["bias"])
    return jnp.mean(jnp.tanh(jnp.swapaxes(mixed, 1, 2) @ h @ p["up"]) * (h @ p["up"]))


def imaging(p, x):
    """Overlapping windows with strides, dilation and padding, and without; a maximum and a mean over windows."""
    y = jnp.tanh(x.reshape(8, 8, 8, 1) @ p["bias"].reshape(1, 4))

    def conv(y, w, stride=1, dilation=1, padding="SAME"):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            y, w, (stride, stride), padding, rhs_dilation=(dilation, dilation), dimension_numbers=numbers
        )

    y = conv(y, p["first"])
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 2, 1), (1, 1, 2, 1), "SAME")
    y = jnp.tanh(conv(y, p["next"], dilation=2))
    y = jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 1, 1), "SAME") / 4.0
    y = conv(y, p["next"], stride=2, padding=[(2, 0), (1, 0)])
    return jnp.sum(y * y * 0.5)


def looking(p, ids):
    """Lookups in a table, a cross-entropy loss, and rows that are added to a table by index."""
    h = jnp.tanh(p["square"][ids])
    logits = h @ p["up"]
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    picked = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    table = (2.0 * p["square"]).at[ids.reshape(32)].add(h.reshape(32, 16))
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked).mean() + jnp.sum(jnp.tanh(table @ p["up"])) / 8


def looping(p, x):
    """Layers in a loop, each with a slice of a stack; the results of all iterations are read together."""

    def layer(h, w):
        y = jnp.tanh(h @ w[0]) * w[1]
        return h + y, y.sum(1)

    h, every = jax.lax.scan(layer, x, (p["layers"], p["scales"]))
    return jnp.sum(jnp.tanh(every @ p["up"])) + jnp.sum(jnp.exp(h) @ p["up"])


def reversing(p, x):
    """A loop that begins at the last row of its stacks, and a reshape whose dims do not nest."""

    def layer(h, w):
        y = jnp.tanh(h @ w[0]) * w[1]
        return h + y, y.sum(1)

    h, every = jax.lax.scan(layer, x, (p["layers"], p["scales"]), reverse=True)
    return jnp.sum(jnp.tanh(every.reshape(16, 24).T @ p["up"])) + jnp.sum(jnp.exp(h) @ p["up"])


def reaching_beyond(p, x):
    """Windows that reach beyond images of one element."""
    y = jnp.tanh(x.reshape(32, 1, 1, 16))
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(y, p["first"], (1, 1), "SAME", dimension_numbers=numbers)
    y = jnp.exp(y) + jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return jnp.sum(jnp.tanh(y))


def choosing(p, x):
    """A conditional on data with two branches, each of which reads a parameter that the other does not."""
    h = jnp.tanh(x @ p["square"])
    h = jax.lax.cond(
        jnp.sum(h) < jnp.sum(p["bias"]), lambda h: jnp.tanh(h @ p["square"]) + h, lambda h: h * p["bias"], h
    )
    return jnp.sum(jnp.tanh(h @ p["up"]) * (h.sum(1, keepdims=True) @ p["up"]))


def ordering(p, x):
    """A sort, a cumulative sum, slices and concatenations: ops that work along a dim that no axis splits."""
    h = jnp.sort(jnp.tanh(x @ p["square"]), axis=1)
    h = jax.lax.cumsum(h + p["bias"], axis=2, reverse=True)
    h = jnp.concatenate([h[:, 1:3], jnp.exp(-h[:, :3] * h[:, 1:])], axis=1)
    return jnp.sum(jnp.tanh(h @ p["up"]))


def fused(p, x):
    """A fused attention, which is one op of the graph."""
    q, k, v = (jnp.einsum("bsd,dhk->bshk", jnp.tanh(x) * n, p["heads"]) for n in (1.0, 0.5, 2.0))
    made = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    return jnp.sum(jnp.tanh(made.reshape(x.shape) @ p["up"]) ** 2)


SHAPES = {
    fused: {"heads": (16, 4, 4), "up": (16, 32)},
    imaging: {"bias": (4,), "first": (3, 2, 4, 8), "next": (3, 3, 8, 8)},
    looking: {"square": (16, 16), "up": (16, 32)},
    looping: {"layers": (3, 16, 16), "scales": (3, 16), "up": (16, 32)},
    reaching_beyond: {"first": (3, 3, 16, 8)},
    reversing: {"layers": (3, 16, 16), "scales": (3, 16), "up": (16, 32)},
}


@functools.cache
def case(fn):
    """(case, values by tensor, loss and gradients as JAX computes them)."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        shapes = SHAPES.get(fn, {"square": (16, 16), "up": (16, 32), "bias": (16,)})
        params = {k: jnp.asarray(rng.normal(size=s) / 4) for k, s in shapes.items()}
        x = jnp.asarray(rng.integers(0, 16, (8, 4)) if fn is looking else rng.normal(size=(8, 4, 16)))
        made = case_of(fn, params, x)
        plain = patch.object(jax.nn, "dot_product_attention", lambda q, k, v, **_: plain_attention(q, k, v))
        with plain:  # cuDNN's kernel needs a GPU and does not support float64
            loss, grads = jax.value_and_grad(fn)(params, x)
    paths = {**params, "params": x}
    values = {t.name: np.asarray(paths[t.path]) for t in made.problem.graph.parameters}
    values |= {t.name: np.asarray(x) for t in made.problem.graph.inputs}
    return made, values, float(loss), {k: np.asarray(g) for k, g in grads.items()}


def ran(fn, mesh, seed):
    made, values, *_ = case(fn)
    graph, rng = made.problem.graph, np.random.default_rng(seed)
    rows = {n.name: configs(n, mesh) for n in graph.nodes}
    program = local_program(graph, mesh, {n: r[rng.integers(len(r))] for n, r in rows.items()})
    verify_program(program)
    rules = rules_of(made.traced.jaxpr.jaxpr)
    return loss_and_gradients(program, graph, values, graph.outputs[0], rules)


PROGRAMS = [
    *(attending, normed, branching, imaging, looking, looping),
    *(choosing, ordering, fused, reaching_beyond, reversing),
]


@settings(max_examples=10)
@given(
    st.sampled_from(PROGRAMS),
    st.sampled_from(["1", "4x2", "2x4", "2x2x2"]),
    st.integers(0, 2000),
)
def test_any_program_under_any_strategy_is_the_whole_one(fn, shape, seed):
    made, _, loss, grads = case(fn)
    try:
        value, found = ran(fn, mesh_from(shape, 1 if shape == "1" else 8), seed)
    except PaseError as e:
        assert "sends data while it computes" in e.what  # a ring
        return
    assert value == pytest.approx(loss, rel=1e-12)
    paths = {t.name: t.path for t in made.problem.graph.parameters}
    assert {paths[t] for t in found} == {k for k, g in grads.items() if np.any(g)}
    for t, g in found.items():
        np.testing.assert_allclose(g, grads[paths[t]], rtol=0, atol=1e-12 * max(1, np.abs(g).max()))


@pytest.mark.parametrize(
    ("fn", "k"),
    [
        (attending, 1),
        (looping, 1),
        (reversing, 1),
        (reaching_beyond, 1),
        (choosing, 1),
        (ordering, 1),
        (branching, 2),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_jax_by_hand_and_numpy_agree(fn, k):
    """JAX and numpy run the same local program in float64: loss and gradients agree, also in micro-batches."""
    with jax.enable_x64(True):
        made = case(fn)[0]
        problem = made.problem.varied(made.traced, Variant(accumulate=k))
        expensive = replace(problem, model=ExpensiveCompute(problem.model))
        mesh = mesh_from("2x4", 8)
        found = search_meshes(expensive, [mesh])
        plan = Plan.of(plan_of(problem, found.configs, mesh, fn.__name__, made.traced))
        rng = np.random.default_rng(1)
        paths, *inputs = jax.tree.unflatten(made.traced.in_tree, made.traced.jaxpr.in_avals)
        params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 4), paths)
        x = jnp.asarray(rng.normal(size=(8, *inputs[0].shape[1:])))
        loss, grads = plan.jax.value_and_grad(lowering="manual")(params, x)
    graph, program = problem.graph, plan.jax.program
    verify_program(program)
    weights = {t.name: np.asarray(params[t.path]) for t in graph.parameters}
    each = [{**weights, **{t.name: np.asarray(x[i::k]) for t in graph.inputs}} for i in range(k)]
    jaxpr = plan.jax.traced.jaxpr.jaxpr
    parts = [loss_and_gradients(program, graph, one, graph.outputs[0], rules_of(jaxpr)) for one in each]
    value = np.mean([loss for loss, _ in parts])
    pulled = {t: sum(g[t] for _, g in parts if t in g) / k for t in {t for _, g in parts for t in g}}
    assert float(value) == pytest.approx(float(loss), rel=1e-12)
    names = {t.path: t.name for t in graph.parameters}
    assert sum(m.nbytes for t in program.transfers for m in t.forward) > 0
    for path, g in grads.items():
        there = pulled.get(names[path], np.zeros(g.shape))
        np.testing.assert_allclose(there, np.asarray(g), rtol=0, atol=1e-12 * max(1, np.abs(g).max()))


@pytest.mark.parametrize("how", [None, joined, cut], ids=["ours", "joined", "cut"])
@pytest.mark.parametrize("fn", [attending, branching, looping, reversing], ids=lambda fn: fn.__name__)
def test_messages_change_no_number(fn, how):
    """Those of a bucket plan, and those that join what is alike, as a whole or in two parts."""
    made, values, *_ = case(fn)
    plan, graph = made.plan("fsdp"), made.problem.graph
    program = plan.scheduled("ours").jax.program
    if how is not None:
        messages = [m for way in ("there", "back") for m in how(program, way, chunks_of(program, way))]
        program = replace(program, messages=tuple(messages))
    verify_program(program)
    assert {m.way for m in program.messages} == {"there", "back"}
    rules = rules_of(made.traced.jaxpr.jaxpr)
    value, grads = loss_and_gradients(program, graph, values, graph.outputs[0], rules)
    want, wanted = loss_and_gradients(replace(program, messages=()), graph, values, graph.outputs[0], rules)
    assert value == want and grads.keys() == wanted.keys()
    for t, g in grads.items():
        np.testing.assert_array_equal(g, wanted[t])


def test_gradients_that_wait_for_later_steps_are_refused():
    made, values, *_ = case(attending)
    plan = made.plan("fsdp")
    late = replace(program_of(made.problem.graph, plan.mesh, plan.strategy), period=2)
    with pytest.raises(PaseError, match="in a later one"):
        loss_and_gradients(late, made.problem.graph, values, made.problem.graph.outputs[0])
