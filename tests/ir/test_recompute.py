"""Backward runs again only what derivatives in a rematerialised region need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.ir import Graph, Op, Tensor, functions
from pase.ir.functions import FUNCTIONS
from pase.ir.recompute import linear, mark_recomputed, needs
from pase.ops import GraphBuilder, nests


def op_of(function: str, *, trained: int = 2, kind: str = "elementwise") -> tuple[Op, dict[str, Tensor]]:
    """An op on two inputs, of which the first ``trained`` have a gradient."""
    b = GraphBuilder("g")
    x = b.input("x", (4,), "float32")
    y = b.input("y", (4,), "float32")
    for t in (x, y)[:trained]:
        b.tensors[t.name] = replace(t, needs_grad=True)
    operands = [b.tensors[t.name] for t in (x, y)]
    most = (FUNCTIONS[function].operands or (2, None))[1]
    nests.elementwise(b, FUNCTIONS[function], operands[:most], ["float32"])
    return b.nodes[-1].ops[0], b.tensors


@pytest.mark.parametrize(
    ("function", "trained", "needed"),
    [
        ("add", 2, ()),
        ("mul", 2, ("t1", "t2")),
        ("mul", 1, ("t2",)),  # x's gradient is the result's times y; y has none
        ("div", 2, ("t1", "t2")),
        ("max", 2, ("t1", "t2")),
        ("exp", 1, ("t3",)),
        ("gt", 2, ()),
    ],
)
def test_what_a_derivative_needs(function: str, trained: int, needed: tuple[str, ...]) -> None:
    op, tensors = op_of(function, trained=trained)
    assert needs(op, tensors) == needed


def test_a_product_with_a_constant_is_linear() -> None:
    op, _ = op_of("mul")
    assert not linear(op) and linear(op, {"t2"})
    assert linear(op_of("add")[0]) and not linear(op_of("max")[0]) and linear(op_of("gt")[0])


def residual(*, save_first: bool = False) -> Graph:
    """x + tanh(x w) v, rematerialised."""
    b = GraphBuilder("g")
    w, v = (b.parameter(n, (8, 8), "float32") for n in "wv")
    read, shift = b.input("x", (4, 8), "float32"), b.parameter("p", (8,), "float32")
    (x,) = nests.elementwise(b, functions.ADD, [read, shift], ["float32"])
    with b.region("remat", "0.", remat=True):
        b.saved = save_first
        hidden = nests.contract(b, x, w, ([1], [0]), name="first")
        b.saved = False
        (h,) = nests.elementwise(b, functions.TANH, [hidden], ["float32"])
        out = nests.contract(b, h, v, ([1], [0]), name="last")
        (y,) = nests.elementwise(b, functions.ADD, [x, out], ["float32"], name="sum")
    return b.finish([y])


def again(graph: Graph) -> set[str]:
    return {op.name for n in mark_recomputed(graph).nodes for op in n.ops if op.remat}


def test_the_last_product_of_a_region_runs_once() -> None:
    """Its result is only added to the residual stream."""
    assert again(residual()) == {"first", "tanh"}


def test_what_is_saved_runs_once() -> None:
    assert again(residual(save_first=True)) == {"tanh"}


def test_reads_of_what_runs_again_are_marked() -> None:
    """So are those of the products, whose gradients read the operands."""
    reads = {
        op.name: {a.recompute for a in op.reads}
        for n in mark_recomputed(residual()).nodes
        for op in n.ops
        if op.region is not None
    }
    assert reads == {"first": {True}, "tanh": {True}, "last": {True}, "sum": {False}}
