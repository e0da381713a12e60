"""The passes of whole train steps: which result is the loss, what is forward, backward and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, simplify
from pase.ir.whole_step import handed_on, sums_gradient, whole_step
from pase.machine import Mesh
from pase.pytree import Tree
from pase.tables.overlap import BACKWARD_COLLECTIVES, WAITED, StepTables
from pase.tables.work import node_work
from tests.tables.graphs import MODEL

LAYERS, WIDTH = 3, 48
PARAMS = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for i in range(LAYERS)
    for name, shape in ((f"w{i}", (WIDTH, WIDTH)), (f"b{i}", (WIDTH,)))
}
X = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)


def loss(p: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    h = x
    for i in range(LAYERS):
        h = jnp.tanh(h @ p[f"w{i}"] + p[f"b{i}"])
    return jnp.mean((h - x) ** 2)


def step_of(tx: optax.GradientTransformation, told: Callable[..., Tree]) -> tuple[Callable[..., Tree], Tree]:
    """(step, the state of its optimizer). told: (loss, gradients) -> what the step returns besides its state."""

    def step(p: Any, s: Any, x: jax.Array) -> Tree:
        value, gradients = jax.value_and_grad(loss)(p, x)
        updates, s = tx.update(gradients, s, p)
        return optax.apply_updates(p, updates), s, told(value, gradients)

    return step, jax.eval_shape(tx.init, PARAMS)


def graph_of(
    tx: optax.GradientTransformation,
    told: Callable[..., Tree] = lambda value, _: value,
    x: jax.ShapeDtypeStruct = X,
) -> Graph:
    step, state = step_of(tx, told)
    return simplify(trace(step, PARAMS, state, x, mode="step").graph)


@pytest.mark.parametrize("examples", [64, WIDTH])
@pytest.mark.parametrize(
    "tx",
    [optax.sgd(0.1), optax.adamw(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))],
    ids=["sgd", "adamw", "clipped"],
)
def test_each_gradient_of_a_weight_goes_from_backward_to_the_update(
    tx: optax.GradientTransformation, examples: int
) -> None:
    """Also if the activations have as many elements as a weight."""
    graph = graph_of(tx, x=jax.ShapeDtypeStruct((examples, WIDTH), jnp.float32))
    passes = whole_step(graph)
    assert set(passes) == {n.name for n in graph.nodes}
    products = [passes[n.name] for n in graph.nodes if n.kind == "matmul"]
    assert products == ["forward"] * LAYERS + ["backward"] * (2 * LAYERS - 1)
    handed = [graph.tensors[e.tensor].shape for e in graph.edges if sums_gradient(graph, e)]
    assert handed == [(WIDTH, WIDTH)] * LAYERS
    # No pass reads what a later one makes.
    order = ["forward", "backward", "update"]
    for e in graph.edges:
        if not handed_on(graph, graph.node[e.dst], e.op):
            assert order.index(passes[e.src]) <= order.index(passes[e.dst]), e


def test_the_loss_is_told_from_other_numbers() -> None:
    """The norm of the gradients is made after the loss, a part of it has fewer products, a rate has none."""
    tx = optax.adam(1e-3)

    def step(p: Any, s: Any, x: jax.Array) -> Tree:
        def parts(p: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            first = jnp.tanh(x @ p["w0"])
            exact = jnp.mean(jnp.round(first) == 0, dtype=jnp.float32)
            return loss(p, x) + jnp.mean(first), (exact, jnp.mean(first))

        (value, of_first), gradients = jax.value_and_grad(parts, has_aux=True)(p, x)
        updates, s = tx.update(gradients, s, p)
        told = {
            "a norm": optax.tree.norm(gradients),
            "loss": value,
            "parts": of_first,
            "rate": value * 0 + 0.1,
        }
        return optax.apply_updates(p, updates), s, told

    graph = simplify(trace(step, PARAMS, jax.eval_shape(tx.init, PARAMS), X, mode="step").graph)
    passes = whole_step(graph)
    products = [passes[n.name] for n in graph.nodes if n.kind == "matmul"]
    assert products.count("forward") == LAYERS + 1
    assert {passes[n.name] for n in graph.nodes} == {"forward", "backward", "update"}


def test_a_step_whose_attention_is_written_out_says_so() -> None:
    kernel = partial(jax.nn.dot_product_attention, implementation="cudnn")

    def attended(w: jax.Array, x: jax.Array) -> jax.Array:
        q = (x @ w).reshape(2, 8, 4, 12)
        return jnp.mean(jax.checkpoint(lambda q: kernel(q, q, q))(q) ** 2)

    def step(w: jax.Array, turn: jax.Array, x: jax.Array) -> Tree:
        value, gradient = jax.value_and_grad(attended)(w, x)
        return w - gradient, turn + 1, value

    def evaluated(w: jax.Array, turn: jax.Array, x: jax.Array) -> Tree:
        return w * 0.5, turn + 1, attended(w, x)

    given = (
        PARAMS["w0"],
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32),
    )
    remarks = [trace(fn, *given, mode="step").graph.remarks for fn in (step, evaluated)]
    assert [any("writes it out" in str(r) for r in found) for found in remarks] == [True, False]


def test_a_step_without_a_loss_hides_nothing_and_says_so() -> None:
    step, state = step_of(optax.sgd(0.1), lambda value, gradients: ())
    plan = pase.compile(
        step, PARAMS, state, X, devices=4, mode="step", machine="h100x8", mesh="4", baselines=False
    )
    assert plan.hidden == 0 and any("returns no loss" in str(r) for r in plan.noted)


def test_only_the_last_gradients_sum_is_waited_for() -> None:
    """Under data parallelism, each weight's gradient is summed beside the backward that is left, but the last."""
    graph, mesh = graph_of(optax.sgd(0.1)), Mesh(names=("data",), sizes=(4,))
    tables = StepTables.of(graph, mesh, MODEL, "adam")
    ends = {(e.src, e.dst) for e in graph.edges if sums_gradient(graph, e)}
    weights = [
        (e, t)
        for e, t in zip(tables.edges, tables.parts, strict=True)
        if t is not None and (graph.nodes[e.src].name, graph.nodes[e.dst].name) in ends
    ]
    made = sorted(e.src for e, _ in weights)
    assert len(set(made)) == LAYERS
    for e, parts in weights:
        waits, hides = parts[WAITED].max(), parts[BACKWARD_COLLECTIVES].max()
        assert (waits > 0, hides > 0) == ((True, False) if e.src == made[-1] else (False, True))


def test_work_is_that_of_the_pass() -> None:
    graph, mesh = graph_of(optax.adam(1e-3)), Mesh(names=("data",), sizes=(4,))
    for n in graph.nodes:
        config = np.full((1, 1), -1, np.int8)
        assert {w.phase for w in node_work(graph, n, config, mesh)} <= {whole_step(graph)[n.name]}
