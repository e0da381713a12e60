"""Gradients of activations while PyTorch runs backward call by call, with figures by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pase.machine import mesh_from
from pase.memory.gradients import gradients_by_call
from tests.memory.programs import graph_of

pytestmark = pytest.mark.torch
BATCH, WIDTH = 4, 16


def most(turns: int, of: Callable[[Any], Any]) -> float:
    """The most gradients at once of what is computed from a product's result y [batch, turns, width], in units of one
    turn of y."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return of(self.up(x)).sin().sum()

    graph = graph_of(Model(), torch.empty(BATCH, turns, WIDTH))
    assert graph.facts.eager
    whole = {n.name: np.full(1, -1, dtype=np.int8) for n in graph.nodes}
    return float(gradients_by_call(graph, mesh_from("1", 1), whole).max()) / (4 * BATCH * WIDTH)


@pytest.mark.parametrize("turns", [3, 6])
def test_each_slice_makes_a_gradient_of_the_whole_and_adds_it_to_the_others(turns: int) -> None:
    """While that of y[:, t] is added, there are its own part, the part for sin(h), and two of y's size."""

    def recurrent(y: Any) -> Any:
        h = y[:, 0]
        for t in range(1, turns):
            h = h.sin() * y[:, t]
        return h

    assert most(turns, recurrent) == 2 * turns + 2


def test_a_residual_waits_for_its_branch_and_a_sum_hands_on_its_gradient() -> None:
    """Of y + sin(cos(y)), there are at most: the gradient of the sum, which is that of y too, and two in the branch."""
    assert most(1, lambda y: y + y.cos().sin()) == 3
    assert most(1, lambda y: y.cos().sin()) == 2
    assert most(1, lambda y: y + y.unsqueeze(0).squeeze(0)) == 2


def test_a_cross_entropy_makes_the_gradient_of_the_log_probabilities_first() -> None:
    """While that of the logits is made from it, there are two of their size, and the one number of the loss."""
    import torch

    labels = torch.zeros(BATCH, dtype=torch.long)
    assert most(1, lambda y: torch.nn.functional.cross_entropy(y.squeeze(1), labels)) == 2 + 1 / (
        BATCH * WIDTH
    )
