"""Calls of PyTorch's functions are recorded as a graph that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pase.backends.torch.spmd.record import Drawn, ProgramCall, Recording, at_layer, recorder, whole
from pase.backends.torch.spmd.rules import seeded
from pase.errors import PaseError

pytestmark = pytest.mark.torch


def recorded(make: Callable[..., Any], *inputs: Any, base: int = 0) -> Recording:
    import torch
    from torch.fx import Graph

    into = Recording(graph=Graph(), base=base, device=torch.device("cpu"))
    for i, x in enumerate(inputs):
        into.enter(f"x{i}", x)
    with into.running():
        into.returned(make(*inputs))
    return into


def test_functions_methods_and_properties_are_recorded() -> None:
    import torch

    def make(x: Any, y: Any) -> Any:
        a, b = torch.split(x, 2)
        z = torch.ops.aten.mul.Tensor(self=a.T, other=2.0) + b.mT[:, 1:] @ y[None]
        return torch.where(z > 0, z, z.new_zeros(()))

    x, y = torch.randn(4, 2), torch.randn(2)
    into = recorded(make, x, y)
    (made,) = into.module("M")(x, y)
    torch.testing.assert_close(made, make(x, y))
    assert recorder() is None


def test_a_tensor_that_nothing_computes_is_part_of_the_program() -> None:
    import torch

    table = torch.randn(3)
    into = recorded(lambda x: x * table, torch.randn(3))
    assert list(into.held) == ["constant_0"]
    torch.testing.assert_close(into.module("M")(torch.ones(3)), (table,))


def test_random_values_follow_the_seed_of_the_step() -> None:
    import torch

    def make(x: Any) -> Any:
        with seeded(1007, x.device):
            y = torch.rand(3)
        return x + y

    into = recorded(make, torch.zeros(3), base=1000)
    run = into.module("M")
    assert (
        sum(isinstance(n.target, ProgramCall) and isinstance(n.target.run, Drawn) for n in run.graph.nodes)
        == 1
    )
    for base in (1000, 2000):
        torch.manual_seed(base + 7)
        (made,) = run(base, torch.zeros(3))
        torch.testing.assert_close(made, torch.rand(3))


def test_a_gradient_that_nobody_watches_stays_away() -> None:
    import torch

    def make(x: Any) -> Any:
        with torch.no_grad():
            y = x * x
        return y * x

    into = recorded(make, torch.randn(3, requires_grad=True))
    x = torch.tensor([2.0], requires_grad=True)
    (made,) = into.module("M")(x)
    made.sum().backward()
    assert x.grad is not None and x.grad.item() == 4.0


def test_a_function_of_ours_is_one_call_and_layers_are_noted() -> None:
    import torch

    def double(x: Any) -> Any:
        return x + x

    def make(x: Any) -> Any:
        with at_layer(lambda: "up.0"):
            return whole(double, x, name="double").exp()

    into = recorded(make, torch.ones(2))
    nodes = [n for n in into.graph.nodes if n.op.startswith("call")]
    assert [n.meta["pase_layer"] for n in nodes] == ["up.0"] * 2
    assert "plan_double(x0)" in into.module("M").code


def test_a_write_in_place_is_refused() -> None:
    import torch

    with pytest.raises(PaseError) as e:
        recorded(lambda x: x.exp().add_(1), torch.ones(2))
    assert "add_" in e.value.what
