"""Writes in place without a gradient: of values that have one they are refused, of others they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends import registry
from tests.backends.torch.trained import agrees

pytestmark = pytest.mark.torch


def traced(write: Callable[[Any, Any], object]) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            y = self.a(x)
            write(y, x)
            return (y * self.b(x)).sin().mean()

    registry.trace(Net(), torch.randn(8, 16))


def quietly(write: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    import torch

    return torch.no_grad()(write)


@pytest.mark.parametrize("kind", ["clamp", "view", "mask", "copy", "detach", "data"])
def test_a_value_with_a_gradient_is_not_written_without(kind: str) -> None:
    """PyTorch keeps the gradient of the value before the write; without the write, it would be cut off."""
    writes: dict[str, Callable[[Any, Any], object]] = {
        "clamp": quietly(lambda y, x: y.clamp_(min=0.1)),
        "view": quietly(lambda y, x: y[:, :3].reshape(-1, 3).mul_(2)),
        "mask": quietly(lambda y, x: y.masked_fill_(x > 0, 0.0)),
        "copy": quietly(lambda y, x: y[:, 0].copy_(x[:, 1])),
        "detach": lambda y, x: y.detach().mul_(2),
        "data": lambda y, x: y.data.mul_(2),
    }
    with pytest.raises(PaseError, match="writes in place into a value that has a gradient") as e:
        traced(writes[kind])
    assert "test_writes.py" in str(e.value) and ".detach()" in e.value.fix


def test_other_writes_run() -> None:
    import torch

    class Net(torch.nn.Module):
        seen: Any
        teacher: Any

        def __init__(self) -> None:
            super().__init__()
            self.a, self.teacher = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16).requires_grad_(False)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: Any) -> Any:
            y, mask = self.a(x), torch.zeros_like(x)
            with torch.no_grad():
                mask.scatter_(1, y.argmax(1, keepdim=True), 1.0)
                soft = y.double().clone().mul_(2).softmax(-1)
                self.seen.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.teacher.weight.lerp_(self.a.weight, 0.1)
                target = torch.relu_(self.teacher(x))
            out = torch.zeros_like(y)
            out[:, :8] = y[:, 8:]
            y.mul_(1.5)
            return ((y * mask).sum(1) + (out - soft).square().mean(1) + (y - target).square().mean(1)).mean()

    torch.manual_seed(1)
    agrees(Net(), 2)
