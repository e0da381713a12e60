"""Derivatives that the user's code defines."""

from __future__ import annotations

from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.errors import PaseError
from tests.backends.torch.trained import agrees
from tests.backends.torch.unwatched_models import refused

pytestmark = pytest.mark.torch


def test_what_a_step_would_lose_is_refused() -> None:
    import torch

    for message, (module, loss) in refused().items():
        with pytest.raises(PaseError, match=message):
            pase.compile(module, torch.randn(16, 16), devices=2, loss=loss)


def test_a_hook_on_a_parameter_is_refused() -> None:
    import torch

    x, module = torch.randn(16, 16), torch.nn.Linear(16, 8)
    plan = pase.compile(module, x, devices=1, loss=lambda m, x: m(x).square().mean()).torch
    module.weight.register_hook(lambda g: 2 * g)

    def on_rank(rank: int) -> None:
        with pytest.raises(PaseError) as e:
            plan.parallelize(module)
        assert e.value.where == "module.weight"

    on_ranks(1, on_rank)


def test_a_functions_derivative_is_its_own_where_its_operand_is_infinite() -> None:
    """The sign of masked scores, with the derivative of the scores."""
    import torch

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            scores = self.a(x) + (x > 0.5).to(x.dtype).log()
            return (Sign.apply(scores) * self.b(x)).sin().mean()

    torch.manual_seed(1)
    agrees(Net(), 2)
