"""Gradients of activations while PyTorch runs backward call by call, with figures by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pase.machine import mesh_from
from pase.memory.gradients import gradients_by_call
from tests.memory.programs import graph_of

pytestmark = pytest.mark.torch
BATCH, WIDTH = 4, 16


def most(turns: int, of: Callable[[Any], Any], scaled: bool = False) -> float:
    """The most gradients at once of what is computed from a product's result y [batch, turns, width], in units of one
    turn of y. scaled: by a parameter [width], last of all."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.scale = torch.nn.Parameter(torch.empty(WIDTH))

        def forward(self, x: Any) -> Any:
            y = of(self.up(x))
            return (y * self.scale if scaled else y).tanh().sum()

    graph = graph_of(Model(), torch.empty(BATCH, turns, WIDTH))
    assert graph.facts.eager
    whole = {n.name: np.full(1, -1, dtype=np.int8) for n in graph.nodes}
    return float(gradients_by_call(graph, mesh_from("1", 1), whole).max()) / (4 * BATCH * WIDTH)


@pytest.mark.parametrize("turns", [3, 6])
def test_each_slice_makes_a_gradient_of_the_whole_and_adds_it_to_the_others(turns: int) -> None:
    """While that of y[:, t] is added, there are its own part, the part for tanh(h), and two of y's size."""

    def recurrent(y: Any) -> Any:
        h = y[:, 0]
        for t in range(1, turns):
            h = h.tanh() * y[:, t]
        return h

    assert most(turns, recurrent) == 2 * turns + 2


def test_a_residual_waits_for_its_branch_and_a_sum_hands_on_its_gradient() -> None:
    """Of y + tanh(sigmoid(y)), there are at most: the gradient of the sum, which is that of y too, and two in the
    branch."""
    assert most(1, lambda y: y + y.sigmoid().tanh()) == 3
    assert most(1, lambda y: y.sigmoid().tanh()) == 2
    assert most(1, lambda y: y + y.unsqueeze(0).squeeze(0)) == 2


def test_a_cross_entropy_makes_the_gradient_of_the_log_probabilities_first() -> None:
    """While that of the logits is made from it, there are two of their size, and the one number of the loss."""
    import torch

    labels = torch.zeros(BATCH, dtype=torch.long)
    assert most(1, lambda y: torch.nn.functional.cross_entropy(y.squeeze(1), labels)) == 2 + 1 / (
        BATCH * WIDTH
    )


def test_a_derivative_makes_arrays_on_the_way() -> None:
    """Those of y^2, which is grad * (2 * y^1): two, beside its gradient and that of the result. The gradient of what is
    repeated along a dim has the size of the result before it is summed."""
    assert most(1, lambda y: y.sigmoid().square()) == 4
    assert most(1, lambda y: y.sigmoid() + 1.0) == 2
    assert most(1, lambda y: y.sigmoid(), scaled=True) == 3


def _scratch(op: Any, operands: int) -> float:
    """How many arrays PyTorch's derivative of the op makes at once, besides those that it returns."""
    import torch

    from pase.backends.torch.memory import _LiveStorages, _mode

    xs = [torch.empty(64, 64, device="meta", requires_grad=True) for _ in range(operands)]
    y, storages = op(*xs), _LiveStorages()
    gradient = torch.empty_like(y)
    with _mode()(storages):
        made = torch.autograd.grad(y, xs, gradient, allow_unused=True)
        assert any(g is not None for g in made)
    return (storages.peak.nbytes - storages.living) / y.nbytes


def test_the_arrays_on_the_way_are_those_of_pytorchs_formulas() -> None:
    """Of each function of one or two operands that has a derivative, in quarters of the result: the most of its ops."""
    import torch

    from pase.frontends.torch.passed import PASSED
    from pase.frontends.torch.rules import POINTWISE
    from pase.ir.functions import FUNCTIONS

    moves = (PASSED, "where", "real", "imag", "conj", "_conj", "complex")
    ops = {op: name for op, name in POINTWISE.items() if FUNCTIONS[name].differentiable and op not in moves}
    ones = torch.ones(64, 64, device="meta")
    first = {
        "polygamma": 1,
        "igamma": ones,
        "igammac": ones,
        "special_zeta": ones,
    }  # PyTorch derives by the second
    found: dict[str, float] = {"sqrt": _scratch(lambda x: x**0.5, 1)}
    for op, name in {"square": "square", "div": "div", "pow": "pow", **ops}.items():
        run, operands = getattr(torch.ops.aten, op), 2
        if op in first:
            run, operands = partial(run, first[op]), 1
        elif op == "reciprocal" or FUNCTIONS[name].operands == (1, 1):
            operands = 1
        arrays = round(4 * _scratch(run, operands)) / 4
        found[name] = max(found.get(name, 0.0), arrays)
    assert found == {name: FUNCTIONS[name].scratch for name in found}
    assert len(found) > 30
