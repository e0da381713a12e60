"""Exports leave the module as it is, and take a loss of the module and its batch."""

from __future__ import annotations

from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends import registry
from tests.frontends.torch.bodies import linear

pytestmark = pytest.mark.torch


def test_tensors_of_the_module_stay_its_own() -> None:
    import torch

    module = torch.nn.Linear(4, 4)
    before = dict(module.named_parameters())
    traced = registry.trace(module, torch.zeros(2, 4), loss=lambda m, x: m(x).sum())
    assert all(p is before[k] for k, p in module.named_parameters())
    assert traced.param_paths == ("weight", "bias")


@pytest.mark.parametrize("criterion", ["cross_entropy", "CrossEntropyLoss", "of outputs", "of one"])
def test_a_criterion_given_as_a_loss_is_refused(criterion: str) -> None:
    """The message says how a loss is called. An error inside of a real loss is reported as it is."""
    import torch
    from torch.nn.functional import cross_entropy

    given: Any = {
        "cross_entropy": cross_entropy,
        "CrossEntropyLoss": torch.nn.CrossEntropyLoss(),
        "of outputs": lambda made, y: cross_entropy(made, y),
        "of one": lambda made, x, y: made.reshape(-1).sum(),
    }[criterion]
    x, y = torch.zeros(16, 4), torch.zeros(16, dtype=torch.long)
    with pytest.raises(PaseError, match=r"loss\(module, \*batch\), here with \(Linear") as e:
        registry.trace(linear(), x, y, loss=given)
    assert e.value.where == "loss" and "lambda module" in e.value.fix
    with pytest.raises(PaseError, match=r"cannot export Linear.*TypeError: relu"):
        registry.trace(linear(), x, y, loss=lambda m, x, y: torch.relu(m(x), y, y, y).sum())


def test_a_batch_given_as_a_tuple_before_its_loss_says_how_to_give_it() -> None:
    import torch

    module, x, y = torch.nn.Linear(4, 2), torch.zeros(8, 4), torch.zeros(8, 2)
    with pytest.raises(PaseError) as e:
        registry.trace(module, (x, y), loss=lambda m, a, b: torch.nn.functional.mse_loss(m(a), b))
    assert (
        e.value.where == "loss"
        and "(Linear, tuple)" in e.value.what
        and "(module, x, y, loss)" in e.value.fix
    )


def test_a_table_that_forward_bounds_is_refused_with_what_bounds_it_later() -> None:
    import torch

    table = torch.nn.Embedding(8, 4, max_norm=1.0)
    with pytest.raises(PaseError, match="max_norm") as e:
        registry.trace(table, torch.zeros(4, dtype=torch.long), loss=lambda m, x: m(x).square().mean())
    assert e.value.where == "weight" and "after the optimizer's update" in e.value.fix
