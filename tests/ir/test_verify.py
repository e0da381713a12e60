"""A graph with a fault is refused with the node and the fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pase.errors import PaseError
from pase.ir import Access, AccessMap, Dim, Graph, IterationSpace, Node, Op, verify
from pase.ops import GraphBuilder, nests


def product() -> Graph:
    """Nodes: the parameter w, the input x, and their product."""
    b = GraphBuilder("g")
    w, x = b.parameter("w", (8, 4), "float32"), b.input("x", (6, 8), "float32")
    return b.finish([nests.contract(b, x, w, ([1], [0]))])


GOOD = product()
DOT = GOOD.nodes[-1]


def with_dot(node: Node) -> Graph:
    return replace(GOOD, nodes=(*GOOD.nodes[:-1], node))


def with_op(change: Callable[[Op], Op]) -> Graph:
    return with_dot(replace(DOT, ops=tuple(map(change, DOT.ops))))


def with_read(change: Callable[[Access], Access]) -> Graph:
    return with_op(lambda op: replace(op, reads=(change(op.reads[0]), *op.reads[1:])))


def with_map(text: str) -> Graph:
    return with_read(lambda a: replace(a, map=AccessMap.parse(text)))


def with_size(name: str, size: int) -> Graph:
    dims = (replace(d, size=size) if d.name == name else d for d in DOT.space)
    return with_dot(replace(DOT, space=IterationSpace(tuple(dims))))


FAULTS = {
    "an earlier node has the same name": replace(GOOD, nodes=(*GOOD.nodes, DOT)),
    "two dims have the same name": with_dot(
        replace(DOT, space=IterationSpace((*DOT.space.dims, Dim(name="m0", size=6))))
    ),
    "it has no ops": with_dot(replace(DOT, ops=())),
    "works on dim 'z', which the node lacks": with_op(lambda op: replace(op, over=("z",))),
    "is written twice": replace(GOOD, nodes=(*GOOD.nodes, replace(DOT, name="again"))),
    "is read but nothing writes it": replace(GOOD, nodes=GOOD.nodes[1:]),
    "output none is not a tensor": replace(GOOD, outputs=("none",)),
    "uses tensor none, which does not exist": with_read(lambda a: replace(a, tensor="none")),
    "map 'm0' has 1 walks": with_map("m0"),
    "map 'k0 k0' walks a dim twice": with_map("k0 k0"),
    "walks 'z', which the node lacks": with_map("m0 z"),
    "walks 7 elements of a dim of 6": with_size("m0", 7),
    "its blocks do not align": with_map("m0@3/2 k0"),
    "no other read, hands a gradient back": with_read(lambda a: replace(a, gradient=True)),
}


def test_a_valid_graph_is_returned() -> None:
    assert verify(GOOD) is GOOD


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named(what: str) -> None:
    with pytest.raises(PaseError) as e:
        verify(FAULTS[what])
    assert what in e.value.what
    assert e.value.where.startswith("graph 'g'" if "output" in what else "node '")
