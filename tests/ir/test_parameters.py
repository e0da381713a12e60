"""Parameters of ops: text and back, and checked against shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.errors import PaseError
from pase.ir import Graph, digest, from_text, to_text, verify
from pase.ir.parameters import (
    Concatenate,
    Cumulative,
    EqualPart,
    Iota,
    Pad,
    Parameters,
    Reshape,
    Slice,
    Sort,
    StackRow,
    Take,
    Windows,
    parameters_text,
    read_parameters,
)
from pase.ops import GraphBuilder, nests

EVERY = [
    Slice(start=(0, 5), step=(1, -2)),
    Slice(start=(), step=()),
    EqualPart(axis=1, index=2, count=4),
    Take(axis=1, index=(5, 0, 0)),
    Reshape(),
    StackRow(reverse=True),
    Pad(before=(-1, 2), interior=(0, 1), value=float("-inf")),
    Concatenate(axis=0),
    Cumulative(axis=1, reverse=True, exclusive=False),
    Sort(axis=0, descending=True),
    Iota(axis=0, start=0.5, step=-1),
    Windows(dilation=(1, 2)),
]


def graph(parameters: Parameters | None) -> Graph:
    """A slice [2, 3] of x [2, 6]."""
    b = GraphBuilder("g")
    x = b.input("x", (2, 6), "float32")
    y = nests.restrict(b, "slice", [x], (2, 3), [True, False], parameters)
    return b.finish([y])


@pytest.mark.parametrize("parameters", EVERY, ids=lambda p: type(p).__name__)
def test_text_is_read_back(parameters: Parameters) -> None:
    assert read_parameters(parameters_text(parameters)) == parameters
    made = graph(parameters)
    assert from_text(to_text(made)) == made
    assert digest(made) == digest(graph(None))


@pytest.mark.parametrize(
    "text",
    [
        "slice(start=0)",
        "slice(start=0 step=1 more=2)",
        "slice(start=0.5 step=1)",
        "equalpart(axis=true index=0 count=2)",
        "sort(axis=0 descending=1)",
        "iota(axis=0 start=_ step=1)",
        "concatenate(axis=)",
        "twist(axis=0)",
        "slice",
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(PaseError):
        read_parameters(text)
    with pytest.raises(PaseError, match="line"):
        from_text(to_text(graph(EVERY[0])).replace(parameters_text(EVERY[0]), text))


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        (Slice(start=(0,), step=(1,)), "do not have 2 dims"),
        (Slice(start=(0, 4), step=(1, 1)), "take 3 elements of a dim of 6"),
        (Slice(start=(0, 1), step=(1, -1)), "take 3 elements of a dim of 6"),
        (EqualPart(axis=1, index=2, count=2), "do not divide a dim of 6 into parts of 3"),
        (Concatenate(axis=2), "do not name one of 2 dims"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(parameters: Parameters, what: str) -> None:
    verify(graph(Slice(start=(0, 5), step=(1, -2))))
    verify(graph(EqualPart(axis=1, index=1, count=2)))
    with pytest.raises(PaseError, match=what):
        verify(graph(parameters))


def test_a_constant_of_one_number_says_so() -> None:
    b = GraphBuilder("g")
    t = b.constant((2, 3), "float32", -1.5)
    made = b.finish([t])
    assert from_text(to_text(made)) == made and made.tensors[t.name].number == -1.5
    plain = replace(made, tensors={t.name: replace(made.tensors[t.name], number=None)})
    assert digest(made) == digest(plain) and to_text(made) != to_text(plain)
