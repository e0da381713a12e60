"""Lookups, scattered updates, sparse products and bodies for one device: which of their dims may be split."""

from __future__ import annotations

import pytest

from pase.errors import PaseError
from pase.ir import Node, verify
from pase.ops import GraphBuilder
from pase.ops.indexed import IndexedDims, columns, gather, manual, scatter
from tests.ops.evaluated import kinds


def looked_up(*, width: int = 8) -> Node:
    """Rows of a table [16, 8] by ids [4, 5]; of each row the first ``width`` elements."""
    b = GraphBuilder("g")
    table, ids = b.parameter("table", (16, 8), "float32"), b.input("ids", (4, 5, 1), "int32")
    gather(
        b,
        "gather",
        table,
        ids,
        (4, 5, width),
        IndexedDims(window=[2], dropped=[0], indexed=[0]),
    )
    return verify(b.finish()).nodes[-1]


def test_rows_of_a_table_may_be_split() -> None:
    """Each shard looks up its own rows, and the results are summed. The FLOPs are one per element of the result."""
    node = looked_up()
    assert node.main.einsum == "x0 x1, i0 i1 1 -> i0 i1 x1"
    assert kinds(node, "reduction") == ["x0"] and set(kinds(node, "parallel")) == {"i0", "i1", "x1"}
    assert node.main.worked == ("i0", "i1", "x1") and node.main.reads[0].sparse


def test_a_dim_that_is_cut_may_not_be_split() -> None:
    assert set(kinds(looked_up(width=4), "replicated")) == {"x1", "o2"}


@pytest.mark.parametrize("combines", [True, False])
def test_updates_may_be_split_if_they_combine(combines: bool) -> None:
    b = GraphBuilder("g")
    x, ids, new = (
        b.input("x", (16, 8), "float32"),
        b.input("i", (5, 1), "int32"),
        b.input("u", (5, 8), "float32"),
    )
    scatter(b, "scatter", x, ids, new, IndexedDims(window=[1], dropped=[0], indexed=[0]), combines=combines)
    node = verify(b.finish()).nodes[-1]
    assert node.main.einsum == "x0 x1, i0 1, i0 x1 -> x0 x1" and node.main.worked == ("i0", "x1")
    assert node.space["i0"].kind == ("reduction" if combines else "replicated")


def test_columns_of_a_sparse_product_may_be_split() -> None:
    """Two FLOPs per element and column."""
    b = GraphBuilder("g")
    values, places = b.input("v", (30,), "float32"), b.input("p", (30, 2), "int32")
    dense = b.parameter("d", (16, 8), "float32")
    columns(b, "spmm", [values, places], dense, [1], (12, 8), "float32", 1)
    node = verify(b.finish()).nodes[-1]
    assert kinds(node, "parallel") == ["n0"] and set(node.main.worked) == {"e", "n0"}
    assert node.main.flops_per_point == 2.0


def test_a_body_for_one_device_may_be_split_along_its_mesh() -> None:
    b = GraphBuilder("g")
    x = b.input("x", (12, 8), "float32")
    manual(b, "shard_map", [(x, [["a"], []])], [((12, 8), "float32", [["a"]])], {"a": 3, "b": 2}, flops=7.0)
    node = verify(b.finish()).nodes[-1]
    assert {d.name: d.size for d in node.space if d.kind == "parallel"} == {"x0": 3, "x1": 2}
    assert node.main.einsum == "(x0 r0_0) r0_1 -> (x0 w0_0) w0_1"
    with pytest.raises(PaseError, match="size 8 cannot be split evenly over a") as e:
        manual(b, "shard_map", [(x, [[], ["a"]])], [], {"a": 3}, flops=7.0)
    assert "pad the dim" in e.value.fix
