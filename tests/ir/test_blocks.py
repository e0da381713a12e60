"""Blocks as rematerialised regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.frontends.from_jax import trace
from pase.ir.blocks import Block, rematerialised


def test_parameters_named_by_numbers_are_no_equations() -> None:
    """In a list, the parameter '4' is not equation 4, and no region runs it again."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    graph = trace(loss, [f32(8, 8)] * 12, f32(4, 8)).graph
    again = rematerialised(graph, [Block(prefix="", start=4, stop=8)])
    found = {(op.kind, str(op.eqn)) for n in again.nodes for op in n.ops if op.remat}
    assert found == {("matmul", "4"), ("elementwise", "5"), ("matmul", "6"), ("elementwise", "7")}
