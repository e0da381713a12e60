"""Several steps of training under some strategies, compared with one process without pase."""

from __future__ import annotations

import copy
from typing import Any

from bench.cases.plans import Case
from bench.cases.torch_ranks import on_ranks
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.frontends import registry

RANKS = 4
STRATEGIES = ("data_parallel", "random1@2x2", "random4@2x2")


def whole(t: Any) -> Any:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def state(module: Any) -> dict[str, Any]:
    found = (*module.named_parameters(), *module.named_buffers(remove_duplicate=False))
    return {path: whole(t) for path, t in found}


def agrees(module: Any, steps: int) -> None:
    """Train under each strategy, and compare with one process without pase."""
    import torch

    module.double()
    batches = [torch.randn(16, 16, dtype=torch.float64) for _ in range(steps)]
    alone, losses = copy.deepcopy(module), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        loss = alone(x.clone())  # a step may write into its batch
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    expected = state(alone)
    traced = registry.trace(copy.deepcopy(module), batches[0])
    problem = SplitProblem.of(traced.graph, RANKS, machine.load("h100x8"), "analytic", "adam")
    for strategy in STRATEGIES:
        plan = Case(traced=traced, problem=problem).plan(strategy)
        if plan is None:  # no data parallelism without a batch
            assert strategy == "data_parallel"
            continue
        run = plan.torch
        assert run.program.ops and run.leaves  # computed once here, not once per thread

        def on_rank(rank: int, run: Any = run) -> Any:
            own = copy.deepcopy(module)
            step = run.train_step(own, torch.optim.SGD, lr=0.1)
            return [step(x.clone()) for x in batches], state(own)

        for found, after in on_ranks(RANKS, on_rank):
            torch.testing.assert_close(found, losses, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-10)
