"""Small values: what is computed has the operand's dtype, and what cannot be computed is left to the op's rule."""

from __future__ import annotations

import numpy as np
import pytest

from pase.frontends.common import folding
from pase.ir.functions import FUNCTIONS


def test_the_table_names_functions_of_the_graph() -> None:
    assert set(folding.ELEMENTWISE) <= set(FUNCTIONS)


def test_boolean_results_are_those_of_boolean_functions() -> None:
    x = np.ones(2, np.float32)
    for name in folding.ELEMENTWISE:
        fewest, _ = FUNCTIONS[name].operands or (1, 1)
        made = folding.elementwise(name, *[x] * fewest)
        assert (made.dtype == bool) == FUNCTIONS[name].boolean, name
        assert made.dtype in (bool, np.float32), name


def test_quotients_of_large_integers_are_exact() -> None:
    """Through floating point, 2**60 + 1 would lose its last digit."""
    n = np.array([2**60 + 1, -(2**60) - 1])
    assert folding.elementwise("div", n, np.array(1)).tolist() == n.tolist()
    assert folding.elementwise("div", np.array([7, -7]), np.array([-2, 2])).tolist() == [-3, -3]


@pytest.mark.parametrize("function", ["div", "rem", "mod", "floor_div"])
def test_an_integer_divided_by_zero_is_left_to_the_ops_rule(function: str) -> None:
    assert folding.folded(folding.elementwise, function, np.array([1]), np.array([0])) is None


def test_what_is_large_or_wrong_is_left_to_the_ops_rule() -> None:
    wide, one = np.zeros((4096, 1)), np.array(1)
    assert folding.folded(folding.elementwise, "add", wide, wide.T) is None
    assert folding.folded(folding.expand, one, [2**20, 2**20]) is None
    assert folding.folded(folding.repeated, np.ones(2), [2**40]) is None
    assert folding.folded(folding.arange, np.array(0), np.array(2**40), one) is None
    assert folding.folded(folding.arange, np.array(0), np.array(5), np.array(0)) is None
    assert folding.folded(folding.expand, one, [-1]) is None


def test_reductions_keep_the_dtype() -> None:
    a = np.array([[1, 2], [4, 4]], np.int32)
    assert folding.reduced("mean", a, [1], False).tolist() == [1, 4]
    assert folding.reduced("prod", a, None, True).tolist() == [[32]]
    assert folding.reduced("max", a, [0], False).dtype == np.int32
