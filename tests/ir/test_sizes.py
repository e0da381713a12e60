"""Sizes: printed text is read back, arithmetic on symbols is exact, and hostile text is refused quickly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.ir import parse_size, symbol
from pase.ir.sizes import bind_size, quotient

VALUES = {"b": 12, "s": 5}

leaves = st.integers(1, 40).map(str) | st.sampled_from(["b", "s"])
expressions = st.recursive(
    leaves,
    lambda x: (
        st.builds("({} {} {})".format, x, st.sampled_from(["+", "-", "*"]), x)
        | st.builds("{}({}, {})".format, st.sampled_from(["max", "min"]), x, x)
        | st.builds("({} // {})".format, x, st.integers(1, 9))
        | st.builds("({} % {})".format, x, st.integers(1, 9))
    ),
    max_leaves=4,
)


@settings(max_examples=40)
@given(expressions)
def test_reading_agrees_with_python(text: str) -> None:
    """Bound to numbers, a size has the value that Python gives the same text. Printed, it is read back."""
    wanted = eval(text, {"__builtins__": {}, "max": max, "min": min}, VALUES)
    size = parse_size(text)
    assert bind_size(size, VALUES) == wanted
    if isinstance(size, int):
        assert size == wanted
    else:
        again: Any = parse_size(str(size))
        assert again == size


@given(st.integers(1, 300), st.integers(1, 300))
def test_quotient_is_exact(a: int, b: int) -> None:
    q = quotient(a, b)
    assert (q is None) == (a % b != 0) and (q is None or q * b == a)  # type: ignore[operator]
    n = symbol("n")
    assert quotient(a * b * n, b * n) == a and quotient(n + 1, 2) is None


@pytest.mark.parametrize(
    ("text", "same"),
    [("3*b^2", "3*b**2"), ("floordiv(4*b, 2)", "2*b"), ("mod(b, 7)", "b % 7"), ("Max(b, s)", "max(b, s)")],
)
def test_jax_and_sympy_spellings(text: str, same: str) -> None:
    assert parse_size(text) == parse_size(same)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b b",
        "b +",
        "1.5",
        "__import__('os')",
        "b.real",
        "b[0]",
        "lambda: 1",
        "b // 0",
        "b / 2",
        "'b'",
        "True",
        "9" * 30,
        "b" * 500,
        "((a+b+c+d)**16)**16 // (a+b)",
        "9**9**9",
        "2**10**10",
        "floor(b, s)",
        "max()",
        "(" * 200 + "b" + ")" * 200,
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(PaseError):
        parse_size(text)


def test_a_size_must_be_whole() -> None:
    with pytest.raises(PaseError, match="not a whole number"):
        bind_size(symbol("b") / 8, {"b": 12})  # type: ignore[operator]
