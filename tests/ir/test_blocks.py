"""Blocks as rematerialised regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase import zoo
from pase.compiler.problem.variants import recomputed
from pase.frontends.jax.frontend import trace
from pase.ir import simplify
from pase.ir.blocks import Block, rematerialised
from pase.ir.text import to_text


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


def test_regions_change_nothing_about_what_joins() -> None:
    """The groups are therefore computed once for all ways to recompute blocks."""
    m = zoo.get("llama3_8b?scan=0&layers=4&remat=0")
    traced = trace(m.loss_fn, m.params, m.batch)
    for what in ("attention", "light", "all"):
        graph = rematerialised(traced.graph, recomputed(traced, what))
        assert graph != traced.graph
        assert to_text(simplify(graph, traced.graph)) == to_text(simplify(graph))
