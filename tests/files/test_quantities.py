"""Quantities as people write them: their units, and one clear refusal of what is none."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.files.quantities import bytes_text, parse_bytes, parse_factors, parse_rate, parse_seconds


@given(st.floats(1, 2**44))
def test_a_size_is_read_back_as_it_was_written(n: float) -> None:
    """The text has three digits, four below the next unit."""
    assert parse_bytes(bytes_text(n).replace(" ", ""), "here") == pytest.approx(n, rel=5.1e-3)


@pytest.mark.parametrize(
    ("text", "n"),
    [("1", 1), ("16e9", 16e9), ("2kb", 2000), ("2KiB", 2048), (" 1.5 MiB ", 1.5 * 2**20), ("3TB", 3e12)],
)
def test_units_of_bytes(text: str, n: float) -> None:
    assert parse_bytes(text, "here") == n


def test_times_and_rates_in_their_units() -> None:
    seconds = [parse_seconds(t, "here") for t in ("2s", "3ms", "50 US", "7ns", "0s")]
    assert seconds == pytest.approx([2, 3e-3, 50e-6, 7e-9, 0])
    assert [parse_rate(t, "here") for t in ("9B/s", "5GB/s", "8Gbit/s")] == [9, 5e9, 1e9]


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "1e999", "nan", "3 parsecs", "1..2"])
@pytest.mark.parametrize("parse", [parse_bytes, parse_rate])
def test_what_is_no_quantity_is_refused_with_its_place(parse, text: str) -> None:
    with pytest.raises(PaseError, match=re.escape(f"'{text}' is not a")) as e:
        parse(text, "--option")
    assert e.value.where == "--option" and e.value.fix.startswith("write")


@given(st.floats(0.01, 0.99), st.floats(1.01, 99), st.integers(2, 9))
def test_a_range_of_factors_has_its_ends_and_even_ratios(low: float, high: float, count: int) -> None:
    factors = parse_factors(f"{low:.5f}..{high:.5f}:{count}", "--vary")
    assert factors == tuple(sorted(factors)) and 1.0 in factors
    assert (factors[0], factors[-1]) == pytest.approx((low, high), rel=1e-3)
    inner = [f for f in factors if f != 1.0]
    if len(inner) == count:
        ratios = [b / a for a, b in itertools.pairwise(inner)]
        assert ratios == pytest.approx([(high / low) ** (1 / (count - 1))] * (count - 1), rel=1e-2)


@pytest.mark.parametrize(
    ("text", "why"), [("0.5..2:1", "1 factors"), ("two", "cannot be read"), ("0,1", "is 0")]
)
def test_factors_that_are_none_are_refused(text: str, why: str) -> None:
    with pytest.raises(PaseError, match=why) as e:
        parse_factors(text, "--vary")
    assert e.value.where == "--vary"
