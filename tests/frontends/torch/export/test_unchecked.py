"""What PyTorch computes of values that it checks first: the same numbers, and the checks are back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pase.frontends.torch.export.traceable import traceable
from tests.backends.torch.trained import agrees

pytestmark = pytest.mark.torch


def measured(kind: str) -> Any:
    """A module of [16, 16] inputs with the loss ``kind``. y, z: activations."""
    import torch
    from torch.nn.functional import gaussian_nll_loss

    terms: dict[str, Callable[[Any, Any, Any], Any]] = {
        "likelihood": lambda y, z, x: (
            gaussian_nll_loss(y, x, z.square(), eps=0.1)
            + torch.nn.GaussianNLLLoss(full=True, reduction="sum", eps=0.1)(y, x, z[:, :1].exp()) / 100
            + gaussian_nll_loss(y, x, z[:, 0].exp()) / 2
        ),
        "covariance": lambda y, z, x: torch.cov(y).square().mean() + y.T.cov(correction=0).sum() + y[0].cov(),
        "weighted": lambda y, z, x: (
            torch.cov(y, aweights=z[0].abs()).square().mean()
            + torch.cov(y, fweights=torch.arange(16) + 1).square().mean()
            + torch.cov(y, fweights=torch.arange(16), aweights=z[0].exp()).square().mean()
        ),
        "correlation": lambda y, z, x: (
            torch.corrcoef(y).square().mean() + z.T.corrcoef()[0, 1] + y[0].corrcoef()
        ),
    }

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return terms[kind](self.a(x), self.b(x), x)

    torch.manual_seed(1)
    return Net()


@pytest.mark.parametrize("kind", ["likelihood", "covariance", "weighted", "correlation"])
def test_the_step_is_the_unsharded_one(kind: str) -> None:
    agrees(measured(kind), 2)


def test_checks_are_back_afterwards_even_after_an_error() -> None:
    import torch
    from torch.distributions import Distribution, Normal
    from torch.nn.functional import gaussian_nll_loss

    def now() -> tuple[object, ...]:
        held = (torch.cov, torch.corrcoef, torch.Tensor.cov, torch.Tensor.corrcoef, torch.Tensor.data)
        return (Distribution._validate_args, gaussian_nll_loss.__code__, *held)

    usual = now()
    with pytest.raises(ZeroDivisionError), traceable("step.py"):
        Normal(torch.zeros(1), -torch.ones(1))
        gaussian_nll_loss(torch.zeros(1), torch.zeros(1), -torch.ones(1))
        _ = 1 / 0
    assert now() == usual
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), -torch.ones(1), validate_args=True)
    with pytest.raises(ValueError, match="var has negative"):
        gaussian_nll_loss(torch.zeros(1), torch.zeros(1), -torch.ones(1))
