"""A recorded program without views that undo each other, and without what is computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pase.backends.torch.spmd.collectives import passed, there_and_back
from pase.backends.torch.spmd.record import whole
from pase.backends.torch.spmd.tidy import tidied
from tests.backends.torch.spmd.test_record import recorded

pytestmark = pytest.mark.torch

CASES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "reshapes": (lambda x: x.reshape(6, 4).reshape(24).reshape(2, 3, 4).exp(), ["exp"]),
    "one reshape is left": (lambda x: x.unsqueeze(0).reshape(6, 4).exp(), ["reshape", "exp"]),
    "permutes": (lambda x: x.transpose(0, 1).permute(1, 0, 2).exp(), ["exp"]),
    "one permute is left": (lambda x: x.transpose(0, 1).transpose(1, 2).exp(), ["permute", "exp"]),
    "a reshape of a permute stays": (
        lambda x: x.transpose(0, 1).reshape(24).exp(),
        ["transpose", "reshape", "exp"],
    ),
    "views made twice": (lambda x: x.reshape(24) * x.reshape(24), ["reshape", "mul"]),
    "the opposite of equality": (
        lambda x: x.masked_fill(~(x == x.sin()), 2.0),
        ["sin", "__ne__", "masked_fill"],
    ),
    "a sum of all elements": (lambda x: x.exp().reshape(24).reshape(6, 4).sum(), ["exp", "sum"]),
    "a flag that is compared with zero": (
        lambda x: x.masked_fill((x > 0).ne(0), 2.0),
        ["gt", "masked_fill"],
    ),
    "an op that nothing reads": (lambda x: (x.exp(), x.sin())[1], ["sin"]),
    "a call of the plan stays": (
        lambda x: (whole(lambda y: y + 1, x, name="edge"), x.sin())[1],
        ["edge", "sin"],
    ),
    "views around a sum of gradients": (
        lambda x: there_and_back(x.reshape(24), None, lambda y: y, lambda g: 2 * g, anyshape=True).reshape(
            2, 3, 4
        ),
        ["edge"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_shortest_program_computes_the_same(name: str) -> None:
    import torch

    make, wanted = CASES[name]
    x = torch.randn(2, 3, 4, requires_grad=True)
    into = recorded(make, x)
    tidied(into.graph)
    into.graph.lint()
    called = [n for n in into.graph.nodes if n.op.startswith("call")]
    assert [getattr(n.target, "__name__", n.target) for n in called] == wanted
    (made,) = into.module("M")(x)
    torch.testing.assert_close(made, make(x))
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (made, make(x))]
    torch.testing.assert_close(*slopes)


def test_constants_are_computed_once_and_differentiated_ops_are_not_joined() -> None:
    import torch

    def make(x: Any) -> Any:
        aten = torch.ops.aten
        a, b = (aten.arange.default(3) for _ in range(2))
        return aten.exp.default(x) * aten.exp.default(x) * a * b

    into = recorded(make, torch.randn(3, requires_grad=True))
    tidied(into.graph)
    called = [str(n.target) for n in into.graph.nodes]
    assert (called.count("aten.arange.default"), called.count("aten.exp.default")) == (1, 2)


def test_light_ops_that_only_lead_to_results_are_joined() -> None:
    """Those of one kind, in the order in which they need each other. What else reads, or has another form, stays."""
    import torch

    def make(x: Any) -> Any:
        a, b, c, d = x.detach().unbind()
        kept = [torch.mul(y, 0.5) for y in (a, b, c)]
        moved = [torch.add(k, y, alpha=0.1) for k, y in zip(kept, (b, c, a), strict=True)]
        other = torch.add(torch.mul(d, 0.5), d, alpha=0.2)
        read = torch.mul(d, 3.0)
        return (x * read.exp()).sum(), *moved, other, torch.mul(d, 2), torch.add(d, 1), torch.add(c, 1)

    x = torch.randn(4, 3, requires_grad=True)
    into = recorded(make, x)
    tidied(into.graph)
    into.graph.lint()
    called = Counter(
        getattr(n.target, "__name__", n.target) for n in into.graph.nodes if n.op != "placeholder"
    )
    assert (called["_foreach_mul"], called["_foreach_add"]) == (1, 2)
    assert (called["mul"], called["add"]) == (3, 1)  # times exp, 3.0 and 2; alpha 0.2
    (made,) = into.module("M")(x)
    torch.testing.assert_close(tuple(made), make(x))


@pytest.mark.parametrize("readers", [1, 2])
def test_a_sum_of_gradients_is_a_hook_on_a_value_that_nothing_else_reads(readers: int) -> None:
    """It then makes no view. The edge of a value with other readers must not see their gradients."""
    import torch

    def make(x: Any) -> Any:
        y = x.exp()
        made = there_and_back(y, None, passed, lambda g: 2 * g).sin()
        return made if readers == 1 else made + y

    x = torch.randn(3, requires_grad=True)
    into = recorded(make, x)
    tidied(into.graph)
    (edge,) = (n.target.run for n in into.graph.nodes if n.name == "edge")
    assert edge.hooks == (readers == 1)
    module = into.module("M")
    for _ in range(2):  # a hook must not stay for the next step
        (made,) = module(x)
        slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (made, make(x))]
        torch.testing.assert_close(*slopes)
