"""Parameters in the memory of other tensors are refused; parts of one memory that have nothing in common are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends.registry import trace
from pase.frontends.torch.export.aliases import check_aliases

pytestmark = pytest.mark.torch


def pair(second: Callable[[Any, Any], None], device: str = "cpu") -> Any:
    """Two linear layers, of which the second is changed to hold something of the first."""
    import torch

    with torch.device(device):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False))
    second(module[1], module[0])
    return module


def parameter(b: Any, a: Any) -> None:
    import torch

    b.weight = torch.nn.Parameter(a.weight)


def pretrained(b: Any, a: Any) -> None:
    import torch

    b.weight = torch.nn.Embedding.from_pretrained(a.weight.detach().t(), freeze=False).weight


def frozen(b: Any, a: Any) -> None:
    parameter(b, a)
    b.weight.requires_grad_(False)


def buffer(b: Any, a: Any) -> None:
    b.register_buffer("before", a.weight.data[1:3])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("second", [parameter, pretrained, frozen, buffer])
def test_a_trained_parameter_in_the_memory_of_another_tensor_is_refused(second: Any, device: str) -> None:
    other = "1.before" if second is buffer else "1.weight"
    with pytest.raises(
        PaseError, match=rf"'0\.weight' and '{other}' are two tensors in the same memory"
    ) as e:
        check_aliases(pair(second, device), "pair")
    assert e.value.where == "pair" and "clone()" in e.value.fix


def test_it_is_refused_before_anything_is_planned() -> None:
    import torch

    with pytest.raises(PaseError, match="in the same memory"):
        trace(pair(parameter), torch.ones(8, 4), loss=lambda m, x: m(x).mean())


def tied(b: Any, a: Any) -> None:
    b.weight = a.weight


def halves(b: Any, a: Any) -> None:
    """Two parts of one memory, as a recurrent layer's weights on a GPU."""
    import torch

    both = torch.zeros(8, 4)
    a.weight, b.weight = (torch.nn.Parameter(x) for x in both.chunk(2))


def columns(b: Any, a: Any) -> None:
    import torch

    both = torch.zeros(4, 8)
    a.weight, b.weight = (torch.nn.Parameter(x) for x in both.chunk(2, 1))


def untrained(b: Any, a: Any) -> None:
    parameter(b, a)
    for module in (a, b):
        module.weight.requires_grad_(False)


@pytest.mark.parametrize("second", [tied, halves, columns, untrained])
def test_tensors_that_no_update_of_another_changes_are_not(second: Any) -> None:
    check_aliases(pair(second), "pair")
