"""Literals of ops: numbers of any kind, as text and back, and checked against the function's operands."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.ir import Graph, digest, from_text, functions, to_text, verify
from pase.ir.literals import literal, literals_text, read_literals
from pase.ops import GraphBuilder, nests

NUMBERS = st.one_of(
    st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.complex_numbers(allow_nan=False)
)


def graph(*operands: float | None) -> Graph:
    """x and these numbers, multiplied."""
    b = GraphBuilder("g")
    x = b.input("x", (2, 3), "float32")
    (y,) = nests.elementwise(b, functions.MUL, [x, *operands], ["float32"])
    return verify(b.finish([y]))


@given(st.lists(st.one_of(st.none(), NUMBERS), max_size=4))
def test_text_is_read_back(found: list[bool | float | complex | None]) -> None:
    given = tuple(None if n is None else literal(n) for n in found)
    text = literals_text(given)
    back = read_literals(text[1:-1].split())
    assert back == given and [*map(type, back or ())] == [*map(type, given)]


@pytest.mark.parametrize("number", [0.1, -1e300, math.inf, math.nan, -7, True, 1 - 2j])
def test_a_graph_with_literals_is_read_back(number: float) -> None:
    made = graph(number)
    assert from_text(to_text(made)) == made
    assert made.nodes[1].ops[0].numbers == (None, literal(number))


def test_an_operand_that_is_not_known_stays_so() -> None:
    made = graph(None)
    assert made.nodes[1].ops[0].numbers is None and "literals=?" in to_text(made)
    assert from_text(to_text(made)) == made


def test_literals_do_not_change_digests_and_texts_of_earlier_versions_are_read() -> None:
    assert digest(graph(0.5)) == digest(graph(2.0)) == digest(graph(None))
    earlier = to_text(graph(0.5)).replace(" | literals=(_ 0.5)", "")
    assert from_text(earlier) == graph(None)


def test_numbers_of_numpy_are_numbers() -> None:
    assert literal(np.float64(0.5)) == 0.5 and literal(np.array([[True]])) is True
    assert literal(np.float32("nan")) is literal(float("nan"))
    with pytest.raises(PaseError, match="not a number"):
        literal("0.5")


@pytest.mark.parametrize(
    ("function", "numbers"),
    [(functions.MUL, ()), (functions.SUB, (1.0, 2.0)), (functions.WHERE, (1.0,)), (functions.EXP, (1.0,))],
)
def test_operands_that_are_missing_or_too_many_are_refused(
    function: functions.Function, numbers: tuple[float, ...]
) -> None:
    b = GraphBuilder("g")
    x = b.input("x", (2, 3), "float32")
    with pytest.raises(PaseError) as e:
        nests.elementwise(b, function, [x, *numbers], ["float32"])
    assert f"'{function.name}' has {1 + len(numbers)} operands" in e.value.what


def test_literals_that_do_not_fit_the_reads_are_refused() -> None:
    made = graph(0.5)
    node = made.nodes[1]
    wrong = replace(node, ops=(replace(node.ops[0], literals=(None, None)),))
    with pytest.raises(PaseError, match="do not fit its 1 reads"):
        verify(replace(made, nodes=(made.nodes[0], wrong, *made.nodes[2:])))


def test_a_word_that_is_no_number_is_refused() -> None:
    text = to_text(graph(0.5))
    with pytest.raises(PaseError, match="'half' is not a number"):
        from_text(text.replace("0.5", "half"))
    with pytest.raises(PaseError, match="expected a number"):
        from_text(text.replace("0.5)", "0.5"))
