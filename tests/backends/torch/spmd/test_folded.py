"""Constants of a recorded program are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pase.backends.torch.spmd.folded import folded
from pase.backends.torch.spmd.tidy import tidied
from tests.backends.torch.spmd.test_record import recorded

pytestmark = pytest.mark.torch


def arange(n: int) -> Any:
    import torch

    return torch.ops.aten.arange.default(n, device=torch.device("cpu"))


CASES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "positions": (lambda x: x[arange(4).add(1).clip(0, 1)], ["__getitem__"]),
    "which positions are here": (
        lambda x: x.masked_fill(~(arange(3).clip(0, 1) == arange(3)).unsqueeze(-1), 0),
        ["masked_fill"],
    ),
    "a number of a tensor's dtype": (lambda x: x.gt(x.int().new_full((), 3)), ["int", "gt"]),
    "not a table": (
        lambda x: x.masked_fill(arange(3)[:, None] > arange(4)[None, :], 0),
        ["gt", "masked_fill"],
    ),
    "not fractions, which are not the same on every device": (lambda x: x * arange(4).sin(), ["sin", "mul"]),
    "not what is drawn": (lambda x: x + draws(), ["randint", "add"]),
}


def draws() -> Any:
    import torch

    return torch.ops.aten.randint.default(5, [4], device=torch.device("cpu"))


@pytest.mark.parametrize("name", CASES)
def test_whole_numbers_of_the_program_alone_are_computed_once(name: str) -> None:
    import torch

    make, wanted = CASES[name]
    x = torch.randn(2, 3, 4, requires_grad=True)
    into = recorded(make, x)
    tidied(into.graph)
    into.held = folded(into.graph, into.held)
    into.graph.lint()
    called = [n for n in into.graph.nodes if n.op.startswith("call")]
    names = [str(getattr(n.target, "__name__", n.target)).removesuffix(".default") for n in called]
    assert names == wanted
    torch.manual_seed(0)
    (made,) = into.module("M")(x)
    torch.manual_seed(0)
    torch.testing.assert_close(made, make(x))
