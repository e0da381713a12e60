"""A part of an array is copied where backward keeps nothing else of the array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pase.backends.torch.spmd.collectives import there_and_back
from pase.backends.torch.spmd.parts import SavedTensors
from pase.backends.torch.spmd.tidy import tidied
from tests.backends.torch.spmd.test_record import recorded

pytestmark = pytest.mark.torch


def _edge(x: Any) -> Any:
    import torch

    return there_and_back(
        x, None, lambda y: y.narrow(0, 0, 2), lambda g: torch.nn.functional.pad(g, (0, 0, 0, 6))
    )


CASES: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "a part": (lambda x: (x + 1).narrow(0, 2, 2).sin(), 1, 8),
    "a part of a later dim": (lambda x: (x + 1).narrow(1, 1, 2).sin(), 1, 16),
    "a view of a part": (lambda x: (x + 1).narrow(0, 2, 2).transpose(0, 1).sin(), 1, 8),
    "a part of a part": (lambda x: (x + 1).narrow(0, 2, 4).narrow(1, 1, 2).sin(), 1, 8),
    "a part by an edge": (lambda x: _edge(x + 1).sin(), 1, 8),
    "a part that two ops keep": (lambda x: (p := (x + 1).narrow(0, 2, 2)).sin() * p, 1, 16),
    "a part that nothing keeps": (lambda x: (x + 1).narrow(0, 2, 2) + 1, 0, 0),
    "the whole array is kept too": (lambda x: (y := x + 1).sin().sum() + y.narrow(0, 2, 2).sin(), 0, 32),
    "the parts are all of it": (
        lambda x: (y := x + 1).narrow(0, 0, 4).sin() + y.narrow(0, 4, 4).cos(),
        0,
        32,
    ),
    "a part of an input": (lambda x: x.narrow(0, 2, 2).sin(), 0, 32),
    "the user's own part": (lambda x: (x + 1)[2:4].sin(), 0, 32),
}
"""What a part is taken of -> (the function of 8 x 4 numbers, its copies, the numbers that backward keeps)."""


def _kept(make: Callable[[], Any]) -> int:
    """The numbers in the arrays that autograd keeps."""
    import torch

    arrays: dict[int, Any] = {}

    def pack(x: Any) -> Any:
        arrays[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        make()
    return sum(a.nbytes() for a in arrays.values()) // 8


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_copied_where_nothing_else_is_kept(name: str) -> None:
    import torch

    make, copies, kept = CASES[name]
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    saved = SavedTensors()
    with saved.noted():
        into = recorded(make, x)
    tidied(into.graph)
    saved.copy_parts(into.graph)
    into.graph.lint()
    module = into.module("M")
    assert [n.target for n in into.graph.nodes].count("clone") == copies
    assert _kept(lambda: module(x)) == kept
    (made,) = module(x)
    torch.testing.assert_close(made, make(x), rtol=0, atol=0)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (made, make(x))]
    torch.testing.assert_close(*slopes, rtol=0, atol=0)
