"""Activations of all frameworks are the functions into which ``jax.nn`` expands them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.frontends.jax.frontend import trace
from pase.ir import Graph
from pase.ops import GraphBuilder
from pase.ops.activations import ACTIVATIONS

SHAPE = (4, 8)
IN_JAX: dict[str, Callable[..., Any]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "mish": jax.nn.mish,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_silu": jax.nn.hard_silu,
}


def work(graph: Graph) -> Counter[tuple[str, float]]:
    """The functions that are not free, with their FLOPs per point. Comparisons count as one function."""
    ops = (op for n in graph.nodes for op in n.ops if op.kind == "elementwise" and op.flops_per_point)
    return Counter(("compare" if op.function.boolean else op.function.name, op.flops_per_point) for op in ops)


def test_every_activation_is_compared() -> None:
    assert set(IN_JAX) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", IN_JAX)
def test_work_is_that_of_jax(name: str) -> None:
    b = GraphBuilder("g")
    out = ACTIVATIONS[name](b, b.input("x", SHAPE, "float32"))
    theirs = trace(lambda x: IN_JAX[name](x), jax.ShapeDtypeStruct(SHAPE, jnp.float32), mode="inference")
    assert out.shape == SHAPE and work(b.finish([out])) == work(theirs.graph)
