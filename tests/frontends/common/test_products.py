"""Matrix products and einsum, run by their access maps, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.common.products import einsum, matmul
from tests.frontends.common.site import OneOp

MATMULS = [
    ((5, 3), (3, 4)),
    ((3,), (3, 4)),
    ((5, 3), (3,)),
    ((3,), (3,)),
    ((2, 5, 3), (2, 3, 4)),
    ((2, 5, 3), (3, 4)),
    ((5, 3), (2, 3, 4)),
    ((2, 1, 5, 3), (6, 3, 4)),
    ((2, 6, 5, 3), (1, 6, 3, 4)),
    ((2, 1, 1, 3), (1, 6, 3, 1)),
]


@pytest.mark.parametrize(("x", "y"), MATMULS)
def test_matmul_is_numpys(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    c = OneOp()
    a, b = c.input(*x), c.input(*y)
    made = matmul(c, a, b)
    wanted = c.array(a) @ c.array(b)
    assert made.shape == wanted.shape
    np.testing.assert_allclose(c.computed(made), wanted, rtol=1e-12)
    assert c.flops == 2 * x[-1] * wanted.size


def test_a_product_on_merged_rows_may_split_what_was_merged() -> None:
    """[(2 4) 8] that was made from [2 4 8] is multiplied as [2 4 8]."""
    c = OneOp()
    x = c.input(2, 4, 8)
    made = matmul(c, c.reshape(x, (8, 8)), c.input(8, 3))
    (dot,) = (n for n in c.b.nodes if n.kind == "matmul")
    assert made.shape == (8, 3) and sorted(d.size for d in dot.space) == [2, 3, 4, 8]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("x", "y", "what"),
    [
        ((5, 3), (4, 5), "3 columns do not match 4 rows"),
        ((), (4, 5), "an operand is a scalar"),
        ((2, 5, 3), (4, 3, 5), "do not broadcast"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x: tuple[int, ...], y: tuple[int, ...], what: str) -> None:
    c = OneOp()
    with pytest.raises(PaseError, match=what) as e:
        matmul(c, c.input(*x), c.input(*y))
    assert e.value.where == c.place


EINSUMS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("bqhd,bshd->bhqs", [(2, 5, 3, 4), (2, 6, 3, 4)]),
    ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
    ("...i,i->...", [(2, 3, 4), (4,)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("i,j->ij", [(2,), (3,)]),
    ("ij,ij->i", [(2, 3), (2, 3)]),
    ("bi,ij->b", [(2, 3), (3, 4)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EINSUMS)
def test_einsum_is_numpys(equation: str, shapes: list[tuple[int, ...]]) -> None:
    c = OneOp()
    values = [c.input(*s) for s in shapes]
    made = einsum(c, equation, values)
    wanted = np.einsum(equation, *map(c.array, values))
    assert made.shape == wanted.shape
    np.testing.assert_allclose(c.computed(made), wanted, rtol=1e-12)


def test_a_dim_that_is_only_summed_is_summed_before_the_product() -> None:
    c = OneOp()
    einsum(c, "bi,ij->b", [c.input(2, 3), c.input(3, 4)])
    assert c.flops == 2 * 2 * 3


@pytest.mark.parametrize(
    ("equation", "what"),
    [
        ("ij,jk->ik", "does not match 1 operands"),
        ("ijk->i", "does not fit shape"),
        ("ij->iz", "has a dim in its result that no operand has"),
        ("i1->i", "does not fit shape"),
    ],
)
def test_equations_that_do_not_fit_are_refused(equation: str, what: str) -> None:
    c = OneOp()
    with pytest.raises(PaseError, match=what):
        einsum(c, equation, [c.input(2, 3)])
    with pytest.raises(PaseError, match="dim 'j' has both size 3 and 4"):
        einsum(c, "ij,jk->ik", [c.input(2, 3), c.input(4, 5)])
