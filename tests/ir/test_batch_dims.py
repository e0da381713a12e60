"""The batch is found in every node, alone or merged with other dims."""

from __future__ import annotations

from pase.ir import Node, Tensor, functions
from pase.ir.batch_dims import BatchDims, batch_dims
from pase.ops import GraphBuilder, nests

B, S, D = 6, 4, 8


def start() -> tuple[GraphBuilder, Tensor]:
    """A graph with one input, a batch of sequences."""
    b = GraphBuilder("g")
    return b, b.input("x", (B, S, D), "float32")


def found(b: GraphBuilder) -> tuple[BatchDims, Node]:
    """The batch in the graph, and the last node."""
    graph = b.finish()
    return batch_dims(graph, ["x"]), graph.nodes[-1]


def test_a_product_on_rows_has_the_batch_in_its_rows() -> None:
    """Rows that walk the batch and the positions contain the batch, but not it alone."""
    b, x = start()
    w = b.parameter("w", (D, D), "float32")
    nests.contract(b, nests.reshape(b, x, (B * S, D)), w, ([1], [0]))
    dims, dot = found(b)
    assert dims.of(dot, dot.main) == {"m0"}
    assert dims.held[dot.name, "m0"] == dims.digits and len(dims.digits) == 1
    assert not dims.pairs(dot, dot.main) and not dims.apart(dot, dot.main)


def test_all_pairs_of_rows_walk_the_batch_twice() -> None:
    b, x = start()
    z = nests.reshape(b, x, (B, S * D))
    nests.contract(b, z, z, ([1], [1]))
    dims, dot = found(b)
    assert dims.pairs(dot, dot.main) and dims.apart(dot, dot.main)


def test_rows_that_are_cut_elsewhere_hold_the_batch_apart() -> None:
    """24 rows of 6 examples, as 3 parts of 8 rows: a part holds two examples."""
    b, x = start()
    rows = nests.reshape(b, x, (B * S, D))
    (y,) = nests.elementwise(b, functions.EXP, [rows], ["float32"])
    nests.reshape(b, y, (3, 8, D))
    dims, cut = found(b)
    assert dims.apart(cut, cut.main)


def test_only_inputs_that_are_cut_have_the_batch() -> None:
    b, _ = start()
    b.input("table", (B, D), "float32")
    dims, table = found(b)
    assert not dims.of(table, table.main) and dims.held
