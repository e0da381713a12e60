"""Pickles of plain values."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.files.plain_pickle import plain_values

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda x: st.lists(x) | st.tuples(x, x, x, x) | st.tuples(x) | st.dictionaries(st.text(), x),
    max_leaves=30,
)


@given(plain, st.integers(3, 5))  # bytes are a call in protocol 2
@settings(max_examples=25, deadline=None)
def test_plain_values_are_those_that_python_reads(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert plain_values(data, "x") == pickle.loads(data)
    assert plain_values(pickletools.optimize(data), "x") == value


def test_shared_values_stay_shared() -> None:
    one = [1]
    read: Any = plain_values(pickle.dumps([one, one]), "x")
    assert read[0] is read[1]


class Call:
    """Removes a file when Python reads it."""

    def __reduce__(self) -> Any:
        return os.remove, ("/nonexistent",)


@pytest.mark.parametrize("value", [Call(), io.StringIO, [1, {"a": Call()}], {1, 2}, 1j])
@pytest.mark.parametrize("protocol", [2, 4])
def test_whatever_names_code_is_refused(value: Any, protocol: int) -> None:
    with pytest.raises(PaseError) as e:
        plain_values(pickle.dumps(value, protocol), "f.pickle")
    assert e.value.where == "f.pickle"


@given(st.binary(max_size=40), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=120, deadline=None)
def test_damage_is_an_error(tail: bytes, at: int, byte: int) -> None:
    good = pickle.dumps({"segments": [{"a": 1, "b": [2.0, "x", None]}], "t": (1, 2)})
    broken = good[: at % len(good)] + bytes([byte]) + good[at % len(good) + 1 :]
    for data in (tail, b"\x80\x04" + tail, broken, good[: at % len(good)]):
        try:
            plain_values(data, "x")
        except PaseError:
            continue


def test_nothing_is_made_that_the_file_does_not_hold() -> None:
    for bomb in (
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00.",
        b"\x80\x04Nr\xff\xff\xff\xff.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
    ):
        try:
            assert plain_values(bomb, "x") is None
        except PaseError as e:
            assert "ends within" in str(e)


def test_a_key_that_holds_itself_many_times_over_is_refused() -> None:
    """Its hash visits every path: 2**200 of them."""
    nested = b")" + b"q\x00h\x00\x86" * 200  # (x, x) of the tuple before
    with pytest.raises(PaseError, match="a tuple as a key"):
        plain_values(b"\x80\x04}" + nested + b"Ns.", "x")
    assert plain_values(pickle.dumps({None: 1, 2: "x", "a": b"y"}), "x") == {None: 1, 2: "x", "a": b"y"}
