"""Local programs of devices that have only some rows of stacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.local.lower import program_of
from pase.local.rows import with_rows
from pase.local.verify import verify_program
from pase.machine import Mesh

L, D = 4, 8


def scaled(stack, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack * 0.5)[0] ** 2)


def test_a_stack_has_its_rows_and_no_axis_splits_them():
    """Its storage is split by rows, which is undone: a stage with one row has nothing to split."""
    shapes = jax.ShapeDtypeStruct((L, D, D), "float32"), jax.ShapeDtypeStruct((16, D), "float32")
    graph = named(simplify(trace(scaled, *shapes).graph))
    (stack,) = (n for n in graph.nodes if n.kind == "parameter")
    rows = next(d.name for d in stack.space if d.size == L)
    strategy = {n.name: {rows: ("a",)} if n is stack else {} for n in graph.nodes}
    whole = program_of(graph, Mesh(names=("a",), sizes=(2,)), strategy)
    name, half = (op.writes[0].tensor for op in stack.ops)
    (k,) = (k for k, t in enumerate(whole.transfers) if t.tensor == half)
    assert whole.result(half).layout == ((0, 2),) and whole.transfers[k].forward
    cut = with_rows(whole, {name: 1, half: 1})
    verify_program(cut)
    for t in (name, half):
        assert cut.result(t).shape == (1, D, D) and cut.result(t).layout == (None,)
    assert not cut.transfers[k].forward and not cut.transfers[k].backward
    assert all(a == b for i, (a, b) in enumerate(zip(whole.transfers, cut.transfers, strict=True)) if i != k)
    assert with_rows(whole, {}) is whole
