"""A model whose gradients are checked under several strategies."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from bench.cases.plans import Case
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.frontends import registry

RANKS = 4


def model() -> tuple[Any, Any]:
    """A model with a buffer that the step writes, a frozen and an unused parameter, and a target under no_grad."""
    import torch
    from torch import nn
    from torch.nn.functional import relu

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.norm, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
            self.fixed = nn.Parameter(torch.randn(16), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(8))

        def net(self, x: Any) -> Any:
            return self.head(self.norm(relu(self.enc(x * self.fixed))))

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                target = (self.net(x) / 0.5).softmax(-1)
            return -(target * self.net(x).log_softmax(-1)).sum(-1).mean()

    torch.manual_seed(0)
    return Net(), torch.randn(16, 16)


@cache
def given() -> tuple[Any, Any, Case]:
    """(module, batch, the module as traced and its problem)."""
    module, x = model()
    traced = registry.trace(copy.deepcopy(module), x)
    problem = SplitProblem.of(traced.graph, RANKS, machine.load("h100x8"), "analytic", "adam")
    return module, x, Case(traced=traced, problem=problem)


def run_of(case: Case, strategy: str) -> Any:
    plan = case.plan(strategy)
    assert plan is not None
    run = plan.torch
    assert run.program.ops and run.leaves  # computed once here, not once per thread
    return run
