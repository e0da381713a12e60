"""Calls with a custom rule: their forward and backward in the graph are those of the rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, Op, verify

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return x @ w


def _forward(x: Any, w: Any) -> Any:
    return x @ w, (x, jnp.sin(w))


def _backward(kept: Any, g: Any) -> Any:
    x, w = kept
    return g @ w.T, jnp.tanh(x.T @ g)


product.defvjp(_forward, _backward)


def loss(p: Any, x: Any) -> Any:
    return jnp.sum(product(jnp.exp(x * p["a"]), p["w"]))


def graph_of(fn: Any, mode: Any = "train") -> Graph:
    return verify(trace(fn, {"w": W, "a": X}, X, mode=mode).graph)


def ops(graph: Graph, *, backward: bool) -> list[Op]:
    return [op for n in graph.nodes for op in n.ops if op.backward == backward]


def test_the_ops_of_backward_are_those_of_the_rule() -> None:
    """Its own two products and the tanh; the forward's product and sine have no gradient of their own."""
    graph = graph_of(loss)
    assert sorted(op.name for op in ops(graph, backward=True) if op.kind not in ("view", "gradient")) == [
        "dot_general",
        "dot_general",
        "tanh",
    ]
    forward = {op.name: op for op in ops(graph, backward=False)}
    assert not forward["dot_general"].differentiable and not forward["sin"].differentiable
    assert forward["exp"].differentiable


def test_each_operand_with_a_gradient_gets_the_rules() -> None:
    graph = graph_of(loss)
    handed = [op for op in ops(graph, backward=True) if op.kind == "gradient"]
    assert len(handed) == 2 and all(graph.tensors[op.reads[1].tensor].needs_grad for op in handed)
    assert {graph.tensors[op.reads[1].tensor].shape for op in handed} == {(4, 8), (8, 8)}


def test_ops_of_a_rule_stand_at_the_place_of_the_call() -> None:
    """A backend keeps the call whole."""
    graph = graph_of(loss)
    inside = [op for op in ops(graph, backward=True)]
    (seam,) = (op for op in ops(graph, backward=False) if op.kind == "cotangent")
    assert {str(op.eqn).split(".")[0] for op in inside} == {str(seam.eqn).split(".")[0]}


def test_without_a_gradient_a_rule_has_no_backward() -> None:
    assert not ops(graph_of(loss, "inference"), backward=True)
    stopped = graph_of(lambda p, x: jnp.sum(p["a"]) + jnp.sum(product(x, jax.lax.stop_gradient(p["w"]))))
    assert not ops(stopped, backward=True)


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_a_rule_that_reads_a_value_of_the_function_around_it_is_refused(kind: str) -> None:
    """The rule runs after the trace that the value belongs to. An array that is there before is a constant."""

    def closed(p: Any, x: Any, scale: Any) -> Any:
        def scaled(h: Any) -> Any:
            return h * scale

        f = getattr(jax, kind)(scaled)
        if kind == "custom_vjp":
            f.defvjp(lambda h: (h * scale, None), lambda _, g: (g * scale,))
        else:
            f.defjvp(lambda at, along: (f(*at), along[0] * scale))
        return jnp.sum(f(x @ p["w"]))

    with pytest.raises(PaseError, match=r"rule reads a value .* float32\[4, 8\]") as e:
        graph_of(lambda p, x: closed(p, x, x * 2))
    assert "test_derivatives.py" in e.value.where and "as an argument" in e.value.fix
    before = jnp.arange(8.0)
    assert graph_of(lambda p, x: closed(p, x, before))
