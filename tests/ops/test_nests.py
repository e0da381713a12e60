"""Nests compute what they are named after: their access maps, run as einsums, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import PaseError
from pase.ir import Tensor, functions
from pase.ops import GraphBuilder, nests
from tests.ops.evaluated import evaluated, kinds, numbers


def start(*shapes: tuple[int, ...]) -> tuple[GraphBuilder, list[Tensor]]:
    b = GraphBuilder("g")
    return b, [b.input(f"x{i}", s, "float32") for i, s in enumerate(shapes)]


@pytest.mark.parametrize(
    ("x", "y", "contracting", "batch", "einsum"),
    [
        ((5, 3), (3, 4), ([1], [0]), ([], []), "mk,kn->mn"),
        ((2, 5, 3), (2, 4, 3), ([2], [2]), ([0], [0]), "bmk,bnk->bmn"),
        ((5, 2, 3), (3, 2, 4, 6), ([1, 2], [1, 0]), ([], []), "mij,jipq->mpq"),
        ((2, 1, 3), (3, 1), ([2], [0]), ([], []), "abk,kn->abn"),
    ],
)
def test_products(
    x: tuple[int, ...],
    y: tuple[int, ...],
    contracting: tuple[list[int], list[int]],
    batch: tuple[list[int], list[int]],
    einsum: str,
) -> None:
    b, ins = start(x, y)
    nests.contract(b, *ins, contracting, batch)
    a, c = numbers(*x), numbers(*y)
    np.testing.assert_allclose(evaluated(b.nodes[-1], a, c), np.einsum(einsum, a, c), rtol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_transposes(order: tuple[int, ...]) -> None:
    b, (x,) = start((2, 3, 4))
    nests.transpose(b, x, order)
    a = numbers(2, 3, 4)
    np.testing.assert_array_equal(evaluated(b.nodes[-1], a), a.transpose(order))


@pytest.mark.parametrize("shape", [(24,), (2, 12), (6, 4), (2, 3, 2, 2), (1, 24, 1)])
def test_reshapes_that_nest_may_be_split(shape: tuple[int, ...]) -> None:
    b, (x,) = start((2, 3, 4))
    nests.reshape(b, x, shape)
    a = numbers(2, 3, 4)
    np.testing.assert_array_equal(evaluated(b.nodes[-1], a), a.reshape(shape))
    assert not kinds(b.nodes[-1], "replicated")


def test_reshapes_that_do_not_nest_may_not() -> None:
    b, (x,) = start((3, 4))
    nests.reshape(b, x, (4, 3))
    assert len(kinds(b.nodes[-1], "replicated")) == 4


def test_broadcasts() -> None:
    b, (x,) = start((3, 1))
    nests.broadcast(b, x, (2, 3, 4), [1, 2])
    a = numbers(3, 1)
    np.testing.assert_array_equal(evaluated(b.nodes[-1], a), np.broadcast_to(a, (2, 3, 4)))


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 1, 2)])
def test_sums(axes: tuple[int, ...], keepdims: bool) -> None:
    b, (x,) = start((2, 3, 4))
    nests.reduce(b, functions.SUM, [x], axes, ["float32"], keepdims=keepdims)
    a = numbers(2, 3, 4)
    np.testing.assert_allclose(evaluated(b.nodes[-1], a), a.sum(axes, keepdims=keepdims), rtol=1e-12)
    assert kinds(b.nodes[-1], "reduction") == [f"d{i}" for i in axes]


def test_what_does_not_combine_may_not_be_split() -> None:
    b, (x,) = start((2, 3))
    nests.reduce(b, functions.FUNCTIONS["argmax"], [x], [1], ["int32"], combines=False)
    assert kinds(b.nodes[-1], "replicated") == ["d1"] and kinds(b.nodes[-1], "parallel") == ["d0"]


def test_elementwise_functions_broadcast_as_in_numpy() -> None:
    b, (x, y) = start((2, 1, 4), (3, 1))
    nests.elementwise(b, functions.MUL, [x, y], ["float32"])
    a, c = numbers(2, 1, 4), numbers(3, 1)
    np.testing.assert_allclose(evaluated(b.nodes[-1], a, c), a * c, rtol=1e-12)
    with pytest.raises(PaseError, match="do not broadcast"):
        nests.elementwise(b, functions.MUL, [x, b.input("z", (3,), "float32")], ["float32"])


def test_dims_that_a_slice_or_a_concatenation_changes_may_not_be_split() -> None:
    b, (x, y) = start((2, 3), (2, 5))
    joined = nests.concat(b, [x, y], 1)
    assert joined.shape == (2, 8)
    assert kinds(b.nodes[-1], "parallel") == ["d0"] and len(kinds(b.nodes[-1], "replicated")) == 3


def test_one_of_equal_parts_may_be_split_within_the_part() -> None:
    b, (x,) = start((2, 12))
    out = nests.part(b, "part", x, 1, 3, 0)
    node = b.nodes[-1]
    assert (
        out.shape == (2, 4) and kinds(node, "parallel") == ["d0", "d1"] and kinds(node, "replicated") == ["p"]
    )


def test_a_part_that_is_contiguous_is_read_in_place() -> None:
    """A row of a stack is; a column is copied."""
    b, (x,) = start((4, 8))
    row = nests.taken(b, "row", [x], (1, 8), [False, True])
    assert b.nodes[-1].ops[0].worked == () and row.name in b.lying
    assert nests.reshape(b, row, (8,)).name in b.lying
    column = nests.taken(b, "column", [x], (4, 1), [True, False])
    assert b.nodes[-1].ops[0].worked == ("d0",) and column.name not in b.lying


def test_a_sort_may_be_split_along_other_dims() -> None:
    b, (x,) = start((4, 8))
    values, places = nests.sequential(
        b, functions.TOP_K, [x], 1, [((4, 2), "float32"), ((4, 2), "int32")], name="top_k"
    )
    assert values.shape == places.shape == (4, 2)
    assert kinds(b.nodes[-1], "parallel") == ["d0"]


def test_a_batched_op_may_be_split_along_its_first_dims() -> None:
    b, (x,) = start((6, 5, 5))
    nests.batched(b, "cholesky", [x], [((6, 5, 5), "float32")], 1, flops=10.0)
    node = b.nodes[-1]
    assert kinds(node, "parallel") == ["d0"] and node.ops[0].worked == ("d0",)
    nests.opaque(b, "eig", [x], [((6, 5), "float32")], flops=7.0)
    assert not kinds(b.nodes[-1], "parallel") and b.nodes[-1].ops[0].worked == ()


def test_flops_of_a_grouped_product_are_those_of_its_rows() -> None:
    """Each of 12 rows is multiplied by one of 3 matrices, whether or not the ends of the groups are known."""
    for known in (False, True):
        b, (x, w, ends) = start((12, 4), (3, 4, 5), (3,))
        nests.grouped_product(b, x, w, 1, 1, 0, "float32", ends=ends if known else None)
        node = b.nodes[-1]
        points = np.prod([node.space[d].size for d in node.ops[0].worked])
        assert node.ops[0].flops_per_point * points == 2 * 12 * 4 * 5
        assert ("m" in kinds(node, "parallel")) == known
