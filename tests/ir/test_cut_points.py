"""A model as a chain of units: where it is cut, and what crosses the cuts."""

from __future__ import annotations

from pase.ir import Graph, Place, functions
from pase.ir.blocks import Block
from pase.ir.cut_points import chain_of, loops_over_layers, op_work
from pase.ops import GraphBuilder, nests
from pase.ops.loops import unstack

B, D = 4, 8


def layers(count: int, *, skip: bool = False) -> Graph:
    """tanh(x w) for each of several layers. skip: the first layer's result is also added to the last's."""
    b = GraphBuilder("g")
    weights = [b.parameter(f"w{i}", (D, D), "float32") for i in range(count)]
    x = b.input("x", (B, D), "float32")
    first = None
    for i, w in enumerate(weights):
        b.eqn = Place(str(2 * i))
        x = nests.contract(b, x, w, ([1], [0]))
        b.eqn = Place(str(2 * i + 1))
        (x,) = nests.elementwise(b, functions.TANH, [x], ["float32"])
        first = first or x
    if skip and first is not None:
        b.eqn = Place(str(2 * count))
        (x,) = nests.elementwise(b, functions.ADD, [x, first], ["float32"])
    return b.finish([x])


def test_a_chain_is_cut_where_one_activation_crosses() -> None:
    """Every cut has one activation, and units follow the program's order."""
    graph = layers(6)
    chain = chain_of(graph)
    assert chain.units > 6 and len(chain.crossing) == chain.units - 1
    assert all(len(crossing) == 1 for crossing in chain.crossing)
    units = [chain.at[str(i)] for i in range(12)]
    assert units == sorted(units) and units[-1] == chain.units - 1
    assert set(chain.of) == {n.name for n in graph.nodes if n.kind not in ("parameter", "input")}


def test_a_skip_crosses_every_cut_that_it_spans() -> None:
    graph = layers(6, skip=True)
    chain = chain_of(graph)
    (skipped,) = (op.writes[0].tensor for n in graph.nodes for op in n.ops if op.eqn.path == "1")
    spanned = range(chain.at["1"], chain.at["12"])
    assert [k for k, c in enumerate(chain.crossing) if skipped in {t for _, t in c}] == list(spanned)


def test_blocks_are_not_cut() -> None:
    """Three layers of two equations each: with blocks, the only cuts are between them."""
    blocks = [Block(prefix="", start=2 * i, stop=2 * i + 2) for i in range(3)]
    chain = chain_of(layers(3), blocks)
    assert chain.units == 3 and [chain.at[str(i)] for i in range(6)] == [0, 0, 1, 1, 2, 2]


def looped(trip_count: int) -> Graph:
    """h = h w[i] in a loop over a stack of layers, with the loop at equation 3."""
    b = GraphBuilder("g")
    stack = b.parameter("stack", (trip_count, D, D), "float32")
    x, p = b.input("x", (B, D), "float32"), b.parameter("p", (D,), "float32")
    (start,) = nests.elementwise(b, functions.ADD, [x, p], ["float32"])
    h = b.carry(start, Place("3").its("carry", 0))
    with b.region("loop", "3.", times=trip_count):
        b.eqn = Place("3").its("x", 0)
        w = unstack(b, stack)
        b.eqn = Place("3.0")
        made = nests.contract(b, h, w, ([1], [0]))
        b.close_carry(h, made)
    return b.finish([h])


def test_each_iteration_of_a_loop_over_layers_is_a_unit() -> None:
    graph = looped(5)
    assert loops_over_layers(graph) == {"3.": ("3", 5)}
    chain = chain_of(graph)
    first, end = chain.loops["3"]
    assert end - first == 5
    inner = chain.crossing[first : end - 1]
    assert len(set(inner)) == 1 and all(len(c) == 1 for c in inner)  # the carry


def test_work_is_flops_times_points() -> None:
    graph = layers(1)
    assert op_work(graph.nodes[-2]) == 2 * B * D * D and op_work(graph.nodes[-1]) == 10 * B * D
